// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policytable

import (
	"math/rand/v2"
	"slices"
	"testing"
)

func TestTotalListsEveryPointOnceInTheFewestRanges(t *testing.T) {
	r := rand.New(rand.NewPCG(rand.Uint64(), 1))
	for range 1000 {
		var list Ranges
		next := uint64(0)
		for range r.IntN(20) {
			first := next + uint64(r.IntN(3))
			last := first + uint64(r.IntN(5))
			list = append(list, PortRange{
				First: uint32(first), Last: uint32(last), Admin: uint16(r.IntN(2)), Rest: uint16(r.IntN(2)),
			})
			next = last + 1
		}
		total := slices.Collect(list.Total())
		if total[0].First != 0 || total[len(total)-1].Last != LastPoint {
			t.Fatalf("%v: all points are %v", list, total)
		}
		for i, x := range total {
			if i > 0 && (total[i-1].Last+1 != x.First || total[i-1].SameRules(x)) {
				t.Fatalf("%v: all points are %v", list, total)
			}
			for _, p := range []uint32{x.First, x.Last} {
				if at := list.At(p); !at.SameRules(x) || at.First > p || at.Last < p {
					t.Fatalf("%v: %#x is %v, in all points %v", list, p, at, x)
				}
			}
		}
		if Ranges(total).Meaning() != list.Meaning() {
			t.Fatalf("%v and %v mean the same", list, total)
		}
	}
}
