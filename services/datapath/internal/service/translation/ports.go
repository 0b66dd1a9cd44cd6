// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package translation

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/count"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

const (
	// Ports is the number of node ports for connections to one backend on another node, per protocol (TCP, UDP).
	Ports = 10_000
	// smallShare is the number of ports that a sender may use without being counted.
	smallShare = 64
	// openPorts is the number of ports for established TCP connections. The rest is for new ones.
	openPorts = Ports - Ports/16
)

// backend is the backend that node ports are used for.
type backend struct {
	at       netip.AddrPort
	protocol uint8
}

// claim is a port of an established TCP connection.
type claim struct {
	entry
	connection conntrack.Connection
}

func (c claim) lastSeen() uint32 { return c.connection.LastSeen }

// ports counts the claims in one pass.
type ports struct {
	m *Maps
	// before and shares are the counters and shares at the start of the pass, so that concurrent changes by programs are
	// kept.
	before []uint32
	shares map[bpf.MapsSlShareKey]bpf.MapsSlShare
	found  []uint32
	held   map[bpf.MapsSlShareKey]uint32
	open   map[backend]map[uint32][]claim // by sender
}

func (m *Maps) beginPorts() (*ports, error) {
	p := &ports{
		m: m, before: make([]uint32, count.Cells), found: make([]uint32, count.Cells),
		shares: map[bpf.MapsSlShareKey]bpf.MapsSlShare{}, held: map[bpf.MapsSlShareKey]uint32{},
		open: map[backend]map[uint32][]claim{},
	}
	for i := range p.before {
		p.before[i] = m.counts.Get(uint32(i))
	}
	err := pin.EachEntry(m.share, m.gate.Read, func(keys []bpf.MapsSlShareKey, values []bpf.MapsSlShare) error {
		for i, k := range keys {
			p.shares[k] = values[i]
		}
		return nil
	})
	return p, err
}

// add counts the port of an answer, with its connection if there is one.
func (p *ports) add(e entry, connection conntrack.Connection) {
	if !e.Answer || e.Copy || e.Protocol == unix.IPPROTO_SCTP {
		return
	}
	sender := p.m.counts.Sender(e.Backend.Addr())
	p.found[p.m.counts.OfBackend(e.Source, e.Protocol)]++
	p.found[p.m.counts.OfSender(e.Source, e.Protocol, sender)]++
	p.held[shareKey(e.Source, e.Protocol, sender)]++
	if e.Protocol != unix.IPPROTO_TCP || connection.Flags&conntrack.Established == 0 || connection.Flags.Closing() {
		return
	}
	at := backend{e.Source, e.Protocol}
	if p.open[at] == nil {
		p.open[at] = map[uint32][]claim{}
	}
	p.open[at][sender] = append(p.open[at][sender], claim{e, connection})
}

func shareKey(at netip.AddrPort, protocol uint8, sender uint32) bpf.MapsSlShareKey {
	k := bpf.MapsSlShareKey{Port: at.Port(), Proto: protocol, Family: 6, Sender: sender}
	if at.Addr().Is4() {
		k.Family = 4
	}
	copy(k.Addr[:], at.Addr().AsSlice())
	return k
}

// finish ends excess connections, corrects the counters, and returns the number of ended connections.
func (p *ports) finish(now uint32, ct *conntrack.Connections) (ended int, err error) {
	idle := func(c claim) (uint32, bool) { return now - c.lastSeen(), true }
	for _, open := range p.open {
		for _, c := range count.Surplus(open, openPorts, idle) {
			removed, err := c.end(ct)
			if err != nil {
				return ended, fmt.Errorf("end %v: %w", c.connection.Tuple, err)
			}
			if removed {
				ended++
			}
		}
	}
	for i := range p.found {
		if at := uint32(i); count.IsOfPorts(at) && p.found[i] != p.before[i] {
			p.m.counts.Add(at, p.found[i]-p.before[i])
		}
	}
	if err := p.correctShares(); err != nil {
		return ended, err
	}
	p.m.counts.Recounted(now)
	return ended, nil
}

// correctShares writes the number of ports of each counted sender, and deletes senders with few ports.
func (p *ports) correctShares() error {
	senders := map[bpf.MapsSlShareKey]uint32{}
	for k := range p.shares {
		if k.Sender == 0 {
			continue
		}
		if p.held[k] <= smallShare {
			if err := pin.DeleteKey(p.m.share, k); err != nil {
				return fmt.Errorf("forget a share: %w", err)
			}
			continue
		}
		all := k
		all.Sender = 0
		senders[all]++
		if err := p.correct(k, func(v *bpf.MapsSlShare) { v.Ports += p.held[k] - p.shares[k].Ports }); err != nil {
			return err
		}
	}
	for k, v := range p.shares {
		if k.Sender != 0 {
			continue
		}
		if senders[k] == 0 {
			if err := pin.DeleteKey(p.m.share, k); err != nil {
				return fmt.Errorf("forget shares: %w", err)
			}
			continue
		}
		if err := p.correct(k, func(now *bpf.MapsSlShare) { now.Senders += senders[k] - v.Senders }); err != nil {
			return err
		}
	}
	return nil
}

// correct changes a share. A concurrent change by a program between the two calls is lost until the next pass.
func (p *ports) correct(k bpf.MapsSlShareKey, change func(*bpf.MapsSlShare)) error {
	var v bpf.MapsSlShare
	err := p.m.share.Lookup(k, &v)
	if err == nil {
		change(&v)
		// in place: a program that finds no share creates it again, with a small count
		err = p.m.share.Update(k, v, ebpf.UpdateExist)
	}
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("correct a share: %w", err)
	}
	return nil
}

// end removes a connection and its claim, unless a packet was seen since it was read.
func (c *claim) end(ct *conntrack.Connections) (bool, error) {
	removed, err := ct.End(c.connection)
	if err != nil || !removed {
		return false, err
	}
	_, err = c.remove()
	return true, err
}

// Pressed reports whether nearly all ports to a backend are in use, so that a pass may end connections, or whether
// endpoints were refused a translation or soon will be.
func (m *Maps) Pressed() bool {
	return m.bounds.Refused(bound.Translations4) || m.bounds.Refused(bound.Translations6) || m.fills(0) || m.fills(1) ||
		m.counts.AnyBackend(func(n uint32) bool { return n > openPorts })
}
