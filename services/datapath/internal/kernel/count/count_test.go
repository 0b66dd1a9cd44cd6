// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package count

import (
	"slices"
	"testing"
)

// TestSurplusOfOpenConnections: the longest idle connections of the sender with most connections are chosen,
// and only as many as exceed the limit.
func TestSurplusOfOpenConnections(t *testing.T) {
	const now, keep, more = 100_000, 1000, 100
	seen := func(last uint32) (uint32, bool) { return now - last, true }
	held := map[uint32][]uint32{}
	for i := range uint32(keep) {
		held[1] = append(held[1], now-i)
	}
	if got := Surplus(held, keep, seen); len(got) != 0 {
		t.Fatalf("%d connections are too many of %d", len(got), keep)
	}
	held[2] = make([]uint32, more) // idle for longer
	got := Surplus(held, keep, seen)
	if len(got) != more {
		t.Fatalf("%d connections chosen, want %d", len(got), more)
	}
	for i, last := range got {
		if want := uint32(now - keep + 1 + i); last != want {
			t.Fatalf("connection %d was last seen at %d, want %d", i, last, want)
		}
	}
}

// TestSurplusOfEntriesThatStay: of the sender that has most, only entries that may be removed are chosen.
func TestSurplusOfEntriesThatStay(t *testing.T) {
	idle := func(e uint32) (uint32, bool) { return e, e >= 10 }
	for _, c := range []struct {
		keep int
		want []uint32
	}{{6, nil}, {5, []uint32{30}}, {4, []uint32{30, 20}}, {3, []uint32{30, 20, 50}}, {0, []uint32{30, 20, 50}}} {
		got := Surplus(map[uint32][]uint32{1: {20, 1, 30, 2}, 2: {3, 50}}, c.keep, idle)
		if !slices.Equal(got, c.want) {
			t.Errorf("to keep %d of 6: %d chosen, want %d", c.keep, got, c.want)
		}
	}
}
