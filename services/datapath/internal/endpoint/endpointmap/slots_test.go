// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpointmap

import "testing"

func TestSlotsAreGivenOutOnceAndNeverTheHosts(t *testing.T) {
	table := newSlotTable([]ID{1, 7})
	seen := map[ID]bool{HostID: true, 1: true, 7: true}
	for range MaxEndpoints - 2 {
		s, ok := table.take()
		if !ok || seen[s] || s > MaxEndpoints {
			t.Fatalf("take: %d, %v, seen before: %v", s, ok, seen[s])
		}
		seen[s] = true
	}
	if s, ok := table.take(); ok {
		t.Errorf("one slot too many: %d", s)
	}
}

func TestRetiredSlotsRestUntilTheirGracePeriodHasPassed(t *testing.T) {
	var used []ID
	for s := ID(1); s <= MaxEndpoints; s++ {
		used = append(used, s)
	}
	table := newSlotTable(used)
	table.retire(5)
	table.retire(5) // the second call has no effect
	first := table.beginDrain()
	table.retire(6) // retired during the grace period of slot 5, so that period does not cover slot 6
	if _, ok := table.take(); ok {
		t.Fatal("a slot was free during its grace period")
	}
	table.endDrain(first, false)
	if _, ok := table.take(); ok {
		t.Fatal("a slot was free after a grace period that failed")
	}
	second := table.beginDrain()
	if len(second) != 2 {
		t.Fatalf("the next grace period frees %v, want 5 and 6", second)
	}
	table.endDrain(second, true)
	a, okA := table.take()
	b, okB := table.take()
	if !okA || !okB || a == b || a+b != 11 {
		t.Errorf("freed slots are %d, %d, want 5 and 6", a, b)
	}
	if s, ok := table.take(); ok {
		t.Errorf("one slot too many: %d", s)
	}
}

func TestFreedSlotsRestAsLongAsPossible(t *testing.T) {
	table := newSlotTable(nil)
	first, _ := table.take()
	table.retire(first)
	table.endDrain(table.beginDrain(), true)
	if next, _ := table.take(); next == first {
		t.Errorf("slot %d was used again at once", first)
	}
}
