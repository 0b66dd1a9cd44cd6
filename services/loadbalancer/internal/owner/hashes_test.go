// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"math/rand/v2"
	"testing"
)

// TestHashesAreASet compares the set with a map, for colliding and other hashes, while the set grows and shrinks.
func TestHashesAreASet(t *testing.T) {
	for _, domain := range []uint64{40, 5000, 1 << 40} {
		r := rand.New(rand.NewPCG(domain, 1))
		var s hashes
		want := map[uint64]bool{}
		var known []uint64
		pick := func() uint64 {
			h := 1 + r.Uint64N(domain) // no 0, which would count as 1
			if r.IntN(4) == 0 {
				h <<= 32 // the search for it begins at the slots of 0
			}
			return h
		}
		for step := range 60_000 {
			h := pick()
			if len(known) > 0 && r.IntN(3) == 0 {
				h = known[r.IntN(len(known))]
			}
			// The set grows for a while, then shrinks, and so on.
			if grows := step/10_000%2 == 0; r.IntN(4) == 0 != grows {
				s.add(h)
				want[h] = true
				known = append(known, h)
			} else {
				s.remove(h)
				delete(want, h)
			}
			if s.n != len(want) || s.has(h) != want[h] {
				t.Fatalf("domain %d, step %d: %d hashes, has %#x: %t, want %d, %t",
					domain, step, s.n, h, s.has(h), len(want), want[h])
			}
			if hashesFull(s.n, len(s.places)) {
				t.Fatalf("domain %d, step %d: %d hashes in %d places", domain, step, s.n, len(s.places))
			}
		}
		for _, h := range known {
			if s.has(h) != want[h] {
				t.Fatalf("domain %d: has %#x: %t, want %t", domain, h, s.has(h), want[h])
			}
		}
		for _, h := range known {
			s.remove(h)
		}
		if s.n != 0 || len(s.places) > 64 {
			t.Errorf("domain %d: emptied, it has %d hashes in %d places", domain, s.n, len(s.places))
		}
	}
}
