// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package bound

import (
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
)

// fresh returns bounds in ordinary memory.
func fresh(size int) *Bounds {
	b := &Bounds{
		bounds: make([]byte, int(all)*int(unsafe.Sizeof(bpf.MapsSlBound{}))),
		held:   make([]byte, (endpointmap.MaxEndpoints+1)*int(unsafe.Sizeof(bpf.MapsSlHeld{}))),
	}
	b.sizes[Fragments] = size
	b.divide(Fragments)
	return b
}

// TestHalfOfABoundIsGuaranteed: each endpoint with entries has an equal part of one half; entries beyond these
// parts count for the other half.
func TestHalfOfABoundIsGuaranteed(t *testing.T) {
	const size = 800
	for _, c := range []struct {
		what            string
		found           map[endpointmap.ID]int
		guarantee, used int
	}{
		{"nobody", nil, 400, 0},
		{"one endpoint", map[endpointmap.ID]int{7: 100}, 400, 0},
		{"one that has all", map[endpointmap.ID]int{7: 800}, 400, 400},
		{"one that has all, and another", map[endpointmap.ID]int{7: 799, 8: 1}, 200, 599},
		{"four", map[endpointmap.ID]int{1: 500, 2: 150, 3: 100, endpointmap.MaxEndpoints: 1}, 100, 450},
	} {
		b := fresh(size)
		p := b.Begin(Fragments)
		for s, n := range c.found {
			p.Add(s, n)
		}
		p.Finish()
		used := int(atomic.LoadUint32(b.word(Fragments, used)))
		common := int(atomic.LoadUint32(b.word(Fragments, common)))
		if b.Guarantee(Fragments) != c.guarantee || used != c.used || common != size/2 {
			t.Errorf("%s: guarantee %d, %d used of %d, want %d, %d of %d",
				c.what, b.Guarantee(Fragments), used, common, c.guarantee, c.used, size/2)
		}
		for s, n := range c.found {
			if got := b.Held(Fragments, s); got != n {
				t.Errorf("%s: slot %d has %d, want %d", c.what, s, got, n)
			}
		}
	}
}

// TestPassKeepsWhatIsMadeMeanwhile: a pass keeps counts of entries that are created meanwhile, and subtracts entries
// that it did not find.
func TestPassKeepsWhatIsMadeMeanwhile(t *testing.T) {
	b := fresh(800)
	atomic.StoreUint32(b.count(Fragments, 3), 50) // evicted since
	atomic.StoreUint32(b.word(Fragments, refused), 17)
	p := b.Begin(Fragments)
	p.Add(3, 10)
	atomic.AddUint32(b.count(Fragments, 3), 5) // by a program
	p.Add(endpointmap.NoID, 100)
	p.Finish()
	if got := b.Held(Fragments, 3); got != 15 {
		t.Errorf("the endpoint has %d, want 10 that were found and 5 that were made", got)
	}
	if b.Refused(Fragments) {
		t.Error("a refusal before the pass still counts")
	}
}

// TestEveryEndpointIsGuaranteedOne, however many endpoints there are.
func TestEveryEndpointIsGuaranteedOne(t *testing.T) {
	b := fresh(800)
	p := b.Begin(Fragments)
	for s := range endpointmap.ID(endpointmap.MaxEndpoints) {
		p.Add(s+1, 1)
	}
	p.Finish()
	if got := b.Guarantee(Fragments); got != 1 {
		t.Errorf("guarantee %d, want 1", got)
	}
}
