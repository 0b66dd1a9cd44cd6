// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package identity

import (
	"slices"
	"strings"
	"testing"
)

func TestReservedIdentitiesAreThoseOfTheTable(t *testing.T) {
	want := []string{
		"1{reserved:host=;}", "2{reserved:world=;}", "3{reserved:unmanaged=;}", "4{reserved:health=;}", "5{reserved:init=;}",
		"6{reserved:remote-node=;}", "7{reserved:kube-apiserver=;reserved:remote-node=;}", "8{reserved:ingress=;}",
		"9{reserved:world-ipv4=;}", "10{reserved:world-ipv6=;}", "255{reserved:unknown-in-cluster=;}",
	}
	var got []string
	for _, id := range Reserved() {
		got = append(got, id.String())
		if id.Number.Scope() != ScopeReserved {
			t.Errorf("%s is not in the reserved range", id)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("reserved identities\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
