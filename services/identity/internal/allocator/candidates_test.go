// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/identity"
)

func TestCandidateIsTheFirstFreeNumberFromTheStart(t *testing.T) {
	const start, first = 100, identity.MinCluster + 100
	now := time.Unix(1_000_000, 0)
	c, used := newCandidates(), map[identity.Numeric]bool{first: true, first + 1: true}
	inUse := func(n identity.Numeric) bool { return used[n] }
	c.occupy(first+2, now.Add(time.Minute))
	c.short.set(first + 3)
	pick := func(want identity.Numeric) {
		t.Helper()
		if n, _ := c.pick(start, Zone{}, now, inUse); n != want {
			t.Fatalf("picked %d, want %d", n, want)
		}
	}
	pick(first + 4)
	pick(first + 5) // another claim has first+4
	c.drop(first + 4)
	pick(first + 4)
	now = now.Add(time.Minute)
	pick(first + 2) // no longer in quarantine

	// A number that is in use no more is found after unassign.
	delete(used, first)
	pick(first + 6)
	c.unassign(first)
	c.short.set(first)
	pick(first) // at the start also after a short life
}

func TestNumbersOfShortLivesAreCandidatesWhenNoOtherIsFree(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	c, free := newCandidates(), map[identity.Numeric]bool{300: true, 400: true, 500: true}
	c.short.set(300)
	c.short.set(400)
	inUse := func(n identity.Numeric) bool { return !free[n] }
	for _, want := range []identity.Numeric{500, 300, 400} {
		if n, used := c.pick(10, Zone{}, now, inUse); n != want || used != 0 {
			t.Errorf("picked %d (%d used), want %d", n, used, want)
		}
	}
	if n, used := c.pick(10, Zone{}, now, inUse); n != 0 || used != identity.ClusterSize-3 {
		t.Errorf("picked %d (%d used), want none and %d used", n, used, identity.ClusterSize-3)
	}
}

func TestOnlyKnownShortLivesMakeANumberTheLast(t *testing.T) {
	now, delay := time.Unix(1_000_000, 0), time.Hour
	c := newCandidates()
	c.end(300, now.Add(-shortLife-delay+1), now, delay)
	c.end(301, now.Add(-shortLife-delay), now, delay)
	c.end(302, time.Time{}, now, delay)
	for n, want := range map[identity.Numeric]bool{300: true, 301: false, 302: false} {
		if c.short.has(n) != want {
			t.Errorf("%d is assigned last: %t, want %t", n, !want, want)
		}
	}
	c.begin(300)
	if c.short.has(300) {
		t.Error("a number with a label set is assigned last")
	}
}

// TestNewNumbersComeFromTheZoneOfTheEpoch: a node that is cut off may hold numbers of other epochs, which come last.
func TestNewNumbersComeFromTheZoneOfTheEpoch(t *testing.T) {
	now, seen := time.Unix(1_000_000, 0), map[int]uint64{}
	for epoch := uint64(1); epoch <= zones; epoch++ {
		z := ZoneOf(epoch)
		for i := z.First; i < z.First+z.Size; i++ {
			if other := seen[i]; other != 0 {
				t.Fatalf("the offset %d is of epochs %d and %d", i, other, epoch)
			}
			seen[i] = epoch
		}
	}
	if len(seen) != identity.ClusterSize || ZoneOf(zones+2) != ZoneOf(2) {
		t.Errorf("%d numbers have a zone; zone %v after %v", len(seen), ZoneOf(zones+2), ZoneOf(2))
	}

	z := ZoneOf(2)
	first, last := identity.MinCluster+identity.Numeric(z.First), identity.MinCluster+identity.Numeric(z.First+z.Size-1)
	c, used := newCandidates(), map[identity.Numeric]bool{}
	pick := func(start int, want identity.Numeric) {
		t.Helper()
		if n, _ := c.pick(start, z, now, func(n identity.Numeric) bool { return used[n] }); n != want {
			t.Errorf("picked %d, want %d", n, want)
		}
	}
	pick(z.at(uint32(z.Size-1)), last)
	used[last] = true
	pick(z.at(uint32(2*z.Size-1)), first) // around, within the zone
	for n := first; n <= last; n++ {
		used[n] = n != first+7
	}
	c = newCandidates()
	c.short.set(first + 7)
	pick(z.First+20, first+7) // after a short life, and before all other zones
	pick(z.First+20, last+1)  // the zone is full
}
