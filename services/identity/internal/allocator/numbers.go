// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"iter"
	"math/bits"

	"github.com/sluice-net/sluice/model/identity"
)

// numbers is a set of cluster numbers with one bit for each, so that a search for a free number in a full cluster reads
// a thousand words instead of 65,280 map entries.
type numbers [(identity.ClusterSize + 63) / 64]uint64

func (s *numbers) set(n identity.Numeric) {
	if n.Scope() == identity.ScopeCluster {
		i := n - identity.MinCluster
		s[i/64] |= 1 << (i % 64)
	}
}

func (s *numbers) unset(n identity.Numeric) {
	if n.Scope() == identity.ScopeCluster {
		i := n - identity.MinCluster
		s[i/64] &^= 1 << (i % 64)
	}
}

func (s *numbers) has(n identity.Numeric) bool {
	i := n - identity.MinCluster
	return n.Scope() == identity.ScopeCluster && s[i/64]&(1<<(i%64)) != 0
}

// clear yields the offsets of the numbers that are not in the set: from start to the end, then up to start.
func (s *numbers) clear(start int) iter.Seq[int] {
	return func(yield func(int) bool) {
		for _, part := range [2][2]int{{start, identity.ClusterSize}, {0, start}} {
			for i := part[0]; i < part[1]; {
				free := ^s[i/64] >> (i % 64)
				if free == 0 {
					i += 64 - i%64
					continue
				}
				i += bits.TrailingZeros64(free)
				if i >= part[1] {
					break
				}
				if !yield(i) {
					return
				}
				i++
			}
		}
	}
}
