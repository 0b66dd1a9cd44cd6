// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"encoding/binary"
	"hash/maphash"
	"net/netip"
)

// backends counts the services of each address and port. It stores only 64-bit hashes, which need a third of the
// memory. A collision would make the count of distinct backends too low, but is extremely unlikely.
type backends struct {
	seed maphash.Seed
	once hashes            // hashes with at least one service
	more map[uint64]uint32 // for a hash with several services: the number of services after the first
}

func newBackends() backends {
	return backends{seed: maphash.MakeSeed(), more: make(map[uint64]uint32)}
}

func (b *backends) hash(at netip.AddrPort) uint64 {
	var text [18]byte
	addr := at.Addr().As16()
	copy(text[:], addr[:])
	binary.BigEndian.PutUint16(text[16:], at.Port())
	return maphash.Bytes(b.seed, text[:])
}

// of returns the number of services with a hash.
func (b *backends) of(h uint64) int {
	if !b.once.has(h) {
		return 0
	}
	return 1 + int(b.more[h])
}

func (b *backends) add(at netip.AddrPort) {
	h := b.hash(at)
	if b.of(h) == 0 {
		b.once.add(h)
		return
	}
	b.more[h]++
}

func (b *backends) remove(at netip.AddrPort) {
	switch h := b.hash(at); b.of(h) {
	case 0:
	case 1:
		b.once.remove(h)
	case 2:
		delete(b.more, h)
	default:
		b.more[h]--
	}
}
