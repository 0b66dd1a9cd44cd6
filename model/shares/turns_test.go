// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package shares

import (
	"fmt"
	"slices"
	"testing"
)

// TestLabelledTenantWaitsForFewTurns: a tenant that always waits, and 500 namespaces without the label, do not delay a
// labelled tenant.
func TestLabelledTenantWaitsForFewTurns(t *testing.T) {
	turns := NewTurns()
	all := []Tenant{Labelled("a")}
	for i := range 500 {
		all = append(all, Namespace(fmt.Sprint("n", i)))
	}
	serve := func() Tenant {
		for _, of := range all {
			turns.Join(of)
		}
		next := slices.MinFunc(all, turns.Compare)
		turns.Serve(next)
		return next
	}
	for range 100 {
		serve()
	}
	all = append(all, Labelled("b"), Namespace("z"))
	waited := map[Tenant]int{}
	for i := range 1100 {
		if next := serve(); waited[next] == 0 {
			waited[next] = i + 1
		}
	}
	if n := waited[Labelled("b")]; n == 0 || n > 3 {
		t.Errorf("the labelled tenant was served as number %d, later than 3", n)
	}
	if n := waited[Namespace("z")]; n == 0 || n > 2*502 {
		t.Errorf("the new namespace was served as number %d, later than %d", n, 2*502)
	}
	turns.Keep(func(of Tenant) bool { return of == all[0] })
	if n := turns.Len(); n != 1 {
		t.Errorf("%d tenants are remembered, want 1", n)
	}
}
