// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"testing"

	"github.com/sluice-net/sluice/model/shares"
)

// labelledOf returns a function that returns the tenant of a namespace. Only the given namespaces have the tenant
// label, each with its own name as the value.
func labelledOf(namespaces ...string) func(string) shares.Tenant {
	tenants := shares.NewTenants(shares.Settings{})
	for _, ns := range namespaces {
		tenants.Set(ns, map[string]string{shares.DefaultTenantLabel: ns})
	}
	return tenants.Of
}

func TestEveryPlaceOfTheQuotaIsGivenBack(t *testing.T) {
	p := newPlaces(2, labelledOf())
	reserve := func(ns string, moves bool, leaves string, ok bool) {
		t.Helper()
		if err := p.reserve(ns, moves, leaves); (err == nil) != ok {
			t.Fatalf("reserve for %q: %v, want ok %t; %+v", ns, err, ok, p)
		}
	}
	reserve("a", false, "", true)
	p.hold("a")
	p.done("a") // the claim has become a hold
	reserve("b", false, "", true)
	reserve("c", false, "", false)
	reserve("c", true, "a", true) // the holder moves away from the one of a
	p.release("a")
	p.hold("c")
	p.done("c")
	p.done("b") // the claim failed
	if p.held != 1 || p.claiming != 0 || len(p.in) != 1 || p.in["c"] != 1 {
		t.Errorf("places %+v, want one of c", p)
	}
	p.release("c")
	if p.held != 0 || len(p.in) != 0 {
		t.Errorf("places %+v, want none", p)
	}
}

func TestPlacesOfATenantCountTogether(t *testing.T) {
	const quota = 64
	p := newPlaces(quota, labelledOf("team"))
	fill := func(ns string) (got int, err *QuotaError) {
		for range quota {
			if err := p.reserve(ns, false, ""); err != nil {
				return got, err
			}
			p.hold(ns)
			p.done(ns)
			got++
		}
		return got, nil
	}
	// A sixteenth of 64, and half of what is then free.
	if n, err := fill("team"); n != 24 || err == nil || err.Of != "tenant team" || err.Used != 24 {
		t.Errorf("a tenant got %d, want 24: %v", n, err)
	}
	if err := p.reserve("team", true, "team"); err != nil {
		t.Errorf("a holder that leaves a number of the tenant: %v", err)
	}
	p.done("team")
	// Each is a tenant of its own, and together they may have half of the quota.
	first, _ := fill("plain")
	second, err := fill("other")
	if first != 16 || second != 11 || err == nil {
		t.Errorf("namespaces without the label got %d and %d: %v", first, second, err)
	}
	if n, err := fill(""); n != quota-24-first-second || err == nil || err.Of != "" {
		t.Errorf("label sets without a namespace got %d: %v", n, err)
	}
}
