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

// clear yields the offsets of the numbers that are not in the set: first of the zone, from start on to its end and from
// its beginning, and then of all other numbers, from the end of the zone on.
func (s *numbers) clear(start int, z Zone) iter.Seq[int] {
	z = z.orAll()
	end := z.First + z.Size
	return func(yield func(int) bool) {
		for _, part := range [4][2]int{{start, end}, {z.First, start}, {end, identity.ClusterSize}, {0, z.First}} {
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

// Zone is a part of the cluster's numbers. New numbers are chosen from it first. The zero Zone has all numbers.
type Zone struct {
	First int // offset from the first number
	Size  int
}

// zones is the number of zones. Each epoch of a store uses the next zone, so the numbers of an epoch are chosen first
// again eight epochs later.
const zones = 8

// ZoneOf returns the zone of an epoch of the store; an epoch begins with each restore. Numbers that were assigned in
// earlier epochs, and that the restored data lack, are in other zones: a node that is cut off may still hold them.
func ZoneOf(epoch uint64) Zone {
	const size = identity.ClusterSize / zones
	return Zone{First: int((epoch-1)%zones) * size, Size: size}
}

func (z Zone) orAll() Zone {
	if z.Size == 0 {
		z.Size = identity.ClusterSize
	}
	return z
}

// at returns the offset for the hash of a label set.
func (z Zone) at(hash uint32) int {
	z = z.orAll()
	return z.First + int(hash%uint32(z.Size))
}

func (z Zone) has(offset int) bool {
	z = z.orAll()
	return offset >= z.First && offset < z.First+z.Size
}
