// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package shares

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
)

// TestObjectsOfOneTenantLeaveRoomInAReportForOthers: a report has space for about 75 objects with long reasons.
func TestObjectsOfOneTenantLeaveRoomInAReportForOthers(t *testing.T) {
	type key struct{ namespace, name string }
	tenants := NewTenants(Settings{})
	tenants.Set("shop", map[string]string{DefaultTenantLabel: "shop"})
	var keys, others []key
	for i := range 1000 {
		keys = append(keys, key{"evil", fmt.Sprint("p", i)})
	}
	for i := range 500 { // namespaces without the tenant label
		keys = append(keys, key{fmt.Sprint("a", i), "p"})
	}
	for i := range 20 {
		others = append(others, key{"shop", fmt.Sprint("p", i)})
	}
	others = append(others, key{"", "all"})
	keys = append(keys, others...)
	order := func(keys []key) []key {
		return InTurns(keys, func(a, b key) int {
			return cmp.Or(cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
		}, func(k key) Tenant { return tenants.Of(k.namespace) })
	}
	got := order(keys)
	if len(got) != len(keys) {
		t.Fatalf("%d of %d objects", len(got), len(keys))
	}
	for _, k := range others {
		if i := slices.Index(got, k); i < 0 || i > 2*len(others) {
			t.Errorf("%s has the place %d", k, i)
		}
	}
	slices.Reverse(keys)
	if !slices.Equal(order(keys), got) {
		t.Error("the order depends on the order of the objects")
	}
}
