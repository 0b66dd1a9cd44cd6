// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package fair

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestThePodThatUsesMostMakesPlace(t *testing.T) {
	l := New(100, 80)
	var dropped []string
	add := func(endpoint uint16, size int) *Item {
		return l.Add(endpoint, size, func() { dropped = append(dropped, fmt.Sprint(endpoint, "/", size)) })
	}
	for i := range 8 {
		add(1, 10-i%2) // 76 together
	}
	add(1, 20) // beyond the limit of the pod
	if want := []string{"1/10", "1/9"}; !slices.Equal(dropped, want) || l.Used() != 77 {
		t.Errorf("dropped %v; %d used", dropped, l.Used())
	}
	dropped = nil
	for range 5 {
		if add(2, 10) == nil {
			t.Fatal("a pod that uses less was refused")
		}
	}
	if want := []string{"1/10", "1/9", "1/10"}; !slices.Equal(dropped, want) || l.Used() != 98 {
		t.Errorf("dropped %v; %d used", dropped, l.Used())
	}
	dropped = nil
	add(2, 10) // endpoint 2 uses most now
	if want := []string{"2/10"}; !slices.Equal(dropped, want) {
		t.Errorf("dropped %v", dropped)
	}
	if add(3, 81) != nil {
		t.Error("an item that is larger than the limit of a pod was added")
	}
	l = New(10, 10)
	add(1, 5)
	add(2, 5)
	dropped = nil
	if add(3, 6) != nil || len(dropped) != 0 {
		t.Error("a pod that would use most took the place of another")
	}
}

// TestUseIsCounted compares the counts with a list of the items.
func TestUseIsCounted(t *testing.T) {
	l := New(1000, 300)
	random := rand.New(rand.NewPCG(1, 2))
	items := make(map[*Item]int)
	for range 20_000 {
		if random.IntN(3) == 0 {
			for item, size := range items {
				if !l.Remove(item) || l.Remove(item) {
					t.Fatalf("an item of %d could not be removed once", size)
				}
				delete(items, item)
				break
			}
			continue
		}
		var item *Item
		size := 1 + random.IntN(320)
		item = l.Add(uint16(random.IntN(8)), size, func() {})
		if item != nil {
			items[item] = size
		}
		total := 0
		for item, size := range items {
			if item.gone {
				delete(items, item)
				continue
			}
			total += size
		}
		if total != l.Used() || total > 1000 {
			t.Fatalf("%d used, counted %d", total, l.Used())
		}
		for e, p := range l.pods {
			if p.used > 300 || p.used <= 0 || p.oldest == nil || p.newest == nil {
				t.Fatalf("endpoint %d: %+v", e, p)
			}
		}
	}
}
