// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package bound is the Go side of sl_bound and sl_held: bounds that the endpoints of a node share, as
// bpf/include/sluice/bound.h explains. Programs count the entries that endpoints create. A collector corrects
// the counts and computes the guarantee of each endpoint.
package bound

import (
	"errors"
	"fmt"
	"hash/maphash"
	"net/netip"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Bound is a bound that endpoints share: SL_BOUND_... of abi.h.
type Bound uint32

// Bounds whose entries are counted.
const (
	Translations4 Bound = iota
	Translations6
	Fragments
	Affinity4
	Affinity6
	Events
	// Answers and TooBig are rates. This package counts only their refusals.
	Answers
	TooBig
	// Revoked4 and Revoked6 are the records of TCP connections that a policy has terminated.
	Revoked4
	Revoked6
	// all is the number of counters of an endpoint in sl_held.
	all
)

// Connections, which package conntrack divides. This package counts only their refusals.
const (
	Connections4 = all + iota
	Connections6
	refusals
)

var names = [refusals]string{
	"translations-ipv4", "translations-ipv6", "fragments", "affinity-ipv4", "affinity-ipv6", "events",
	"answers", "too-big", "revoked-ipv4", "revoked-ipv6", "connections-ipv4", "connections-ipv6",
}

// String returns the name of the bound in metrics and documents.
func (b Bound) String() string {
	if b < refusals {
		return names[b]
	}
	return fmt.Sprintf("bound-%d", uint32(b))
}

// Counted lists the bounds whose entries are counted.
func Counted() []Bound {
	return []Bound{Translations4, Translations6, Fragments, Affinity4, Affinity6, Events, Revoked4, Revoked6}
}

// shared returns how many entries of a map the endpoints share: an eighth stays free for new endpoints.
func shared(entries int) int { return entries - entries/8 }

// Bounds are the bounds of one node. Their methods may be called concurrently. Only one pass of a bound may run at a
// time.
type Bounds struct {
	gate         pin.Gate
	bounds, held []byte
	refusals     []byte
	sizes        [all]int
	outsides     [all]int // capacities for outside senders
	outside      [all]atomic.Int64
	// of endpoints
	frag, aff4, aff6 *ebpf.Map
	// of outside senders
	outsideFrag, outsideAff4, outsideAff6 *ebpf.Map
	seen                                  map[uint64]struct{} // hashes of the datagrams that the last pass found
	seed                                  maphash.Seed
}

// Open returns the bounds in the given maps. The first process that may write initialises them.
func Open(pm *pin.Maps) *Bounds {
	b := &Bounds{
		gate:   pin.Gate{ValidateOnly: pm.ValidateOnly},
		bounds: pm.Memory(bpf.MapsMapSlBound), held: pm.Memory(bpf.MapsMapSlHeld),
		refusals: pm.Memory(bpf.MapsMapSlRefused),
		frag:     pm.Map(bpf.MapsMapSlPodFrag),
		aff4:     pm.Map(bpf.MapsMapSlPodAff4), aff6: pm.Map(bpf.MapsMapSlPodAff6),
		outsideFrag: pm.Map(bpf.MapsMapSlFrag),
		outsideAff4: pm.Map(bpf.MapsMapSlAff4), outsideAff6: pm.Map(bpf.MapsMapSlAff6),
		seed: maphash.MakeSeed(),
	}
	for of, names := range map[Bound][2]string{
		Translations4: {bpf.MapsMapSlPodXl4, bpf.MapsMapSlXl4},
		Translations6: {bpf.MapsMapSlPodXl6, bpf.MapsMapSlXl6},
		Fragments:     {bpf.MapsMapSlPodFrag, bpf.MapsMapSlFrag},
		Affinity4:     {bpf.MapsMapSlPodAff4, bpf.MapsMapSlAff4},
		Affinity6:     {bpf.MapsMapSlPodAff6, bpf.MapsMapSlAff6},
	} {
		b.sizes[of] = shared(int(pm.Map(names[0]).MaxEntries()))
		b.outsides[of] = int(pm.Map(names[1]).MaxEntries())
	}
	b.sizes[Revoked4] = shared(int(pm.Map(bpf.MapsMapSlRevoked4).MaxEntries()))
	b.sizes[Revoked6] = shared(int(pm.Map(bpf.MapsMapSlRevoked6).MaxEntries()))
	b.sizes[Events] = int(pm.Map(bpf.MapsMapSlEvents).MaxEntries()) / eventBytes
	for of := range all {
		switch {
		case pm.ValidateOnly || b.sizes[of] == 0 || atomic.LoadUint32(b.word(of, guarantee)) != 0:
		case of == Events:
			b.DivideEvents(usualPods)
		default:
			b.divide(of)
		}
	}
	return b
}

// Close makes every later pass over a map fail.
func (b *Bounds) Close() { b.gate.Close() }

// eventBytes is the size of an event in the ring buffer, with its header.
const eventBytes = int(unsafe.Sizeof(bpf.MapsSlEvent{})) + 8

// usualPods is the number of endpoints for which the ring of events is divided while their number is unknown:
// the default maximum of kubelet.
const usualPods = 110

// Offsets in struct sl_bound.
const (
	guarantee = unsafe.Offsetof(bpf.MapsSlBound{}.Guarantee)
	common    = unsafe.Offsetof(bpf.MapsSlBound{}.Common)
	used      = unsafe.Offsetof(bpf.MapsSlBound{}.Used)
	refused   = unsafe.Offsetof(bpf.MapsSlBound{}.RefusedS)
)

func (b *Bounds) word(of Bound, field uintptr) *uint32 {
	return pin.Word32(b.bounds, int(of)*int(unsafe.Sizeof(bpf.MapsSlBound{}))+int(field))
}

func (b *Bounds) count(of Bound, s endpointmap.ID) *uint32 {
	return pin.Word32(b.held, (int(s)*int(all)+int(of))*4)
}

// Refusals returns how many packets, answers or events of an endpoint exceeded its share of a bound, since the
// endpoint ID was assigned, modulo 2^32. The index after the endpoints is Outside.
func (b *Bounds) Refusals(of Bound, s endpointmap.ID) uint64 {
	at := int(s)*int(unsafe.Sizeof(bpf.MapsSlRefused{})) + int(of)*4
	return uint64(atomic.LoadUint32(pin.Word32(b.refusals, at)))
}

// Most returns how many entries of a bound an endpoint may have now: the larger one of its guarantee and its present
// number, plus the unused part of the common half.
func (b *Bounds) Most(of Bound, s endpointmap.ID) int {
	left := int(atomic.LoadUint32(b.word(of, common))) - int(atomic.LoadUint32(b.word(of, used)))
	return max(b.Guarantee(of), b.Held(of, s)) + max(0, left)
}

// Outside returns how many entries of a bound outside senders used at the last pass, and their limit. They have no
// events and no records of terminated connections.
func (b *Bounds) Outside(of Bound) (used, most int) {
	return int(b.outside[of].Load()), b.outsides[of]
}

// Rate returns how many packets per second a CPU may send within a rate: SL_ANSWER_RATE of refuse.h for Answers,
// otherwise SL_TOO_BIG_RATE of related.h.
func Rate(of Bound) int {
	if of == Answers {
		return 1000
	}
	return 100
}

// Taken returns how much of a rate an endpoint has used in this second.
func (b *Bounds) Taken(of Bound, s endpointmap.ID) int {
	if s > endpointmap.MaxEndpoints {
		return 0 // outside senders have a rate of their own
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0
	}
	if n := atomic.LoadUint32(b.count(of, s)); n>>16 == uint32(now.Sec)&0xffff {
		return int(n & 0xffff)
	}
	return 0
}

// Size returns how many entries of a bound the endpoints share.
func (b *Bounds) Size(of Bound) int { return b.sizes[of] }

// Held returns how many entries of a bound an endpoint has: the result of the last pass, plus entries created
// since.
func (b *Bounds) Held(of Bound, s endpointmap.ID) int {
	return int(atomic.LoadUint32(b.count(of, s)))
}

// Guarantee returns how many entries of a bound each endpoint may have, regardless of the others.
func (b *Bounds) Guarantee(of Bound) int { return int(atomic.LoadUint32(b.word(of, guarantee))) }

// Refused reports whether an endpoint was refused entries of a bound since the last pass.
func (b *Bounds) Refused(of Bound) bool { return atomic.LoadUint32(b.word(of, refused)) != 0 }

// Pressed reports whether an endpoint was refused a fragmented datagram since the last pass, so that an early pass
// may raise its limit.
func (b *Bounds) Pressed() bool { return b.Refused(Fragments) }

// Total returns how many entries of a bound the endpoints have together.
func (b *Bounds) Total(of Bound) (n int) {
	for s := range endpointmap.ID(endpointmap.MaxEndpoints + 1) {
		n += b.Held(of, s)
	}
	return n
}

// Pass is one recount of the entries of a bound. Begin starts it, and Finish corrects the counts of the programs.
type Pass struct {
	b      *Bounds
	of     Bound
	before []uint32 // the counters at the beginning of the pass: what programs add during the pass stays counted
	found  []uint32
	// outside counts the entries of outside senders.
	outside int64
}

// Begin starts a recount of the entries of a bound. Call it before reading the entries.
func (b *Bounds) Begin(of Bound) *Pass {
	p := &Pass{
		b: b, of: of, before: make([]uint32, endpointmap.MaxEndpoints+1), found: make([]uint32, endpointmap.MaxEndpoints+1),
	}
	for s := range p.before {
		p.before[s] = uint32(b.Held(of, endpointmap.ID(s)))
	}
	return p
}

// Add counts n entries of an endpoint.
func (p *Pass) Add(s endpointmap.ID, n int) {
	if int(s) < len(p.found) {
		p.found[s] += uint32(n)
	}
}

// AddOutside counts an entry of an outside sender.
func (p *Pass) AddOutside() { p.outside++ }

// Finish corrects the counts and divides the bound again. Do not call it after a failed pass.
func (p *Pass) Finish() {
	for s := range p.found {
		if p.found[s] != p.before[s] {
			atomic.AddUint32(p.b.count(p.of, endpointmap.ID(s)), p.found[s]-p.before[s])
		}
	}
	p.b.outside[p.of].Store(p.outside)
	p.b.divide(p.of)
}

// DivideEvents divides the ring of events among the given number of endpoints. Events are never evicted, so capacity is
// reserved for endpoints that have no event in the ring yet.
func (b *Bounds) DivideEvents(endpoints int) {
	atomic.StoreUint32(b.count(Events, endpointmap.HostID), 0) // the host's events are not charged
	half := b.sizes[Events] / 2
	atomic.StoreUint32(b.word(Events, common), uint32(half))
	atomic.StoreUint32(b.word(Events, guarantee), uint32(max(1, half/max(1, endpoints))))
}

// TakeEvent records that an event of an endpoint has left the ring.
func (b *Bounds) TakeEvent(s endpointmap.ID) {
	if s == endpointmap.HostID || s > endpointmap.MaxEndpoints {
		return
	}
	for at := b.count(Events, s); ; {
		n := atomic.LoadUint32(at)
		if n == 0 || atomic.CompareAndSwapUint32(at, n, n-1) {
			return
		}
	}
}

// NoEvents records that the ring was empty: remaining counts belong to events lost with an earlier reader.
func (b *Bounds) NoEvents() {
	for s := range endpointmap.ID(endpointmap.MaxEndpoints) {
		if n := b.Held(Events, s+1); n > 0 {
			atomic.CompareAndSwapUint32(b.count(Events, s+1), uint32(n), 0)
		}
	}
}

// CollectFragments counts the fragmented datagrams of each endpoint, and divides their bound. It removes
// datagrams that the last pass already found: their fragments have arrived, or are lost. It returns how many
// are left and how many were removed. Passes must be at least a second apart.
func (b *Bounds) CollectFragments() (left, removed int, err error) {
	p, seen := b.Begin(Fragments), map[uint64]struct{}{}
	err = pin.EachEntry(b.frag, b.gate.Read, func(keys []bpf.MapsSlFragment, _ []uint32) error {
		for i := range keys {
			s := keys[i].Slot
			h := maphash.Comparable(b.seed, keys[i])
			if _, old := b.seen[h]; old {
				if err := pin.DeleteKey(b.frag, keys[i]); err != nil {
					return fmt.Errorf("remove a datagram of endpoint %d: %w", s, err)
				}
				removed++
				continue
			}
			seen[h] = struct{}{}
			p.Add(s, 1)
			left++
		}
		return nil
	})
	if err != nil {
		return left, removed, err
	}
	b.seen = seen
	if err := countOutside[bpf.MapsSlFragment, uint32](p, b.outsideFrag); err != nil {
		return left, removed, err
	}
	p.Finish()
	return left, removed, nil
}

// countOutside counts the entries of a map of outside senders.
func countOutside[K, V any](p *Pass, m *ebpf.Map) error {
	return pin.EachEntry(m, p.b.gate.Read, func(keys []K, _ []V) error {
		p.outside += int64(len(keys))
		return nil
	})
}

// CollectAffinity counts the affinity entries of endpoints and the host, and divides their bounds. local are
// the addresses of endpoints and of the host.
func (b *Bounds) CollectAffinity(local map[netip.Addr]endpointmap.ID) error {
	p4, p6 := b.Begin(Affinity4), b.Begin(Affinity6)
	err := pin.EachEntry(b.aff4, b.gate.Read, func(keys []bpf.MapsSlAffKey4, _ []uint64) error {
		for i := range keys {
			p4.addClient(local, pin.Addr4(keys[i].Client))
		}
		return nil
	})
	if err == nil {
		err = pin.EachEntry(b.aff6, b.gate.Read, func(keys []bpf.MapsSlAffKey6, _ []uint64) error {
			for i := range keys {
				p6.addClient(local, netip.AddrFrom16(keys[i].Client))
			}
			return nil
		})
	}
	if err == nil {
		err = errors.Join(countOutside[bpf.MapsSlAffKey4, uint64](p4, b.outsideAff4),
			countOutside[bpf.MapsSlAffKey6, uint64](p6, b.outsideAff6))
	}
	if err != nil {
		return fmt.Errorf("count the affinity of clients: %w", err)
	}
	p4.Finish()
	p6.Finish()
	return nil
}

// addClient counts an affinity entry of an endpoint or the host. The host's sockets have the client address 0.
// Entries of removed endpoints are not counted.
func (p *Pass) addClient(local map[netip.Addr]endpointmap.ID, client netip.Addr) {
	if client.IsUnspecified() {
		p.Add(endpointmap.HostID, 1)
	} else if s, ok := local[client]; ok && s != endpointmap.HostID {
		p.Add(s, 1)
	}
}

// AdoptAffinity copies the affinity entries of endpoints and the host from the maps in which an earlier version
// kept them. Call it before programs of this version run.
func (b *Bounds) AdoptAffinity(local map[netip.Addr]endpointmap.ID) error {
	isLocal := func(a netip.Addr) bool {
		s, ok := local[a]
		return a.IsUnspecified() || ok && s != endpointmap.HostID
	}
	err4 := adopt[bpf.MapsSlAffKey4, uint64](b, b.outsideAff4, b.aff4, func(k bpf.MapsSlAffKey4) bool {
		return isLocal(pin.Addr4(k.Client))
	})
	err6 := adopt[bpf.MapsSlAffKey6, uint64](b, b.outsideAff6, b.aff6, func(k bpf.MapsSlAffKey6) bool {
		return isLocal(netip.AddrFrom16(k.Client))
	})
	if err := errors.Join(err4, err6); err != nil {
		return fmt.Errorf("adopt the affinity of an earlier version: %w", err)
	}
	return nil
}

func adopt[K, V any](b *Bounds, from, to *ebpf.Map, wanted func(K) bool) error {
	return pin.EachEntry(from, b.gate.Read, func(keys []K, values []V) error {
		for i := range keys {
			if !wanted(keys[i]) {
				continue
			}
			if err := pin.InsertOnce(to, keys[i], values[i]); err != nil && !errors.Is(err, pin.ErrExists) {
				return err
			}
		}
		return nil
	})
}

// divide writes the guarantee of each endpoint, and the used part of the common half.
func (b *Bounds) divide(of Bound) {
	var held []int
	for s := range endpointmap.ID(endpointmap.MaxEndpoints + 1) {
		// a count may be slightly negative: a pass may already have subtracted an entry that a program counts late
		if n := b.Held(of, s); n > 0 && n < 1<<31 {
			held = append(held, n)
		}
	}
	half := b.sizes[of] / 2
	each := max(1, half/max(1, len(held)))
	beyond := 0
	for _, n := range held {
		beyond += max(0, n-each)
	}
	atomic.StoreUint32(b.word(of, common), uint32(half))
	atomic.StoreUint32(b.word(of, used), uint32(beyond))
	atomic.StoreUint32(b.word(of, guarantee), uint32(each))
	atomic.StoreUint32(b.word(of, refused), 0)
}
