// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
)

// TestEveryNumberThatIsNotInTheSetIsFoundOnce compares the bits with a map.
func TestEveryNumberThatIsNotInTheSetIsFoundOnce(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 1))
		var s numbers
		in := map[int]bool{}
		// From almost empty to full.
		for i := range identity.ClusterSize {
			if r.IntN(20) < int(seed) {
				s.set(identity.MinCluster + identity.Numeric(i))
				in[i] = true
			}
		}
		for range 1000 {
			i := r.IntN(identity.ClusterSize)
			s.unset(identity.MinCluster + identity.Numeric(i))
			delete(in, i)
		}
		start := r.IntN(identity.ClusterSize)
		var want []int
		for i := range identity.ClusterSize {
			if at := (start + i) % identity.ClusterSize; !in[at] {
				want = append(want, at)
			}
		}
		if got := slices.Collect(s.clear(start, Zone{})); !slices.Equal(got, want) {
			t.Errorf("seed %d, from %d: got %d numbers, want %d", seed, start, len(got), len(want))
		}
	}
	var s numbers
	for n := range identity.Numeric(1 << 17) {
		s.set(n) // also what is none of the cluster's
	}
	if got := slices.Collect(s.clear(5, Zone{})); len(got) != 0 {
		t.Errorf("%d numbers of the full set are free", len(got))
	}
}
