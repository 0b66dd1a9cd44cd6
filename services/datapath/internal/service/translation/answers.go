// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package translation

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/count"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// KeepAnswers stores the record of a connection to a service, and the copy of its claim, if the maps no longer have
// them. Programs store them at the first answer; nothing uses them while the connection has its entry, so later
// connections may evict them.
func (m *Maps) KeepAnswers(c *conntrack.Connection) error {
	if err := m.gate.RLock(); err != nil {
		return err
	}
	defer m.gate.RUnlock()
	v := bpf.MapsSlXl{
		Port: c.Initiator.Port(), AskedAt: c.Value.AskedAddress, Front: c.Value.Front, LastS: conntrack.MonotonicSeconds(),
	}
	copy(v.Addr[:], c.Initiator.Addr().AsSlice())
	m.counts.KeepPort(count.Answered, c.Responder.Port())
	s := c.From.Slot
	ofPod := s != endpointmap.HostID && s <= endpointmap.MaxEndpoints
	if err := m.insertAnswer(ofPod, c.Responder, c.Initiator, c.Protocol, zoneAnswers, v); err != nil {
		return err
	}
	if !c.Transit || c.Value.NatPort == 0 || c.Value.NatAddress == 0 {
		return nil
	}
	var own bpf.MapsSlOwn
	if err := m.own.Lookup(uint32(c.Value.NatAddress-1), &own); err != nil {
		return err
	}
	address := netip.AddrFrom16(own.Addr)
	if own.Family == 4 {
		address = netip.AddrFrom4([4]byte(own.Addr[:4]))
	}
	if address.Is4() != c.Initiator.Addr().Is4() {
		return nil // the node has lost the address
	}
	v.AskedAt = 0
	m.counts.KeepPort(count.Claimed, c.Value.NatPort)
	claimed := netip.AddrPortFrom(address, c.Value.NatPort)
	return m.insertAnswer(false, c.Responder, claimed, c.Protocol, zoneClaimed, v)
}

// answerAt returns the map and the key of a record or a copy. ofPod: a pod has begun the connection.
func (m *Maps) answerAt(ofPod bool, from, to netip.AddrPort, protocol, zone uint8) (in *ebpf.Map, key any) {
	four, six := m.answers4, m.answers6
	if ofPod {
		four, six = m.podAnswers4, m.podAnswers6
	}
	if from.Addr().Is4() {
		return four, bpf.MapsSlXlKey4{
			Src: binary.NativeEndian.Uint32(from.Addr().AsSlice()), Dst: binary.NativeEndian.Uint32(to.Addr().AsSlice()),
			Sport: from.Port(), Dport: to.Port(), Proto: protocol, Zone: zone,
		}
	}
	return six, bpf.MapsSlXlKey6{
		Src: from.Addr().As16(), Dst: to.Addr().As16(), Sport: from.Port(), Dport: to.Port(), Proto: protocol, Zone: zone,
	}
}

// insertAnswer inserts a record about answers from a backend, unless there is one.
func (m *Maps) insertAnswer(ofPod bool, from, to netip.AddrPort, protocol, zone uint8, v bpf.MapsSlXl) error {
	in, key := m.answerAt(ofPod, from, to, protocol, zone)
	err := pin.InsertOnce(in, key, v)
	if errors.Is(err, pin.ErrExists) || errors.Is(err, ebpf.ErrKeyExist) {
		return nil
	}
	return err
}

// kept reports whether the maps have the record of a translation's answers or the copy of the translation.
func (m *Maps) kept(t Translation) (bool, error) {
	for zone, ends := range map[uint8][2]netip.AddrPort{
		zoneAnswers: {t.Backend, t.Source}, zoneRequested: {t.Source, t.Asked},
	} {
		for _, ofPod := range []bool{true, false} {
			var v bpf.MapsSlXl
			in, key := m.answerAt(ofPod, ends[0], ends[1], t.Protocol, zone)
			switch err := in.Lookup(key, &v); {
			case err == nil:
				return true, nil
			case !errors.Is(err, ebpf.ErrKeyNotExist):
				return false, fmt.Errorf("look up the reply records of %v: %w", t, err)
			}
		}
	}
	return false, nil
}
