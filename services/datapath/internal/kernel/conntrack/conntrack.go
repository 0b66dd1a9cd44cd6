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

// Flags are the state of a connection, as the programs set them.
type Flags uint32

// The flags, as bpf/include/sluice/abi.h explains them. The generated code has
// no preprocessor constants, so the numbers are repeated here; a test compares
// them with the header.
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
)

// Closing says whether both ends have finished, or one has reset: nothing but
// late packets is to come.
func (f Flags) Closing() bool {
	const both = InitiatorFinished | ResponderFinished
	return f&Reset != 0 || f&both == both
}

// Revoked says whether a policy has terminated the connection. Of TCP its entry
// stays, so that its next segment is evaluated as the connection.
func (f Flags) Revoked() bool { return f&Terminated != 0 }

// Names are the flags for people, the stage of the connection first.
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

// Tuple names a connection. ICMP echo has its identifier in both ports;
// protocols without ports have 0.
type Tuple struct {
	// Initiator sent the first packet.
	Initiator, Responder netip.AddrPort
	Protocol             uint8
	// Transit: a service has led a sender outside to a backend that is no pod of this
	// node.
	Transit bool
	// Asked: no connection, but a record of which address of the host the initiator, a pod,
	// has asked by UDP. The responder has the address 0.
	Asked bool
}

// zonePod, zoneTransit and zoneAsked are SL_ZONE_POD, SL_ZONE_TRANSIT and SL_ZONE_ASKED, of keys.
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
	// Slot of the endpoint, NoID if it is not local.
	Slot endpointmap.ID
	// Epoch is that of the word that last evaluated the connection, 0 if the end is
	// not local.
	Epoch uint32
	// AddressEpoch is that of the address's bucket in sl_pgen.
	AddressEpoch uint16
	Identity     identity.Numeric
}

// Connection is an entry of the connection table.
type Connection struct {
	Tuple
	From, To End
	// LastSeen is when the last packet was seen, in seconds of
	// CLOCK_MONOTONIC.
	LastSeen uint32
	Flags    Flags
	// EgressRule let it out, IngressRule let it in; 0 for a default.
	EgressRule, IngressRule uint16

	Value bpf.MapsSlCt // as it was read
	// Earlier is set for one in the map of the version before, which no packet has
	// moved yet: Value is what that would make of it.
	Earlier *bpf.MapsSlCtPrev
}

// FlagNames are those of its flags; a protocol without a handshake is established once both
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

// Time is LastSeen by the wall clock, to a second.
func (c Connection) Time() time.Time { return TimeOf(uint64(c.LastSeen) * uint64(time.Second)) }

// sorted gives the addresses in the order of the key, and says whether the
// first one given is the lower one.
func (t Tuple) sorted() (lo, hi netip.AddrPort, initiatorLow bool) {
	if lower(t.Initiator, t.Responder) {
		return t.Initiator, t.Responder, true
	}
	return t.Responder, t.Initiator, false
}

// lower is the order of a key's ends: by the bytes of the addresses, then by
// the ports.
func lower(a, b netip.AddrPort) bool {
	if d := bytes.Compare(a.Addr().AsSlice(), b.Addr().AsSlice()); d != 0 {
		return d < 0
	}
	return a.Port() <= b.Port()
}

// Validate refuses ends that are no plain addresses of one family, with
// pin.ErrInvalid.
func (t Tuple) Validate() error {
	i, r := t.Initiator.Addr(), t.Responder.Addr()
	if !i.IsValid() || !r.IsValid() || i.Is4() != r.Is4() || i.Is4In6() || r.Is4In6() || i.Zone() != "" || r.Zone() != "" {
		return fmt.Errorf("%w: Tuple: %v and %v are no pair of plain addresses of one family", pin.ErrInvalid, i, r)
	}
	return nil
}

func be32(a netip.Addr) uint32 {
	b := a.As4()
	return binary.NativeEndian.Uint32(b[:])
}

// Key4 is the key of the tuple in sl_ct4. Both ends must be IPv4.
func (t Tuple) Key4() bpf.MapsSlCtKey4 {
	lo, hi, _ := t.sorted()
	return bpf.MapsSlCtKey4{
		Lo: be32(lo.Addr()), Hi: be32(hi.Addr()), Plo: lo.Port(), Phi: hi.Port(), Proto: t.Protocol, Zone: t.zone(),
	}
}

// Key6 is the key of the tuple in sl_ct6. Both ends must be IPv6.
func (t Tuple) Key6() bpf.MapsSlCtKey6 {
	lo, hi, _ := t.sorted()
	return bpf.MapsSlCtKey6{
		Lo: lo.Addr().As16(), Hi: hi.Addr().As16(), Plo: lo.Port(), Phi: hi.Port(), Proto: t.Protocol, Zone: t.zone(),
	}
}

// Tuple4 reads a key of sl_ct4. Of the flags of its entry, OriginLow says which
// end is the initiator.
func Tuple4(k *bpf.MapsSlCtKey4, flags uint32) Tuple {
	lo, hi := netip.AddrPortFrom(pin.Addr4(k.Lo), k.Plo), netip.AddrPortFrom(pin.Addr4(k.Hi), k.Phi)
	return tupleOf(lo, hi, k.Proto, k.Zone, flags)
}

// Tuple6 is Tuple4 for sl_ct6.
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

// Of reads the entry of a tuple.
func Of(t Tuple, v *bpf.MapsSlCt) Connection {
	return Connection{
		Tuple:    t,
		From:     End{Slot: endpointmap.ID(v.Where >> 48), Epoch: uint32(v.Epochs >> 32), AddressEpoch: uint16(v.Where >> 16), Identity: identity.Numeric(v.IdInit)},
		To:       End{Slot: endpointmap.ID(v.Where >> 32), Epoch: uint32(v.Epochs), AddressEpoch: uint16(v.Where), Identity: identity.Numeric(v.IdResp)},
		LastSeen: v.LastS, Flags: Flags(v.Flags), EgressRule: v.RuleEg, IngressRule: v.RuleIn,
		Value: *v,
	}
}

// ValueOf is the reverse of connectionOf.
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

// Map is the map of the tuple's family, and its key there.
func (ct *Connections) Map(t Tuple) (*ebpf.Map, any) {
	if t.Initiator.Addr().Is4() {
		key := t.Key4()
		return ct.pins.Map(bpf.MapsMapSlCt4), &key
	}
	key := t.Key6()
	return ct.pins.Map(bpf.MapsMapSlCt6), &key
}

// Lookup looks up the connection between two ends, whichever began it. It
// does not count as use: the kernel's eviction order stays as it is.
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

// RemoveAtOnce is how many connections Remove takes.
const RemoveAtOnce = 32

// Remove deletes those of cs, of one family, that are still as they were read.
// It returns a bit for each that it deleted, the lowest for the first. A packet
// that is seen between the comparison and the deletion, some ten nanoseconds, loses
// its entry all the same: it has been evaluated, and the next packet of its
// connection is evaluated again, as after an eviction.
func (ct *Connections) Remove(cs ...Connection) (deleted uint32, err error) {
	if len(cs) == 0 || len(cs) > RemoveAtOnce {
		return 0, fmt.Errorf("%w: cs: %d connections, not 1 to %d", pin.ErrInvalid, len(cs), RemoveAtOnce)
	}
	for i := range cs {
		if err := cs[i].Validate(); err != nil {
			return 0, err
		}
		if cs[i].family() != cs[0].family() {
			return 0, fmt.Errorf("%w: cs: %v and %v are of two families", pin.ErrInvalid, cs[0].Tuple, cs[i].Tuple)
		}
	}
	if ct.gate.ValidateOnly {
		return 0, pin.ErrValidateOnly
	}
	// the programs change this map at any time; the lock is for Close alone
	if err := ct.gate.RLock(); err != nil {
		return 0, err
	}
	defer ct.gate.RUnlock()
	m, _ := ct.Map(cs[0].Tuple)
	return ct.removers[cs[0].family()].remove(m, cs)
}

// Each hands all tracked connections to visit, some thousand at a time,
// until it returns an error. The slice is reused. Connections that come or go
// meanwhile may be missing; one that stays is listed once.
func (ct *Connections) Each(visit func([]Connection) error) error { return ct.eachOf([2]bool{}, visit) }

// eachOf is Each without the connections of a family.
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

// eachBatch reads a hash by batches: the kernel copies whole buckets under
// their lock, so that nothing that stays is missed or seen twice. The lock of k
// is not held while visit runs.
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

// Counters count since the maps were made.
type Counters struct {
	Created uint64
	// Deleted by a program: revoked, or replaced by a new connection.
	Deleted uint64
	// Revoked by a policy that had changed.
	Revoked uint64
	// PickedUp in mid-flow after an eviction.
	PickedUp uint64
	// Reevaluated because a policy or an address had changed.
	Reevaluated uint64
	// Related are ICMP errors about a connection.
	Related uint64
	// Unremembered are revoked TCP connections of which nothing but the entry
	// is kept, because the map of revoked ones was full: until their time is
	// over, nothing is picked up for the endpoints concerned.
	Unremembered uint64
	// Expired were removed by the collector, or flushed.
	Expired uint64
}

// StatExpired is the last cell of sl_ct_stats, which no program counts in: the
// collector keeps its own count there, so that it is as old as the others.
const StatExpired = uint32(bpf.MapsSlCtStatSL_CT_STAT_EXPIRED)

// Counters reads the counters.
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

// End removes a connection that is still as it was read, and counts it as expired.
func (ct *Connections) End(c Connection) (bool, error) {
	deleted, err := ct.Remove(c)
	if err != nil || deleted == 0 {
		return false, err
	}
	return true, ct.countExpired(1)
}

// countExpired counts what the collector removed, or a flush.
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
	// in place: this process alone writes the counter, one at a time
	if err := m.Put(StatExpired, perCPU); err != nil {
		return fmt.Errorf("count expired connections: %w", err)
	}
	return nil
}
