// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package idalloc

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// TestRunsDoNotOverlapAndComeBack takes and gives runs at random.
func TestRunsDoNotOverlapAndComeBack(t *testing.T) {
	const size = 1000
	r := rand.New(rand.NewPCG(1, 2))
	p := NewRuns(size)
	var taken []Run
	used := make([]bool, size)
	for range 5000 {
		if len(taken) > 0 && r.IntN(2) == 0 {
			i := r.IntN(len(taken))
			for at := taken[i].Base; at < taken[i].End(); at++ {
				used[at] = false
			}
			p.Give(taken[i])
			taken = slices.Delete(taken, i, i+1)
			continue
		}
		take := p.Take
		if r.IntN(4) == 0 {
			take = p.TakeLast
		}
		run, ok := take(1 + r.IntN(40))
		if !ok {
			continue
		}
		for at := run.Base; at < run.End(); at++ {
			if used[at] {
				t.Fatalf("element %d is allocated twice", at)
			}
			used[at] = true
		}
		taken = append(taken, run)
		n := 0
		for _, u := range used {
			if u {
				n++
			}
		}
		if p.Free() != size-n {
			t.Fatalf("%d elements are free, want %d", p.Free(), size-n)
		}
	}
	for _, run := range taken {
		p.Give(run)
	}
	if run, ok := p.Take(size); !ok || run != (Run{0, size}) {
		t.Errorf("with nothing in use, Take returns %v, %t", run, ok)
	}
}

// TestShortRunsLeaveRoomForLongOnes: short runs are allocated and freed for a long time, and must stay in the first
// part.
func TestShortRunsLeaveRoomForLongOnes(t *testing.T) {
	p := NewRuns(1 << 16)
	var taken []Run
	for i := range 20000 {
		run, ok := p.Take(5 + i%3)
		if !ok {
			t.Fatal("there is no short run")
		}
		if taken = append(taken, run); len(taken) > 500 {
			p.Give(taken[0])
			taken = taken[1:]
		}
	}
	for n := range 7 {
		if run, ok := p.TakeLast(1 << 13); !ok || run.Base != 1<<16-(n+1)<<13 {
			t.Errorf("long run %d: %v, %t", n, run, ok)
		}
	}
}
