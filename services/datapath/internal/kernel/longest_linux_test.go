// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/kerneltest"
)

// Random changes of prefixes, compared with the obvious longest match: whenever
// the answer for an address changes, its epoch has moved; and a change that
// changes no answer disturbs no connection.
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
			was, epochs := map[netip.Addr]ipmap.Info{}, map[netip.Addr]uint16{}
			for _, a := range addrs {
				was[a] = match(a)
				epochs[a], err = k.Addresses.Epoch(a)
				must(t, "Epoch", err)
			}
			if r.IntN(3) == 0 {
				must(t, "Remove", k.Addresses.Remove(p))
				delete(have, p)
			} else {
				info := ipmap.Info{Identity: identity.Numeric(300 + r.IntN(2))}
				must(t, "Set", k.Addresses.Set(p, info))
				have[p] = info
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
					t.Fatalf("step %d, %v: %v was %+v and is %+v, and its epoch is still %d", step, p, a, was[a], got, epoch)
				}
				changed = changed || epoch != epochs[a]
			}
			// the same again is no change
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
