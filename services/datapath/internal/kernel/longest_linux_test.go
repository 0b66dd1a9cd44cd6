// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// TestKernelEpochOfAnAddressMovesWithItsLongestMatch makes random changes of prefixes and compares with a plain
// longest-prefix match. Whenever the identity or node of an address changes, its epoch is bumped. If no address
// of a bucket changes, for example because they match a longer prefix, its epoch stays.
func TestKernelEpochOfAnAddressMovesWithItsLongestMatch(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	r := rand.New(rand.NewPCG(1, 2))
	for _, base := range []netip.Addr{netip.MustParseAddr("198.51.0.0"), netip.MustParseAddr("2001:db8::")} {
		var addrs []netip.Addr
		for a := base; len(addrs) < 64; a = a.Next() {
			addrs = append(addrs, a)
		}
		have := map[netip.Prefix]ipmap.Info{}
		match := func(a netip.Addr) (i ipmap.Info) {
			bits := -1
			for p, info := range have {
				if p.Contains(a) && p.Bits() > bits {
					i, bits = info, p.Bits()
				}
			}
			return i
		}
		for step := range 400 {
			p, err := addrs[r.IntN(len(addrs))].Prefix(base.BitLen() - []int{0, 0, 1, 3, 5, 9, 14}[r.IntN(7)])
			must(t, "prefix", err)
			large := base.BitLen()-p.Bits() >= 12
			was, epochs, moved := map[netip.Addr]ipmap.Info{}, map[netip.Addr]uint16{}, map[uint32]bool{}
			below := map[netip.Addr]ipmap.Info{}
			for a := p.Addr(); !large && p.Contains(a); a = a.Next() {
				below[a] = match(a)
			}
			for _, a := range addrs {
				was[a] = match(a)
				epochs[a], err = k.Addresses.Epoch(a)
				must(t, "Epoch", err)
			}
			if r.IntN(3) == 0 {
				must(t, "Remove", k.Addresses.Remove(p))
				delete(have, p)
			} else {
				info := ipmap.Info{Identity: identity.Numeric(300 + r.IntN(2)), Node: uint16(1 + r.IntN(2))}
				must(t, "Set", k.Addresses.Set(p, info))
				have[p] = info
			}
			for a, info := range below {
				moved[bucket(a)] = moved[bucket(a)] || match(a) != info
			}
			changed := false
			for _, a := range addrs {
				got, _, err := k.Addresses.Match(a)
				must(t, "Match", err)
				if want := match(a); got != want {
					t.Fatalf("step %d, %v: %v is %+v, want %+v", step, p, a, got, want)
				}
				epoch, err := k.Addresses.Epoch(a)
				must(t, "Epoch", err)
				if got != was[a] && epoch == epochs[a] {
					t.Fatalf("step %d, %v: %v was %+v and is %+v, and its epoch was not bumped: %d", step, p, a, was[a], got, epoch)
				}
				if !large && epoch != epochs[a] && !moved[bucket(a)] {
					t.Fatalf("step %d, %v: nothing changed for the bucket of %v, but its epoch was bumped", step, p, a)
				}
				changed = changed || epoch != epochs[a]
			}
			// setting the same entry again is not a change
			if info, ok := have[p]; ok && changed {
				before, err := k.Addresses.Epoch(p.Addr())
				must(t, "Epoch", err)
				must(t, "Set again", k.Addresses.Set(p, info))
				if after, err := k.Addresses.Epoch(p.Addr()); err != nil || after != before {
					t.Fatalf("step %d, %v: epoch %d after the same entry, %v, want %d", step, p, after, err, before)
				}
			}
		}
	}
}

// bucket returns the index of an address's epoch, as docs/reference/maps.md describes it.
func bucket(a netip.Addr) (h uint32) {
	for b := a.AsSlice(); len(b) > 0; b = b[4:] {
		h = (h ^ binary.BigEndian.Uint32(b)) * 0x9e3779b1
	}
	return h >> 20
}
