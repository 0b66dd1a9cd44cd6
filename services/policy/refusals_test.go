// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// TestPoliciesOfOneTenantLeaveRoomInTheReportForOthers: a report has space for about 75 policies with long reasons.
// One tenant has more than that, and the policies of other tenants are reported nevertheless.
func TestPoliciesOfOneTenantLeaveRoomInTheReportForOthers(t *testing.T) {
	tenants := shares.NewTenants(shares.Settings{})
	tenants.Set("shop", map[string]string{shares.DefaultTenantLabel: "shop"})
	var keys, others []policy.Key
	for i := range 1000 {
		keys = append(keys, policy.Key{Kind: "CiliumNetworkPolicy", Namespace: "evil", Name: fmt.Sprint("p", i)})
	}
	for i := range 500 { // namespaces without the tenant label
		keys = append(keys, policy.Key{Kind: "CiliumNetworkPolicy", Namespace: fmt.Sprint("a", i), Name: "p"})
	}
	for i := range 20 {
		others = append(others, policy.Key{Kind: "NetworkPolicy", Namespace: "shop", Name: fmt.Sprint("p", i)})
	}
	others = append(others, policy.Key{Kind: "CiliumClusterwideNetworkPolicy", Name: "all"})
	keys = append(keys, others...)
	got := inTurns(keys, tenants.Of)
	if len(got) != len(keys) {
		t.Fatalf("%d of %d policies", len(got), len(keys))
	}
	for _, k := range others {
		if i := slices.Index(got, k); i < 0 || i > 2*len(others) {
			t.Errorf("%s has the place %d", k, i)
		}
	}
	slices.Reverse(keys)
	if !slices.Equal(inTurns(keys, tenants.Of), got) {
		t.Error("the order depends on the order of the policies")
	}
}
