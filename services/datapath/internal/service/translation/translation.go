// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package translation reads and collects per-packet translations: the backend that the programs selected for a sender
// is stored there for the duration of the connection.
package translation

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/count"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Rest is the time for which a translation without a connection is kept: the first packet stores the translation before
// the connection becomes visible.
const Rest = 10 * time.Second

// Keep is the time for which a translation is kept after its connection was evicted or flushed. During that time,
// either end may continue the connection, and the IDs of the front and backend in the translation stay in use. Of TCP
// connections, only those that have a record or a copy are kept so long.
const Keep = 15 * time.Minute

// Maps are the maps of translations and of records about answers.
type Maps struct {
	gate               pin.Gate
	xl4, xl6           *ebpf.Map // of external clients, and of answers to the node
	pods4, pods6       *ebpf.Map // of packets of pods
	answers4, answers6 *ebpf.Map // of external clients and the host
	// podAnswers4 and podAnswers6 are the maps of connections that pods begin.
	podAnswers4, podAnswers6 *ebpf.Map
	share, own               *ebpf.Map
	counts                   *count.Counts
	bounds                   *bound.Bounds
	// endpoints maps the source of a translation to its endpoint.
	endpoints *endpointmap.Maps

	mu   sync.Mutex
	lost lost // guarded by mu; of the last collection
	// left is how many translations the last collection left to endpoints, for IPv4 and IPv6.
	left [2]atomic.Int64
}

// Open finds the maps.
func Open(pm *pin.Maps, endpoints *endpointmap.Maps, bounds *bound.Bounds) (*Maps, error) {
	counts, err := count.Open(pm)
	if err != nil {
		return nil, err
	}
	return &Maps{
		gate: pin.Gate{ValidateOnly: pm.ValidateOnly},
		xl4:  pm.Map(bpf.MapsMapSlXl4), xl6: pm.Map(bpf.MapsMapSlXl6),
		pods4: pm.Map(bpf.MapsMapSlPodXl4), pods6: pm.Map(bpf.MapsMapSlPodXl6),
		answers4: pm.Map(bpf.MapsMapSlAnswers4), answers6: pm.Map(bpf.MapsMapSlAnswers6),
		podAnswers4: pm.Map(bpf.MapsMapSlPodAnswers4), podAnswers6: pm.Map(bpf.MapsMapSlPodAnswers6),
		share: pm.Map(bpf.MapsMapSlShare), own: pm.Map(bpf.MapsMapSlOwn), counts: counts, bounds: bounds, endpoints: endpoints,
	}, nil
}

// AdoptPods copies the translations of pods, and their copies, from the maps of an earlier version, before programs
// of this version run.
// local are the addresses of endpoints and of the host. The old entries are collected like any others.
func (m *Maps) AdoptPods(local map[netip.Addr]endpointmap.ID) error {
	return m.each(func(es []entry) error {
		for _, e := range es {
			to := m.pods4
			switch e.in {
			case m.xl4:
			case m.xl6:
				to = m.pods6
			case m.answers4:
				to = m.podAnswers4
			case m.answers6:
				to = m.podAnswers6
			default:
				continue
			}
			if s, ok := local[e.initiator()]; !ok || s == endpointmap.HostID || e.Answer {
				continue
			}
			if err := pin.InsertOnce(to, e.key, e.value); err != nil && !errors.Is(err, pin.ErrExists) {
				return fmt.Errorf("adopt %v: %w", e.Translation, err)
			}
		}
		return nil
	})
}

// Close makes every later call fail.
func (m *Maps) Close() { m.gate.Close() }

// Zones of keys: SL_XL_... of service_abi.h.
const (
	zoneNAT       = 1
	zoneAnswers   = 2
	zoneClaimed   = 3
	zoneRequested = 4
)

// Translation is the destination of packets from one sender to one address.
type Translation struct {
	// Source is the sender and Asked the original destination; Backend is the destination that replaces it.
	Source, Asked, Backend netip.AddrPort
	Protocol               uint8
	// Front and Number are the IDs of the front and the backend, Generation is the backend's generation.
	Front, Number uint32
	Generation    uint8
	// Back: answers of a pod to itself, through a service. Backend is the service's address.
	Back bool
	// Answer: Source is a backend on another node, and Asked the address of this node that the backend sees instead of the
	// external client. Backend is that client.
	Answer bool
	// Copy: a copy of an Answer or, without Answer, of the destination of a TCP client's packets. It is used if the
	// original is lost. A copy without Answer has no Number and no Generation.
	Copy bool
	// Record: Source is a backend that has answered Asked, and the source of its answers is the frontend of Front. It is
	// used if the connection's entry is lost. Backend is unused. With Back: a copy of the answers of a pod to itself, used
	// if the original is lost.
	Record bool
	// LastSeen is the time of the last packet, in seconds of CLOCK_MONOTONIC.
	LastSeen uint32
}

// String returns "client -> service goes to backend".
func (t Translation) String() string {
	return DescribeKey(t) + " " + DescribeValue(t)
}

// DescribeKey describes the sender and the original destination.
func DescribeKey(t Translation) string {
	return fmt.Sprintf("protocol %d %v -> %v", t.Protocol, t.Source, t.Asked)
}

// DescribeValue describes the new destination.
func DescribeValue(t Translation) string {
	if t.Record && !t.Back {
		return fmt.Sprintf("answers come from front %d, last used at %d s", t.Front, t.LastSeen)
	}
	if t.Answer {
		return fmt.Sprintf("answers %v, last used at %d s", t.Backend, t.LastSeen)
	}
	if t.Copy {
		return fmt.Sprintf("goes to %v of front %d, last used at %d s", t.Backend, t.Front, t.LastSeen)
	}
	if t.Back {
		return fmt.Sprintf("goes back to its sender from %v, last used at %d s", t.Backend, t.LastSeen)
	}
	return fmt.Sprintf("goes to %v, backend %d generation %d of front %d, last used at %d s",
		t.Backend, t.Number, t.Generation, t.Front, t.LastSeen)
}

// Of4 decodes an entry of sl_xl4, sl_pod_xl4, sl_answers4 or sl_pod_answers4.
func Of4(k *bpf.MapsSlXlKey4, v *bpf.MapsSlXl) Translation {
	t := of(v, netip.AddrFrom4([4]byte(v.Addr[:4])))
	t.Source, t.Asked = netip.AddrPortFrom(pin.Addr4(k.Src), k.Sport), netip.AddrPortFrom(pin.Addr4(k.Dst), k.Dport)
	t.in(k.Proto, k.Zone)
	return t
}

// Of6 decodes an entry of sl_xl6, sl_pod_xl6, sl_answers6 or sl_pod_answers6.
func Of6(k *bpf.MapsSlXlKey6, v *bpf.MapsSlXl) Translation {
	t := of(v, netip.AddrFrom16(v.Addr))
	t.Source = netip.AddrPortFrom(netip.AddrFrom16(k.Src), k.Sport)
	t.Asked = netip.AddrPortFrom(netip.AddrFrom16(k.Dst), k.Dport)
	t.in(k.Proto, k.Zone)
	return t
}

// in sets the fields that the protocol and the zone of the key determine.
func (t *Translation) in(proto, zone uint8) {
	t.Protocol = proto
	t.Copy, t.Record = zone == zoneClaimed || zone == zoneRequested, zone == zoneAnswers
	t.Answer = zone == zoneNAT || zone == zoneClaimed
}

func of(v *bpf.MapsSlXl, a netip.Addr) Translation {
	return Translation{
		Backend: netip.AddrPortFrom(a, v.Port), Front: v.Front, Number: v.Backend, Generation: v.Gen, Back: v.Back != 0,
		LastSeen: v.LastS,
	}
}

// entry is a translation with its key in one of the maps and the value that was read.
type entry struct {
	Translation
	in    *ebpf.Map
	key   any
	value bpf.MapsSlXl
	// outside: the map has no translations of pods. copies: it has records and copies.
	outside, copies bool
}

// each visits all translations, in batches.
func (m *Maps) each(visit func([]entry) error) error {
	return errors.Join(eachOf(m, m.xl4, Of4, visit), eachOf(m, m.xl6, Of6, visit),
		eachOf(m, m.pods4, Of4, visit), eachOf(m, m.pods6, Of6, visit),
		eachOf(m, m.answers4, Of4, visit), eachOf(m, m.answers6, Of6, visit),
		eachOf(m, m.podAnswers4, Of4, visit), eachOf(m, m.podAnswers6, Of6, visit))
}

func eachOf[K any](m *Maps, in *ebpf.Map, read func(*K, *bpf.MapsSlXl) Translation, visit func([]entry) error) error {
	return pin.EachEntry(in, m.gate.Read, func(keys []K, values []bpf.MapsSlXl) error {
		es := make([]entry, len(keys))
		copies := in == m.answers4 || in == m.answers6
		outside := copies || in == m.xl4 || in == m.xl6
		copies = copies || in == m.podAnswers4 || in == m.podAnswers6
		for i := range keys {
			es[i] = entry{read(&keys[i], &values[i]), in, keys[i], values[i], outside, copies}
		}
		return visit(es)
	})
}

// Each visits all translations in any order.
func (m *Maps) Each(visit func(Translation) error) error {
	return m.each(func(es []entry) error {
		for _, e := range es {
			if err := visit(e.Translation); err != nil {
				return err
			}
		}
		return nil
	})
}

// IPPROTO_TCP and IPPROTO_UDP.
const (
	protocolTCP = 6
	protocolUDP = 17
)

// Keeps reports whether a backend, by ID and generation, is still active or draining in a front.
type Keeps func(front uint32, ipv6 bool, backend uint32, generation uint8) bool

// Release removes UDP translations whose front does not keep their backend, and returns how many it removed. The next
// packet of such a flow selects another backend of the front. A UDP flow has no end: without Release it would keep
// using a backend that its Service has removed, as long as another Service has that backend. TCP connections are kept.
// If every program run that may have found the backend in the front's list has ended, none is left when Release returns
// without an error. Release may be called concurrently with every other method.
func (m *Maps) Release(ctx context.Context, keeps Keeps) (released int, err error) {
	var left []entry
	err = m.each(func(es []entry) error {
		for _, e := range es {
			if e.leaves(keeps) {
				left = append(left, e)
			}
		}
		return ctx.Err()
	})
	for _, e := range left {
		if failed := pin.DeleteKey(e.in, e.key); failed != nil {
			return released, errors.Join(err, fmt.Errorf("remove %v: %w", e.Translation, failed))
		}
		released++
	}
	return released, err
}

// leaves reports whether the flow has to select another backend. Records of answers and claims of ports refer to no
// backend.
func (t *Translation) leaves(keeps Keeps) bool {
	return t.Protocol == protocolUDP && !t.Back && !t.Answer && !t.Record &&
		!keeps(t.Front, t.Backend.Addr().Is6(), t.Number, t.Generation)
}

// Pass is the result of one collection.
type Pass struct {
	// Live is the number of translations afterwards, Removed the number of removed ones.
	Live, Removed int
	// Ended is the number of idle connections of external clients that were ended, because nearly all node ports to their
	// backend were in use.
	Ended int
	// Surplus is the number of translations of the largest users that were removed, because endpoints had more than three
	// quarters of their bound: idle UDP flows, and others if they exceeded it.
	Surplus int
}

// Collect removes the translations whose connection has ended, counts the node ports in use, and divides the maps among
// the endpoints. now is in seconds of CLOCK_MONOTONIC. A translation whose connection was evicted or flushed is kept
// for Keep, so that the connection can continue. Translations of a pod to itself have no connection, and are removed
// after the idle timeout of a connection. If a packet arrives while its translation is removed, that packet selects a
// backend again.
func (m *Maps) Collect(now uint32, ct *conntrack.Connections, timeouts conntrack.Timeouts) (p Pass, err error) {
	ports, err := m.beginPorts()
	if err != nil {
		return p, err
	}
	pods, err := m.beginPods(now)
	if err != nil {
		return p, err
	}
	var last conntrack.Connection
	found := func(t conntrack.Tuple) (there bool, err error) {
		last, there, err = ct.Lookup(t)
		return there, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	c := collection{
		now: now, timeouts: timeouts, ended: ct.TakeEnded(), found: found, kept: m.kept, before: m.lost, lost: lost{},
	}
	var over []entry
	err = m.each(func(es []entry) error {
		for _, e := range es {
			last = conntrack.Connection{}
			idle, err := c.isOver(e.Translation)
			switch {
			case err != nil:
				return err
			case idle:
				over = append(over, e)
				continue
			}
			p.Live++
			ports.add(e, last)
			if last.Flags&conntrack.Returned == 0 {
				pods.add(e, last)
			}
		}
		return nil
	})
	for _, e := range over {
		what, err := e.remove()
		switch {
		case err != nil:
			return p, errors.Join(err, fmt.Errorf("remove %v: %w", e.Translation, err))
		case what == removed:
			p.Removed++
		case what == changed:
			p.Live++
			ports.add(e, conntrack.Connection{})
			pods.add(e, conntrack.Connection{})
		}
	}
	if err != nil {
		return p, err
	}
	m.lost = c.lost
	if p.Surplus, err = pods.finish(m); err != nil {
		return p, err
	}
	p.Live -= p.Surplus
	p.Ended, err = ports.finish(now, ct)
	return p, err
}

// Results of remove.
type removal int

const (
	removed removal = iota
	changed         // used again, possibly by another connection
	gone
)

// remove deletes the entry, unless its value has changed.
func (e *entry) remove() (removal, error) {
	var v bpf.MapsSlXl
	err := e.in.Lookup(e.key, &v)
	switch {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return gone, nil
	case err != nil:
		return gone, err
	case v != e.value:
		return changed, nil
	}
	return removed, pin.DeleteKey(e.in, e.key)
}

// lost is when connections were first found to be missing although their records or copies exist, in seconds.
// Programs write these once, at the first answer, so LastSeen does not tell how long a connection has been missing.
type lost map[lostKey]uint32

type lostKey struct {
	source, asked netip.AddrPort
	protocol      uint8
	copied        bool
}

// collection is the input of a collection's decisions.
type collection struct {
	now      uint32
	timeouts conntrack.Timeouts
	// ended are the connections that were removed since the last collection because they had ended or timed out.
	ended conntrack.Ended
	// found reports whether there is a connection.
	found func(conntrack.Tuple) (bool, error)
	// kept reports whether a translation has a record of answers or a copy.
	kept func(Translation) (bool, error)
	// before is what the last collection found missing, lost what this collection finds missing.
	before, lost lost
}

// idleSinceLost returns for how long a record or copy has neither been used nor had its connection.
func (c *collection) idleSinceLost(t Translation, idle time.Duration) time.Duration {
	k := lostKey{t.Source, t.Asked, t.Protocol, t.Copy}
	since, ok := c.before[k]
	if !ok {
		since = c.now
	}
	c.lost[k] = since
	return min(idle, time.Duration(int32(c.now-since))*time.Second)
}

// isOver reports whether a translation is no longer in use.
func (c *collection) isOver(t Translation) (bool, error) {
	idle := time.Duration(int32(c.now-t.LastSeen)) * time.Second
	longest := c.timeouts.Of(t.Protocol, conntrack.SeenReply|conntrack.Established)
	if t.Back || !t.Record && t.Source.Addr() == t.Backend.Addr() {
		return idle >= Rest && idle >= longest, nil
	}
	of := conntrack.Tuple{Initiator: t.Source, Responder: t.Backend, Protocol: t.Protocol, Transit: t.Answer}
	if t.Record {
		of.Initiator, of.Responder = t.Asked, t.Source
	}
	there, err := c.found(of)
	outside := of // of an external client, to a backend on another node
	outside.Transit = true
	if err == nil && !there && !t.Answer {
		there, err = c.found(outside)
	}
	switch {
	case err != nil || there:
		return false, err
	case t.Answer && !t.Copy: // the connection still needs the port
		return idle >= Rest, nil
	}
	if c.ended.Has(of) || c.ended.Has(outside) {
		return true, nil
	}
	if t.Protocol == protocolTCP && !t.Answer && !t.Copy && !t.Record && idle >= Rest {
		// Programs delete the record and the copy when a connection ends. The process that removed the connection may have
		// stopped before this collection.
		if open, err := c.kept(t); err != nil || !open {
			return err == nil, err
		}
	}
	if t.Record || t.Copy {
		idle = c.idleSinceLost(t, idle)
	}
	return idle >= min(longest, Keep), nil
}
