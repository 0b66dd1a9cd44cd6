// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"testing"

	identities "github.com/sluice-net/sluice/services/policy/internal/client"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/statuswriter"
)

func TestNodesThatRefuseAPolicyAreCounted(t *testing.T) {
	k := policy.Key{Kind: "NetworkPolicy", Namespace: "a", Name: "p"}
	other := policy.Key{Kind: "NetworkPolicy", Namespace: "b", Name: "q"}
	reports := identities.Reports{}
	for i := range 12 {
		reports[fmt.Sprintf("n%02d", i)] = []identities.Refused{{Key: k, Reason: "too large"}}
	}
	reports["n03"] = append(reports["n03"], identities.Refused{Key: other, Reason: "others"})
	got := byPolicy(reports, 50)
	want := statuswriter.Nodes{
		Names: "n00, n01, n02, n03, n04, n05, n06, n07, n08, n09, …", Count: 12, All: 50, Reason: "too large",
	}
	if got[k] != want {
		t.Errorf("%+v, want %+v", got[k], want)
	}
	want = statuswriter.Nodes{Names: "n03", Count: 1, All: 50, Reason: "others"}
	if got[other] != want || len(got) != 2 {
		t.Errorf("%+v, want %+v", got[other], want)
	}
}
