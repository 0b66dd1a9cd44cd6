// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// found returns the value that a program finds at a point.
func found(t *testing.T, nodes []portNode, root, point uint32) uint32 {
	t.Helper()
	for range treeDepth {
		n := &nodes[root]
		i := slices.IndexFunc(n.high[:], func(high uint32) bool { return point <= high })
		if i < 0 {
			t.Fatalf("node %d ends before %#x", root, point)
		}
		if n.value[i]&childBit == 0 {
			return n.value[i]
		}
		root = n.value[i] &^ childBit
	}
	t.Fatalf("the tree is deeper than %d nodes", treeDepth)
	return 0
}

// drawnRanges decodes bytes into ranges: each range takes its distance from the previous one, its
// length, and its rules.
func drawnRanges(data []byte, scale uint32) policytable.Ranges {
	var out policytable.Ranges
	next := uint64(0)
	for len(data) >= 4 && len(out) < nodetable.MaxRanges/2-1 {
		first := next + uint64(data[0])*uint64(scale)
		last := first + uint64(data[1])*uint64(scale)
		if last > policytable.LastPoint {
			break
		}
		out = append(out, policytable.PortRange{First: uint32(first), Last: uint32(last), Admin: uint16(data[2] % 5), Rest: uint16(data[3] % 7)})
		next, data = last+1, data[4:]
	}
	return out
}

// checkTree compares a tree with a walk over the ranges, at every border and at random points, and
// checks that it decodes to what was written.
func checkTree(t *testing.T, b *treeBuilder, ranges policytable.Ranges, r *rand.Rand) {
	t.Helper()
	root := b.add(ranges)
	if err := checkTrees([]uint32{root}, b.nodes, 7); err != nil {
		t.Fatalf("the tree of %v is corrupt: %v", ranges, err)
	}
	points := []uint32{0, policytable.LastPoint}
	for _, x := range ranges {
		points = append(points, x.First-1, x.First, x.Last, x.Last+1)
	}
	for range 50 {
		points = append(points, r.Uint32())
	}
	for _, p := range points {
		want := packRules(policytable.PortRange{})
		for _, x := range ranges {
			if x.First <= p && p <= x.Last {
				want = packRules(x)
			}
		}
		if got := found(t, b.nodes, root, p); got != want {
			t.Fatalf("%#x is %#x in the tree of %v, want %#x", p, got, ranges, want)
		}
	}
	back := rangesOf(b.nodes, root)
	if back.Meaning() != ranges.Meaning() {
		t.Fatalf("%v is read back as %v", ranges, back)
	}
	if again := b.add(back); again != root {
		t.Fatalf("%v has the roots %d and %d", ranges, root, again)
	}
}

func TestTreesFindWhatAWalkOverTheRangesFinds(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	t.Logf("seed %d", seed)
	b := newTreeBuilder(nil)
	checkTree(t, b, nil, r)
	checkTree(t, b, policytable.Ranges{{Last: policytable.LastPoint, Admin: 1, Rest: 2}}, r)
	for range 300 {
		data := make([]byte, 4*r.IntN(1<<r.IntN(13)))
		for i := range data {
			data[i] = byte(r.Uint32())
		}
		checkTree(t, b, drawnRanges(data, 1<<r.IntN(20)), r)
	}
	largest := make(policytable.Ranges, nodetable.MaxRanges)
	for i := range largest {
		largest[i] = policytable.PortRange{First: uint32(i) << 20, Last: uint32(i)<<20 | 0xFFFFF, Rest: uint16(1 + i%2)}
	}
	checkTree(t, b, largest, r)
}

func FuzzTreesFindWhatAWalkOverTheRangesFinds(f *testing.F) {
	f.Add([]byte{0, 0, 1, 1, 1, 255, 0, 2}, uint32(1))
	f.Add(slices.Repeat([]byte{1, 0, 2, 3}, 40), uint32(1<<16))
	f.Fuzz(func(t *testing.T, data []byte, scale uint32) {
		checkTree(t, newTreeBuilder(nil), drawnRanges(data, scale), rand.New(rand.NewPCG(1, 2)))
	})
}
