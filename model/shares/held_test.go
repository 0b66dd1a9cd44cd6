// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package shares

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// fillHeld gives units to a tenant, one by one, up to its maximum.
func fillHeld(h *Held, has map[Tenant]int, t Tenant) int {
	for has[t] < h.Most(t, has[t]) {
		has[t]++
		h.Add(t, 1)
	}
	return has[t]
}

// TestHeldUnitsOfNamespacesTakeNothingFromALabelledTenant: 500 full namespaces without the label do not reduce the
// units that a labelled tenant can get.
func TestHeldUnitsOfNamespacesTakeNothingFromALabelledTenant(t *testing.T) {
	for _, size := range []int{16, 160, 4096, 26_213} {
		alone, beside := &Held{Size: size}, &Held{Size: size}
		want := fillHeld(alone, map[Tenant]int{}, Labelled("b"))
		has, others := map[Tenant]int{}, 0
		for i := range 500 {
			others += fillHeld(beside, has, Namespace(fmt.Sprint("a-", i)))
		}
		if others > size/2 || others < size*2/5 {
			t.Errorf("500 namespaces have %d of %d", others, size)
		}
		if got := fillHeld(beside, has, Labelled("b")); got != want || want < size/4 {
			t.Errorf("of %d, a labelled tenant has %d with 500 other namespaces, and %d alone", size, got, want)
		}
		if got := fillHeld(beside, has, System); got < size/10 {
			t.Errorf("of %d, system has %d", size, got)
		}
	}
}

// TestHeldUnitsKeepTheFirstPartOfATenant: whatever other tenants ask for, in any order, a tenant can still use its
// first part of the limit.
func TestHeldUnitsKeepTheFirstPartOfATenant(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	const size = 1600
	for range 200 {
		h, has := &Held{Size: size}, map[Tenant]int{}
		noisy := []Tenant{Labelled("a"), Namespace("n")}
		for i := range 30 {
			noisy = append(noisy, Namespace(fmt.Sprint("n", i)))
		}
		for range 5000 {
			u := noisy[r.IntN(len(noisy))]
			if has[u] < h.Most(u, has[u]) {
				has[u]++
				h.Add(u, 1)
			} else if r.IntN(20) == 0 && has[u] > 0 {
				has[u]--
				h.Add(u, -1)
			}
			if h.Used() > size-size/10 {
				t.Fatalf("%d of %d are used", h.Used(), size)
			}
		}
		if got := fillHeld(h, has, Labelled("b")); got < (size-size/10)/16 {
			t.Fatalf("a labelled tenant has %d and others have %d, %+v", got, h.Used()-got, h)
		}
	}
}
