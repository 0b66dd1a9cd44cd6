// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"math/rand/v2"
	"testing"
)

// TestFreedRangesMergeAndNeverOverlap compares with a plain array of allocated elements.
func TestFreedRangesMergeAndNeverOverlap(t *testing.T) {
	const size = 200
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	ranges := newRangeAllocator(size)
	var taken [size]bool
	var spans []span
	mark := func(s span, to bool) {
		t.Helper()
		for i := s.base; i < s.end(); i++ {
			if taken[i] == to {
				t.Fatalf("element %d of %v is %t twice", i, s, to)
			}
			taken[i] = to
		}
	}
	longest := func() (total, longest int) {
		run := 0
		for _, used := range taken {
			if run++; used {
				run = 0
			} else {
				total++
			}
			longest = max(longest, run)
		}
		return total, longest
	}
	for range 20000 {
		total, run := longest()
		if ranges.available() != total || ranges.largest() != run {
			t.Fatalf("%d free, the longest run %d, want %d and %d", ranges.available(), ranges.largest(), total, run)
		}
		switch n := r.IntN(20); {
		case r.IntN(2) == 0 && len(spans) > 0:
			i := r.IntN(len(spans))
			mark(spans[i], false)
			ranges.give(spans[i])
			spans[i] = spans[len(spans)-1]
			spans = spans[:len(spans)-1]
		case r.IntN(4) == 0:
			s := span{r.IntN(size), 1 + n}
			fits := s.end() <= size
			for i := s.base; i < min(s.end(), size); i++ {
				fits = fits && !taken[i]
			}
			if got := ranges.takeAt(s); got != fits {
				t.Fatalf("take %v: %t, want %t", s, got, fits)
			}
			if fits {
				mark(s, true)
				spans = append(spans, s)
			}
		default:
			s, ok := ranges.take(n)
			if ok != (n <= run) {
				t.Fatalf("take %d of a run of %d: %t", n, run, ok)
			}
			if ok && n > 0 {
				if s.n != n {
					t.Fatalf("took %v, want %d", s, n)
				}
				mark(s, true)
				spans = append(spans, s)
			}
		}
	}
	for _, s := range spans {
		ranges.give(s)
	}
	if len(ranges.free) != 1 || ranges.free[0] != (span{0, size}) {
		t.Errorf("free at the end: %v", ranges.free)
	}
}

func TestNumbersRestAsLongAsPossible(t *testing.T) {
	u := newNumbers(16, 20)
	u.takeAt(18)
	var got []int
	for range 4 {
		n, ok := u.take()
		if !ok {
			t.Fatal("none is free")
		}
		got = append(got, n)
		u.give(16) // free again, but not the next
	}
	if want := [4]int{16, 17, 19, 20}; [4]int(got) != want || u.free() != 1 {
		t.Errorf("%v, %d free, want %v, 1 free", got, u.free(), want)
	}
	if n, ok := u.take(); !ok || n != 16 {
		t.Errorf("at last %d, %t", n, ok)
	}
	if n, ok := u.take(); ok {
		t.Errorf("one too many: %d", n)
	}
}
