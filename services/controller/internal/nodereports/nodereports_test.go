// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodereports

import (
	"fmt"
	"maps"
	"testing"

	"github.com/sluice-net/sluice/services/controller/internal/policystatus"
	"github.com/sluice-net/sluice/services/policy/evaluation"
)

func TestNodesThatRefuseAPolicyAreCounted(t *testing.T) {
	k := evaluation.Key{Kind: "NetworkPolicy", Namespace: "a", Name: "p"}
	other := evaluation.Key{Kind: "NetworkPolicy", Namespace: "b", Name: "q"}
	reports := All{}
	for i := range 12 {
		reports[fmt.Sprintf("n%02d", i)] = Report{Refused: []Refused{{Key: k, Reason: "too large"}}}
	}
	reports["n03"] = Report{Refused: append(reports["n03"].Refused, Refused{Key: other, Reason: "others"})}
	got, others := byObject(reports, 50)
	want := policystatus.Nodes{
		Names: "n00, n01, n02, n03, n04, n05, n06, n07, n08, n09, …", Count: 12, All: 50, Reason: "too large",
	}
	if got[k] != want {
		t.Errorf("%+v, want %+v", got[k], want)
	}
	want = policystatus.Nodes{Names: "n03", Count: 1, All: 50, Reason: "others"}
	if got[other] != want || len(got) != 2 {
		t.Errorf("%+v, want %+v", got[other], want)
	}
	if want := (policystatus.Nodes{All: 50}); others != want {
		t.Errorf("others: %+v, want %+v", others, want)
	}
}

// TestPoliciesBeyondAReportAreUnknownOnItsNode: the report of a node omits some policies. The node may not enforce a
// policy that it does not report.
func TestPoliciesBeyondAReportAreUnknownOnItsNode(t *testing.T) {
	k := evaluation.Key{Kind: "NetworkPolicy", Namespace: "a", Name: "p"}
	reports := All{
		"n1": {Refused: []Refused{{Key: k, Reason: "too large"}}, Omitted: 200, Reasons: map[string]uint32{"A": 4, "B": 195}},
		"n2": {Omitted: 300, Reasons: map[string]uint32{"B": 299, "C": 0, "D": 5}},
		"n3": {Refused: []Refused{{Key: evaluation.NodeStorage, Reason: "full"}}},
	}
	got, others := byObject(reports, 9)
	want := policystatus.Nodes{
		Names: "n1", Count: 1, All: 9, Reason: "too large", Unknown: "n2", UnknownCount: 1, Omitted: 256,
		Reasons: "B 256, A 4, D 4",
	}
	if got[k] != want || len(got) != 1 {
		t.Errorf("%+v, want %+v", got, want)
	}
	want = policystatus.Nodes{
		All: 9, Unknown: "n1, n2", UnknownCount: 2, Omitted: 256, Reasons: "B 256, A 4, D 4",
	}
	if others != want {
		t.Errorf("others: %+v, want %+v", others, want)
	}
}

// TestDisksOfReportsAreNoPolicies: an entry about a disk is not treated as a policy.
func TestDisksOfReportsAreNoPolicies(t *testing.T) {
	k := evaluation.Key{Kind: "NetworkPolicy", Namespace: "a", Name: "p"}
	reports := All{
		"n1": {Refused: []Refused{{Key: evaluation.NodeStorage, Reason: "full"}, {Key: k, Reason: "too large"}}},
		"n2": {Refused: []Refused{{Key: k, Reason: "too large"}}},
	}
	full := map[string]string{"n1": "full"}
	if got := disks(reports, nil); !maps.Equal(got, full) {
		t.Errorf("%v, want %v", got, full)
	}
	if got, _ := byObject(reports, 3); len(got) != 1 || got[k].Count != 2 {
		t.Errorf("%+v, want one policy on two nodes", got)
	}
}

// TestReportThatCannotBeReadIsUnknown: for a node with an unreadable report, it is unknown whether it enforces a
// policy. The last error of its disk stays.
func TestReportThatCannotBeReadIsUnknown(t *testing.T) {
	k := evaluation.Key{Kind: "NetworkPolicy", Namespace: "a", Name: "p"}
	reports := All{
		"n1": {Refused: []Refused{{Key: k, Reason: "too large"}}},
		"n2": {Unreadable: true, Omitted: 1},
		"n3": {Unreadable: true},
	}
	got, others := byObject(reports, 9)
	want := policystatus.Nodes{All: 9, Unreadable: "n2, n3", UnreadableCount: 2}
	if others != want {
		t.Errorf("others: %+v, want %+v", others, want)
	}
	want.Names, want.Count, want.Reason = "n1", 1, "too large"
	if got[k] != want || len(got) != 1 {
		t.Errorf("%+v, want %+v", got, want)
	}
	before := map[string]string{"n1": "full", "n2": "full"}
	if got, want := disks(reports, before), map[string]string{"n2": "full"}; !maps.Equal(got, want) {
		t.Errorf("disks %v, want %v", got, want)
	}
}
