// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rendezvous computes the tables that select backends in long lists: the hash of a connection selects a slot,
// and the slot belongs to a backend. It identifies a backend by its address, and does not access the kernel.
//
// Each slot belongs to the backend with the highest rank in it. The rank depends only on the slot and the backend.
// Therefore removing a backend moves only its own slots, adding a backend moves only slots to it, and all nodes compute
// the same table for the same backends, independent of the order of changes. (With Maglev's table, slots of other
// backends move, too.)
package rendezvous

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

const (
	// Members is SL_RENDEZVOUS of service_abi.h: up to this number of backends, the programs use rendezvous hashing
	// without a table.
	Members = 16

	// slotsPerBackend is the minimum number of slots per backend, as long as MaxBits allows it. The shares of backends
	// then differ by an eighth of their mean.
	slotsPerBackend = 64
	// MaxBits limits a table to an eighth of sl_member, because an exchange needs space for two tables.
	MaxBits = 15

	// LeastSlots is the minimum number of slots per backend in any case: with fewer, a backend might get none.
	LeastSlots = 16
	// MaxBackends is the maximum number of backends of a table.
	MaxBackends = 1 << MaxBits / LeastSlots
)

// Bits returns the binary logarithm of the number of slots that a table for so many backends has; 0: no table is
// needed.
func Bits(backends int) int {
	if backends <= Members {
		return 0
	}
	return min(bits.Len(uint(backends*slotsPerBackend-1)), MaxBits)
}

// Slots returns the number of slots of a table with a number of bits; 0 bits: none.
func Slots(bits int) int {
	if bits == 0 {
		return 0
	}
	return 1 << bits
}

// Table maps slots to backends. It is immutable. nil is the table of a list without one.
type Table struct {
	bits     int
	backends []netip.AddrPort
	seeds    []uint64 // of the backends
	owners   []uint16 // of the slots: indices into backends
}

// New computes the table of backends, which must be unique, sorted by address and port, and at most MaxBackends. With 0
// bits it returns nil.
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

// Bits returns the binary logarithm of the number of slots; 0 for a nil table.
func (t *Table) Bits() int {
	if t == nil {
		return 0
	}
	return t.bits
}

// Owners returns the owners of the slots, as indices of the backends passed to New. The caller must not modify it.
func (t *Table) Owners() []uint16 {
	if t == nil {
		return nil
	}
	return t.owners
}

// Change returns the table that New returns for other backends. If the size stays the same, it only computes the
// differences: the slots of removed backends, and the slots that new backends win.
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

// compare returns for each backend of the previous table its index in t, -1 if it was removed, and the indices of new
// backends. It sets all seeds.
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

// best returns the backend with the highest rank in a slot. Among equal ranks, the lower address wins.
func (t *Table) best(slot int) uint16 {
	best, top := 0, uint64(0)
	for i, seed := range t.seeds {
		if r := t.rank(slot, seed); r > top {
			best, top = i, r
		}
	}
	return uint16(best)
}

// rank returns the rank of a backend in a slot. The even slots of a table rank like the slots of a table of half its
// size: when a table changes its size, half of the selections move, not all.
func (t *Table) rank(slot int, seed uint64) uint64 {
	at := uint64(slot) << (MaxBits - t.bits)
	return scramble(seed ^ (at+1)*0x9e3779b97f4a7c15)
}

// seedOf returns the seed of a backend's ranks: the scrambled 64-bit FNV-1a hash of its address and port in network
// order. The salts of sl_member have only 32 bits: in a long list, two backends may have the same salt, and one of them
// would get no slot.
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

// scramble is the same function as scramble in service.h.
func scramble(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}
