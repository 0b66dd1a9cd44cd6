// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policytable

import (
	"errors"
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
			list = append(list, PortRange{First: uint32(first), Last: uint32(last), Admin: uint16(r.IntN(2)), Rest: uint16(r.IntN(2))})
			next = last + 1
		}
		if err := list.validate(1); err != nil {
			t.Fatal(err)
		}
		total := slices.Collect(list.Total())
		if total[0].First != 0 || total[len(total)-1].Last != LastPoint {
			t.Fatalf("%v: all points are %v", list, total)
		}
		for i, x := range total {
			if i > 0 && (total[i-1].Last+1 != x.First || total[i-1].alike(x)) {
				t.Fatalf("%v: all points are %v", list, total)
			}
			for _, p := range []uint32{x.First, x.Last} {
				if at := list.At(p); !at.alike(x) || at.First > p || at.Last < p {
					t.Fatalf("%v: %#x is %v, in all points %v", list, p, at, x)
				}
			}
		}
		if Ranges(total).Meaning() != list.Meaning() {
			t.Fatalf("%v and %v mean the same", list, total)
		}
	}
}

func TestRangesThatCannotBeLookedUpAreRefused(t *testing.T) {
	many := make(Ranges, MaxRanges/2+1)
	for i := range many {
		many[i] = PortRange{First: uint32(2 * i), Last: uint32(2 * i), Rest: 1}
	}
	for name, list := range map[string]Ranges{
		"backwards":   {{First: 2, Last: 1}},
		"overlapping": {{First: 1, Last: 2}, {First: 2, Last: 3}},
		"unsorted":    {{First: 5, Last: 6}, {First: 1, Last: 2}},
		"admin":       {{Admin: 2}},
		"rest":        {{Rest: 2}},
		"too many":    many,
	} {
		if err := list.validate(1); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := many[:MaxRanges/2].validate(1); err != nil {
		t.Errorf("as many as there can be: %v", err)
	}
}
