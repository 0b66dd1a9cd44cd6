// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rendezvous makes the tables by which the backend of a connection is chosen in
// long lists: the hash of the connection chooses a slot, and the slot belongs to a
// backend. It knows neither the kernel nor what a backend is beside its address.
//
// Each slot belongs to the backend that ranks highest there. A rank depends on the slot
// and on the backend alone. So a backend that goes moves no slot but its own, one that
// comes moves only slots to itself, and every node makes the same table of the same
// backends, in whatever order they came. (Maglev's table, which the backends fill in
// turns, moves some slots of other backends too.)
package rendezvous

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

const (
	// Members is SL_RENDEZVOUS of service_abi.h: the programs choose among so many
	// backends by rendezvous without a table.
	Members = 16

	// slotsPerBackend is how many slots a table has for each backend at least, while
	// MaxBits allows it: shares differ by an eighth of their mean then.
	slotsPerBackend = 64
	// MaxBits bounds a table to an eighth of sl_member: it has to be there twice
	// while it is exchanged.
	MaxBits = 15

	// LeastSlots is how many slots a table has for each backend in any case: with fewer
	// some backend might get none.
	LeastSlots = 16
	// MaxBackends is how many backends a table has at most.
	MaxBackends = 1 << MaxBits / LeastSlots
)

// Bits is the size of the table of so many backends, the binary logarithm of its slots;
// 0: they need none.
func Bits(backends int) int {
	if backends <= Members {
		return 0
	}
	return min(bits.Len(uint(backends*slotsPerBackend-1)), MaxBits)
}

// Slots is how many slots a table of so many bits has; of 0 bits none.
func Slots(bits int) int {
	if bits == 0 {
		return 0
	}
	return 1 << bits
}

// Table says which backend has which slot. It is not changed. nil is the table of a list
// that has none.
type Table struct {
	bits     int
	backends []netip.AddrPort
	seeds    []uint64 // of the backends
	owners   []uint16 // of the slots: indices of backends
}

// New makes a table of backends, sorted by address and port, each once, at most
// MaxBackends. Of 0 bits it is nil.
func New(bits int, backends []netip.AddrPort) *Table {
	if bits == 0 {
		return nil
	}
	t := &Table{
		bits: bits, backends: backends, seeds: make([]uint64, len(backends)), owners: make([]uint16, Slots(bits)),
	}
	for i, b := range backends {
		t.seeds[i] = seedOf(b)
	}
	for slot := range t.owners {
		t.owners[slot] = t.best(slot)
	}
	return t
}

// Bits is the size of the table.
func (t *Table) Bits() int {
	if t == nil {
		return 0
	}
	return t.bits
}

// Owners are the owners of the slots: indices of the backends that the table was made of.
func (t *Table) Owners() []uint16 {
	if t == nil {
		return nil
	}
	return t.owners
}

// Change makes the table that New makes of other backends. If it has the size of this one,
// only what differs is computed: the slots of those that are missing, and the ones that
// those which are new win.
func (t *Table) Change(bits int, backends []netip.AddrPort) *Table {
	if bits == 0 || t.Bits() != bits {
		return New(bits, backends)
	}
	n := &Table{bits: bits, backends: backends, seeds: make([]uint64, len(backends)), owners: make([]uint16, Slots(bits))}
	indices, fresh := n.compare(t)
	for slot, was := range t.owners {
		owner := indices[was]
		if owner < 0 {
			n.owners[slot] = n.best(slot)
			continue
		}
		if len(fresh) > 0 {
			top := n.rank(slot, n.seeds[owner])
			for _, i := range fresh {
				if r := n.rank(slot, n.seeds[i]); r > top || r == top && i < owner {
					owner, top = i, r
				}
			}
		}
		n.owners[slot] = uint16(owner)
	}
	return n
}

// compare returns the index of each backend of the table before, -1: it is missing, and the
// indices of those that are new. It sets all seeds.
func (t *Table) compare(before *Table) (indices, fresh []int) {
	indices = make([]int, len(before.backends))
	old := 0
	for i, b := range t.backends {
		for ; old < len(indices) && before.backends[old].Compare(b) < 0; old++ {
			indices[old] = -1
		}
		if old < len(indices) && before.backends[old] == b {
			indices[old], t.seeds[i] = i, before.seeds[old]
			old++
			continue
		}
		t.seeds[i] = seedOf(b)
		fresh = append(fresh, i)
	}
	for ; old < len(indices); old++ {
		indices[old] = -1
	}
	return indices, fresh
}

// best is the backend that ranks highest at a slot. Of equal ones it is that with the
// lower address.
func (t *Table) best(slot int) uint16 {
	best, top := 0, uint64(0)
	for i, seed := range t.seeds {
		if r := t.rank(slot, seed); r > top {
			best, top = i, r
		}
	}
	return uint16(best)
}

// rank is how a backend ranks at a slot. The even slots of a table are those of one of half
// its size: a list whose table gets another size moves half of the choices, not all.
func (t *Table) rank(slot int, seed uint64) uint64 {
	at := uint64(slot) << (MaxBits - t.bits)
	return scramble(seed ^ (at+1)*0x9e3779b97f4a7c15)
}

// seedOf is what a backend ranks by: 64-bit FNV-1a of its address and port in network
// order, scrambled. Of the salts of sl_member, which are half as long, two may be equal in
// a long list, and one of those two backends would have no slot.
func seedOf(b netip.AddrPort) uint64 {
	const prime = 1099511628211
	var buf [18]byte
	text := binary.BigEndian.AppendUint16(append(buf[:0], b.Addr().AsSlice()...), b.Port())
	h := uint64(14695981039346656037)
	for _, c := range text {
		h = (h ^ uint64(c)) * prime
	}
	return scramble(h)
}

// scramble is that of service.h.
func scramble(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}
