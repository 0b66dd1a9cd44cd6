// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package count

import "testing"

// TestSurplusOfOpenConnections: the longest idle connections of the sender with most connections are chosen,
// and only as many as exceed the limit.
func TestSurplusOfOpenConnections(t *testing.T) {
	const now, keep, more = 100_000, 1000, 100
	seen := func(last uint32) uint32 { return last }
	held := map[uint32][]uint32{}
	for i := range uint32(keep) {
		held[1] = append(held[1], now-i)
	}
	if got := Surplus(held, keep, now, seen); len(got) != 0 {
		t.Fatalf("%d connections are too many of %d", len(got), keep)
	}
	held[2] = make([]uint32, more) // idle for longer
	got := Surplus(held, keep, now, seen)
	if len(got) != more {
		t.Fatalf("%d connections chosen, want %d", len(got), more)
	}
	for i, last := range got {
		if want := uint32(now - keep + 1 + i); last != want {
			t.Fatalf("connection %d was last seen at %d, want %d", i, last, want)
		}
	}
}
