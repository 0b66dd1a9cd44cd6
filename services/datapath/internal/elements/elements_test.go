// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package elements

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// TestRunsDoNotOverlapAndComeBack takes and gives at random.
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
		run, ok := p.Take(1 + r.IntN(40))
		if !ok {
			continue
		}
		for at := run.Base; at < run.End(); at++ {
			if used[at] {
				t.Fatalf("element %d is given out twice", at)
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
		t.Errorf("with nothing in use %v, %t is to be had", run, ok)
	}
}
