// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Flags is the state of a connection, as the programs set it.
type Flags uint32

// The flags, as bpf/include/sluice/abi.h defines them. The generated code has no preprocessor constants, so
// they are repeated here; a test compares them with the header.
const (
	OriginLow         Flags = 0x0001
	SeenReply         Flags = 0x0002
	InitiatorFinished Flags = 0x0004
	ResponderFinished Flags = 0x0008
	Reset             Flags = 0x0010
	ViaStack          Flags = 0x0020
	Proxied           Flags = 0x0040
	Hairpin           Flags = 0x0080
	PickedUp          Flags = 0x0100
	CloseReported     Flags = 0x0200
	ByResponder       Flags = 0x0400
	Unoriented        Flags = 0x0800
	Established       Flags = 0x1000
	Terminated        Flags = 0x2000
	ByResponderReset  Flags = 0x4000
	Asks              Flags = 0x8000
	InRing            Flags = 0x10000
	Returned          Flags = 0x20000
	ByDevice          Flags = 0x40000
	Held              Flags = 0x80000
	HeldByHTTP        Flags = 0x100000
)

// Closing reports whether both ends have sent FIN, or one has sent RST, so that only late packets can follow.
func (f Flags) Closing() bool {
	const both = InitiatorFinished | ResponderFinished
	return f&Reset != 0 || f&both == both
}

// Revoked reports whether a policy has terminated the connection. A TCP connection then keeps its entry, so
// that its next segment is evaluated as part of it.
func (f Flags) Revoked() bool { return f&Terminated != 0 }

// Names returns readable names of the flags, beginning with the stage of the connection.
func (f Flags) Names() []string {
	stage := "opening"
	switch {
	case f.Revoked():
		stage = "revoked"
	case f&Reset != 0:
		stage = "reset"
	case f.Closing():
		stage = "closing"
	case f&(InitiatorFinished|ResponderFinished) != 0:
		stage = "half-closed"
	case f&Established != 0:
		stage = "established"
	}
	words := []string{stage}
	for _, w := range []struct {
		flag Flags
		word string
	}{
		{PickedUp, "picked-up"},
		{Unoriented, "either-way"},
		{ViaStack, "via-stack"},
		{Proxied, "proxied"},
		{Hairpin, "hairpin"},
	} {
		if f&w.flag != 0 {
			words = append(words, w.word)
		}
	}
	return words
}

// Tuple identifies a connection. For ICMP echo both ports are the identifier; for protocols without ports they
// are 0.
type Tuple struct {
	// Initiator sent the first packet.
	Initiator, Responder netip.AddrPort
	Protocol             uint8
	// Transit: a service of this node forwards the connection of an outside client to a backend that is not a pod
	// of this node.
	Transit bool
	// Asked: not a connection, but a record of the host address to which the initiator, a pod, has sent a
	// UDP request. The responder has the address 0.
	Asked bool
}

// zonePod, zoneTransit and zoneAsked are SL_ZONE_POD, SL_ZONE_TRANSIT and SL_ZONE_ASKED of abi.h.
const zonePod, zoneTransit, zoneAsked = 0, 1, 2

func (t Tuple) zone() uint8 {
	switch {
	case t.Transit:
		return zoneTransit
	case t.Asked:
		return zoneAsked
	}
	return zonePod
}

// End is one end of a connection.
type End struct {
	// Slot is the endpoint ID, NoID if the end is not local.
	Slot endpointmap.ID
	// Epoch is the epoch of the policy that last evaluated the connection; 0 if the end is not local.
	Epoch uint32
	// AddressEpoch is the epoch of the address's bucket in sl_pgen.
	AddressEpoch uint16
	Identity     identity.Numeric
}

// Connection is an entry of the connection maps.
type Connection struct {
	Tuple
	From, To End
	// LastSeen is the time of the last packet, in seconds of CLOCK_MONOTONIC.
	LastSeen uint32
	Flags    Flags
	// EgressRule and IngressRule are the numbers of the rules that allowed it; 0: a default.
	EgressRule, IngressRule uint16

	Value bpf.MapsSlCt // as read from the map
	// Earlier is set for an entry of the previous version that no packet has moved yet; then Value is the
	// converted entry.
	Earlier *bpf.MapsSlCtPrev
}

// FlagNames returns the names of the connection's flags. A protocol without handshake is established once both
// ends have sent.
func (c *Connection) FlagNames() []string {
	flags := c.Flags
	switch c.Protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_SCTP:
	default:
		if flags&SeenReply != 0 {
			flags |= Established
		}
	}
	return flags.Names()
}

// Time returns LastSeen as wall-clock time, to a second.
func (c Connection) Time() time.Time { return TimeOf(uint64(c.LastSeen) * uint64(time.Second)) }

// sorted returns the ends in the order of the key, and whether the initiator is the lower one.
func (t Tuple) sorted() (lo, hi netip.AddrPort, initiatorLow bool) {
	if lower(t.Initiator, t.Responder) {
		return t.Initiator, t.Responder, true
	}
	return t.Responder, t.Initiator, false
}

// lower orders the ends of a key: by the bytes of the addresses, then by port.
func lower(a, b netip.AddrPort) bool {
	if d := bytes.Compare(a.Addr().AsSlice(), b.Addr().AsSlice()); d != 0 {
		return d < 0
	}
	return a.Port() <= b.Port()
}

// Validate rejects ends that are not plain addresses of one family, with pin.ErrInvalid.
func (t Tuple) Validate() error {
	i, r := t.Initiator.Addr(), t.Responder.Addr()
	if !i.IsValid() || !r.IsValid() || i.Is4() != r.Is4() || i.Is4In6() || r.Is4In6() || i.Zone() != "" || r.Zone() != "" {
		return fmt.Errorf("%w: Tuple: %v and %v are not plain addresses of one family", pin.ErrInvalid, i, r)
	}
	return nil
}

func be32(a netip.Addr) uint32 {
	b := a.As4()
	return binary.NativeEndian.Uint32(b[:])
}

// Key4 returns the key of the tuple in sl_ct4. Both ends must be IPv4.
func (t Tuple) Key4() bpf.MapsSlCtKey4 {
	lo, hi, _ := t.sorted()
	return bpf.MapsSlCtKey4{
		Lo: be32(lo.Addr()), Hi: be32(hi.Addr()), Plo: lo.Port(), Phi: hi.Port(), Proto: t.Protocol, Zone: t.zone(),
	}
}

// Key6 returns the key of the tuple in sl_ct6. Both ends must be IPv6.
func (t Tuple) Key6() bpf.MapsSlCtKey6 {
	lo, hi, _ := t.sorted()
	return bpf.MapsSlCtKey6{
		Lo: lo.Addr().As16(), Hi: hi.Addr().As16(), Plo: lo.Port(), Phi: hi.Port(), Proto: t.Protocol, Zone: t.zone(),
	}
}

// Tuple4 converts a key of sl_ct4. The flag OriginLow of its entry selects which end is the initiator.
func Tuple4(k *bpf.MapsSlCtKey4, flags uint32) Tuple {
	lo, hi := netip.AddrPortFrom(pin.Addr4(k.Lo), k.Plo), netip.AddrPortFrom(pin.Addr4(k.Hi), k.Phi)
	return tupleOf(lo, hi, k.Proto, k.Zone, flags)
}

// Tuple6 converts a key of sl_ct6, as Tuple4 does for sl_ct4.
func Tuple6(k *bpf.MapsSlCtKey6, flags uint32) Tuple {
	lo, hi := netip.AddrPortFrom(netip.AddrFrom16(k.Lo), k.Plo), netip.AddrPortFrom(netip.AddrFrom16(k.Hi), k.Phi)
	return tupleOf(lo, hi, k.Proto, k.Zone, flags)
}

func tupleOf(lo, hi netip.AddrPort, proto, zone uint8, flags uint32) Tuple {
	if Flags(flags)&OriginLow != 0 {
		return Tuple{lo, hi, proto, zone == zoneTransit, zone == zoneAsked}
	}
	return Tuple{hi, lo, proto, zone == zoneTransit, zone == zoneAsked}
}

// Of converts the entry of a tuple.
func Of(t Tuple, v *bpf.MapsSlCt) Connection {
	return Connection{
		Tuple:    t,
		From:     End{Slot: endpointmap.ID(v.Where >> 48), Epoch: uint32(v.Epochs >> 32), AddressEpoch: uint16(v.Where >> 16), Identity: identity.Numeric(v.IdInit)},
		To:       End{Slot: endpointmap.ID(v.Where >> 32), Epoch: uint32(v.Epochs), AddressEpoch: uint16(v.Where), Identity: identity.Numeric(v.IdResp)},
		LastSeen: v.LastS, Flags: Flags(v.Flags), EgressRule: v.RuleEg, IngressRule: v.RuleIn,
		Value: *v,
	}
}

// ValueOf is the inverse of Of.
func ValueOf(c Connection) bpf.MapsSlCt {
	v := bpf.MapsSlCt{
		Epochs: uint64(c.From.Epoch)<<32 | uint64(c.To.Epoch),
		Where:  uint64(c.From.Slot)<<48 | uint64(c.To.Slot)<<32 | uint64(c.From.AddressEpoch)<<16 | uint64(c.To.AddressEpoch),
		IdInit: uint32(c.From.Identity), IdResp: uint32(c.To.Identity),
		LastS: c.LastSeen, Flags: uint32(c.Flags &^ OriginLow), RuleEg: c.EgressRule, RuleIn: c.IngressRule,
	}
	if _, _, low := c.sorted(); low {
		v.Flags |= uint32(OriginLow)
	}
	return v
}

// Map returns the map for the tuple's family, and the tuple's key.
func (ct *Connections) Map(t Tuple) (*ebpf.Map, any) {
	if t.Initiator.Addr().Is4() {
		key := t.Key4()
		return ct.pins.Map(bpf.MapsMapSlCt4), &key
	}
	key := t.Key6()
	return ct.pins.Map(bpf.MapsMapSlCt6), &key
}

// Lookup returns the connection between two ends, whichever of them began it. A lookup from user space does not
// change the eviction order.
func (ct *Connections) Lookup(t Tuple) (c Connection, found bool, err error) {
	if err := t.Validate(); err != nil {
		return Connection{}, false, err
	}
	if err := ct.gate.RLock(); err != nil {
		return Connection{}, false, err
	}
	defer ct.gate.RUnlock()
	return ct.connection(t)
}

func (ct *Connections) connection(t Tuple) (Connection, bool, error) {
	m, key := ct.Map(t)
	var v bpf.MapsSlCt
	switch err := m.Lookup(key, &v); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return Connection{}, false, nil
	case err != nil:
		return Connection{}, false, fmt.Errorf("look up connection %v: %w", t, err)
	}
	lo, hi, _ := t.sorted()
	return Of(tupleOf(lo, hi, t.Protocol, t.zone(), v.Flags), &v), true, nil
}

// RemoveAtOnce is the largest number of connections that Remove accepts.
const RemoveAtOnce = 32

// Remove deletes the connections of cs, all of one family, that have not changed since they were read. It returns a bit
// for each deleted connection, the lowest bit for the first of cs. Comparison and deletion are about ten nanoseconds
// apart. The entry of a packet that arrives in between is deleted nevertheless: this packet has been evaluated, and the
// next one is evaluated again, as after an eviction.
func (ct *Connections) Remove(cs ...Connection) (deleted uint32, err error) {
	if len(cs) == 0 || len(cs) > RemoveAtOnce {
		return 0, fmt.Errorf("%w: cs: %d connections, not 1 to %d", pin.ErrInvalid, len(cs), RemoveAtOnce)
	}
	for i := range cs {
		if err := cs[i].Validate(); err != nil {
			return 0, err
		}
		if cs[i].family() != cs[0].family() {
			return 0, fmt.Errorf("%w: cs: %v and %v are of different families", pin.ErrInvalid, cs[0].Tuple, cs[i].Tuple)
		}
	}
	if ct.gate.ValidateOnly {
		return 0, pin.ErrValidateOnly
	}
	// Programs change this map at any time; the lock only prevents Close from running at the same time.
	if err := ct.gate.RLock(); err != nil {
		return 0, err
	}
	defer ct.gate.RUnlock()
	m, _ := ct.Map(cs[0].Tuple)
	return ct.removers[cs[0].family()].remove(m, cs)
}

// Each passes all tracked connections to visit, some thousand at a time, until visit returns an error. The
// slice is reused. Connections that begin or end during the call may be missing; any other is passed exactly
// once.
func (ct *Connections) Each(visit func([]Connection) error) error { return ct.eachOf([2]bool{}, visit) }

// eachOf is like Each, but without the connections of some families.
func (ct *Connections) eachOf(without [2]bool, visit func([]Connection) error) error {
	if !without[0] {
		if err := ct.each4(visit); err != nil {
			return err
		}
	}
	if without[1] {
		return nil
	}
	return eachBatch(ct, bpf.MapsMapSlCt6, &ct.batches[1], func(
		keys []bpf.MapsSlCtKey6, values []bpf.MapsSlCt, cs []Connection,
	) error {
		for i := range keys {
			cs = append(cs, Of(Tuple6(&keys[i], values[i].Flags), &values[i]))
		}
		return visit(cs)
	})
}

func (ct *Connections) each4(visit func([]Connection) error) error {
	return eachBatch(ct, bpf.MapsMapSlCt4, &ct.batches[0], func(
		keys []bpf.MapsSlCtKey4, values []bpf.MapsSlCt, cs []Connection,
	) error {
		for i := range keys {
			cs = append(cs, Of(Tuple4(&keys[i], values[i].Flags), &values[i]))
		}
		return visit(cs)
	})
}

// eachBatch reads a hash map in batches. The kernel copies whole buckets under their lock, so no stable entry
// is missed or read twice. The gate is not locked while visit runs.
func eachBatch[K any](
	ct *Connections, name string, batches *sync.Pool, visit func([]K, []bpf.MapsSlCt, []Connection) error,
) error {
	b, done := borrowBatch[K](batches)
	defer done()
	keys, values, cs := b.keys, b.values, b.connections
	var cursor ebpf.MapBatchCursor
	for {
		if err := ct.gate.RLock(); err != nil {
			return err
		}
		n, err := ct.pins.Map(name).BatchLookup(&cursor, keys, values, nil)
		ct.gate.RUnlock()
		end := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !end {
			return fmt.Errorf("list %s: %w", name, err)
		}
		if n > 0 {
			if err := visit(keys[:n], values[:n], cs); err != nil {
				return err
			}
		}
		if end {
			return nil
		}
	}
}

// Counters are counters since the maps were created.
type Counters struct {
	Created uint64
	// Deleted are entries deleted by a program: revoked, or replaced by a new connection.
	Deleted uint64
	// Revoked are connections that a changed policy has terminated.
	Revoked uint64
	// PickedUp are connections that were picked up in mid-stream after an eviction.
	PickedUp uint64
	// Reevaluated are connections that were evaluated again because a policy or an address had changed.
	Reevaluated uint64
	// Related are ICMP errors about a connection.
	Related uint64
	// Unremembered are revoked TCP connections that could not be recorded because the share of their endpoint was
	// full. They are known only by their conntrack entries; until these must have timed out, no connection of their
	// endpoints is picked up mid-stream.
	Unremembered uint64
	// Expired are connections that the collector or a flush has removed.
	Expired uint64
}

// StatExpired is the last cell of sl_ct_stats. No program counts there: the collector keeps its counter in it,
// so that it is as old as the other counters.
const StatExpired = uint32(bpf.MapsSlCtStatSL_CT_STAT_EXPIRED)

// Counters returns the sums over all CPUs of what the programs and the collector have counted.
func (ct *Connections) Counters() (Counters, error) {
	if err := ct.gate.RLock(); err != nil {
		return Counters{}, err
	}
	defer ct.gate.RUnlock()
	var c Counters
	for stat, to := range map[uint32]*uint64{
		uint32(bpf.MapsSlCtStatSL_CT_STAT_CREATED): &c.Created, uint32(bpf.MapsSlCtStatSL_CT_STAT_DELETED): &c.Deleted,
		uint32(bpf.MapsSlCtStatSL_CT_STAT_REVOKED): &c.Revoked, uint32(bpf.MapsSlCtStatSL_CT_STAT_PICKED_UP): &c.PickedUp,
		uint32(bpf.MapsSlCtStatSL_CT_STAT_REDECIDED): &c.Reevaluated, uint32(bpf.MapsSlCtStatSL_CT_STAT_RELATED): &c.Related,
		uint32(bpf.MapsSlCtStatSL_CT_STAT_UNREMEMBERED): &c.Unremembered, StatExpired: &c.Expired,
	} {
		var perCPU []uint64
		if err := ct.pins.Map(bpf.MapsMapSlCtStats).Lookup(stat, &perCPU); err != nil {
			return c, fmt.Errorf("read connection counter %d: %w", stat, err)
		}
		for _, v := range perCPU {
			*to += v
		}
	}
	return c, nil
}

// End removes a connection that has not changed since it was read, and counts it as expired.
func (ct *Connections) End(c Connection) (bool, error) {
	deleted, err := ct.Remove(c)
	if err != nil || deleted == 0 {
		return false, err
	}
	return true, ct.countExpired(1)
}

// countExpired counts connections that the collector or a flush has removed.
func (ct *Connections) countExpired(n uint64) error {
	if err := ct.gate.RLock(); err != nil {
		return err
	}
	defer ct.gate.RUnlock()
	ct.expired.Lock()
	defer ct.expired.Unlock()
	m := ct.pins.Map(bpf.MapsMapSlCtStats)
	var perCPU []uint64
	if err := m.Lookup(StatExpired, &perCPU); err != nil {
		return fmt.Errorf("read the count of expired connections: %w", err)
	}
	perCPU[0] += n
	// in place: only this process writes the counter, and under the lock
	if err := m.Put(StatExpired, perCPU); err != nil {
		return fmt.Errorf("count expired connections: %w", err)
	}
	return nil
}
