// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package bound is the Go side of sl_bound and sl_held: bounds that the endpoints of a node
// share, as bpf/include/sluice/bound.h explains. Programs count what endpoints make. A collector
// corrects the counts, and computes what each endpoint is guaranteed.
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

// The bounds whose entries are counted.
const (
	Translations4 Bound = iota
	Translations6
	Fragments
	Affinity4
	Affinity6
	Events
	counted
)

// The bounds of which only refusals are kept here: rates, and connections, which package conntrack divides.
const (
	Answers Bound = iota + counted
	TooBig
	Connections4
	Connections6
	refusals
	// all is how many counters an endpoint has in sl_held.
	all = Connections4
)

var names = [refusals]string{
	"translations-ipv4", "translations-ipv6", "fragments", "affinity-ipv4", "affinity-ipv6", "events",
	"answers", "too-big", "connections-ipv4", "connections-ipv6",
}

// String is the name of the bound in metrics and documents.
func (b Bound) String() string {
	if b < refusals {
		return names[b]
	}
	return fmt.Sprintf("bound-%d", uint32(b))
}

// Counted lists the bounds whose entries are counted.
func Counted() []Bound {
	return []Bound{Translations4, Translations6, Fragments, Affinity4, Affinity6, Events}
}

// shared is how much of their map the endpoints share: an eighth of it stays free for endpoints that
// begin.
func shared(entries int) int { return entries - entries/8 }

// Bounds are the bounds of one node. Their methods may be called concurrently, but for passes
// of the same bound.
type Bounds struct {
	gate         pin.Gate
	bounds, held []byte
	refusals     []byte
	sizes        [counted]int
	outsides     [counted]int // the parts of senders outside
	outside      [counted]atomic.Int64
	// of endpoints
	frag, aff4, aff6 *ebpf.Map
	// of senders outside
	outsideFrag, outsideAff4, outsideAff6 *ebpf.Map
	seen                                  map[uint64]struct{} // datagrams that the last pass found, by their hash
	seed                                  maphash.Seed
}

// Open finds the bounds among all maps. The first process that may write sets them up.
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
	b.sizes[Events] = int(pm.Map(bpf.MapsMapSlEvents).MaxEntries()) / eventBytes
	for of := range counted {
		if !pm.ValidateOnly && b.sizes[of] > 0 && atomic.LoadUint32(b.word(of, guarantee)) == 0 {
			b.divide(of)
		}
	}
	if !pm.ValidateOnly {
		b.DivideEvents(usualPods)
	}
	return b
}

// Close refuses every later pass over a map.
func (b *Bounds) Close() { b.gate.Close() }

// eventBytes is what an event takes of the ring, with its header.
const eventBytes = int(unsafe.Sizeof(bpf.MapsSlEvent{})) + 8

// usualPods is for how many endpoints the ring of events is divided before their number is known:
// as many pods as kubelet starts by default.
const usualPods = 110

// Words of struct sl_bound.
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

// Refusals is how many packets, answers or events of an endpoint exceeded its share of a bound, since
// its slot is its own, modulo 2^32. One slot after the endpoints is outside.
func (b *Bounds) Refusals(of Bound, s endpointmap.ID) uint64 {
	at := int(s)*int(unsafe.Sizeof(bpf.MapsSlRefused{})) + int(of)*4
	return uint64(atomic.LoadUint32(pin.Word32(b.refusals, at)))
}

// Most is how many entries of a bound an endpoint may have now: its guarantee or what it has, and what
// is left of the common half.
func (b *Bounds) Most(of Bound, s endpointmap.ID) int {
	left := int(atomic.LoadUint32(b.word(of, common))) - int(atomic.LoadUint32(b.word(of, used)))
	return max(b.Guarantee(of), b.Held(of, s)) + max(0, left)
}

// Outside is how many entries senders outside have of a bound, as of the last pass, and how many they may
// have. They have none of events.
func (b *Bounds) Outside(of Bound) (used, most int) {
	return int(b.outside[of].Load()), b.outsides[of]
}

// Rate is how often in a second a CPU does what a bound limits that is a rate: SL_ANSWER_RATE and
// SL_TOO_BIG_RATE of abi.h.
func Rate(of Bound) int {
	if of == Answers {
		return 1000
	}
	return 100
}

// Taken is how often an endpoint has taken of a rate in this second.
func (b *Bounds) Taken(of Bound, s endpointmap.ID) int {
	if s > endpointmap.MaxEndpoints {
		return 0 // outside has a rate of its own
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

// Size is how many entries of a bound the endpoints share.
func (b *Bounds) Size(of Bound) int { return b.sizes[of] }

// Held is how many entries of a bound an endpoint has: those that the last pass found, and those
// that it has made since.
func (b *Bounds) Held(of Bound, s endpointmap.ID) int {
	return int(atomic.LoadUint32(b.count(of, s)))
}

// Guarantee is how many entries of a bound each endpoint may have, whatever the others have.
func (b *Bounds) Guarantee(of Bound) int { return int(atomic.LoadUint32(b.word(of, guarantee))) }

// Refused reports whether an endpoint was refused entries of a bound since the last pass.
func (b *Bounds) Refused(of Bound) bool { return atomic.LoadUint32(b.word(of, refused)) != 0 }

// Pressed reports whether an endpoint was refused a datagram in fragments, so that a pass may
// give it more.
func (b *Bounds) Pressed() bool { return b.Refused(Fragments) }

// Total is how many entries of a bound the endpoints have together.
func (b *Bounds) Total(of Bound) (n int) {
	for s := range endpointmap.ID(endpointmap.MaxEndpoints + 1) {
		n += b.Held(of, s)
	}
	return n
}

// Pass counts the entries of a bound.
type Pass struct {
	b      *Bounds
	of     Bound
	before []uint32 // when the pass began: what programs add meanwhile stays
	found  []uint32
	// outside is how many entries of senders outside were found.
	outside int64
}

// Begin begins a pass of a bound. It precedes the first look at the entries.
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

// AddOutside counts an entry of a sender outside.
func (p *Pass) AddOutside() { p.outside++ }

// Finish corrects the counts and divides the bound anew. A pass that failed is not finished.
func (p *Pass) Finish() {
	for s := range p.found {
		if p.found[s] != p.before[s] {
			atomic.AddUint32(p.b.count(p.of, endpointmap.ID(s)), p.found[s]-p.before[s])
		}
	}
	p.b.outside[p.of].Store(p.outside)
	p.b.divide(p.of)
}

// DivideEvents divides the ring of events among as many endpoints as there are on the node. Nothing
// evicts an event, so the guarantee of an endpoint that has none in the ring yet must stay free.
func (b *Bounds) DivideEvents(endpoints int) {
	atomic.StoreUint32(b.count(Events, endpointmap.HostID), 0) // the reader does not count it
	half := b.sizes[Events] / 2
	atomic.StoreUint32(b.word(Events, common), uint32(half))
	atomic.StoreUint32(b.word(Events, guarantee), uint32(max(1, half/max(1, endpoints))))
}

// TakeEvent notes that an event of an endpoint has left the ring.
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

// NoEvents notes that the ring was empty: what is counted was lost with an earlier reader.
func (b *Bounds) NoEvents() {
	for s := range endpointmap.ID(endpointmap.MaxEndpoints) {
		if n := b.Held(Events, s+1); n > 0 {
			atomic.CompareAndSwapUint32(b.count(Events, s+1), uint32(n), 0)
		}
	}
}

// CollectFragments counts the datagrams in fragments of each endpoint, and divides their bound. It
// removes those that the last pass has found already: their fragments have come, or are lost. It
// returns how many are left and were removed. There is at least a second between two passes.
func (b *Bounds) CollectFragments() (left, removed int, err error) {
	p, seen := b.Begin(Fragments), map[uint64]struct{}{}
	err = pin.EachEntry(b.frag, b.gate.Read, func(keys []bpf.MapsSlFragment, _ []uint32) error {
		for i := range keys {
			s := keys[i].Slot
			h := maphash.Comparable(b.seed, keys[i])
			if _, old := b.seen[h]; old {
				if err := pin.DeleteKey(b.frag, keys[i]); err != nil {
					return fmt.Errorf("remove a datagram of slot %d: %w", s, err)
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

// countOutside counts the entries of a map of senders outside.
func countOutside[K, V any](p *Pass, m *ebpf.Map) error {
	return pin.EachEntry(m, p.b.gate.Read, func(keys []K, _ []V) error {
		p.outside += int64(len(keys))
		return nil
	})
}

// CollectAffinity counts the backends that the clients among the endpoints and the host keep, and divides
// their bounds. The local addresses are those of endpoints and of the host.
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

// addClient counts a backend that an endpoint or the host keeps. The client of the host's sockets is the
// address 0. Clients that are gone are nobody's.
func (p *Pass) addClient(local map[netip.Addr]endpointmap.ID, client netip.Addr) {
	if client.IsUnspecified() {
		p.Add(endpointmap.HostID, 1)
	} else if s, ok := local[client]; ok && s != endpointmap.HostID {
		p.Add(s, 1)
	}
}

// AdoptAffinity copies what the endpoints and the host keep from the maps that an earlier version had it
// in, before programs of this version run.
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

// divide writes what each endpoint is guaranteed, and how much of the common half is used.
func (b *Bounds) divide(of Bound) {
	var held []int
	for s := range endpointmap.ID(endpointmap.MaxEndpoints + 1) {
		// an addition that a pass has taken back already may be late
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
