// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// addressGroup returns the i-th CIDR group with the given number of prefixes and a label team.
func addressGroup(t testing.TB, i, prefixes int) policy.Object {
	t.Helper()
	return labelledGroup(t, i, prefixes, fmt.Sprintf("{team: t%d}", i%10))
}

func labelledGroup(t testing.TB, i, prefixes int, labels string) policy.Object {
	t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "apiVersion: cilium.io/v2\nkind: CiliumCIDRGroup\nmetadata: {name: g%d, labels: %s}\nspec:\n  externalCIDRs:\n", i, labels)
	for p := range prefixes {
		fmt.Fprintf(&b, "  - %d.%d.%d.%d/32\n", 10+i/256, i%256, p/256, p%256)
	}
	return decodeOne(t, b.String())
}

// groupSubjects returns a change with subjects, starting at identity 1000. Each has a policy with egress(i) as its
// peer.
func groupSubjects(t testing.TB, subjects int, egress func(i int) string) Change {
	t.Helper()
	var c Change
	for i := range subjects {
		id, err := peer.New(identity.Numeric(1000+i), label.NewSet(label.Kubernetes("app", fmt.Sprint("a", i)),
			label.Kubernetes(label.KeyNamespace, "shop"), label.Kubernetes(label.KeyCluster, "default")))
		if err != nil {
			t.Fatal(err)
		}
		c.AddIdentities = append(c.AddIdentities, id)
		c.AddSubjects = append(c.AddSubjects, id.Number)
		c.UpsertPolicies = append(c.UpsertPolicies, decodeOne(t, fmt.Sprintf(`
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: p%d, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: a%d}}
  egress:
  - toCIDRSet: [%s]
`, i, i, egress(i))))
	}
	return c
}

// work returns the difference of two counters, for the counters that a change of groups may increase.
func work(before, after Counters) string {
	return fmt.Sprintf("%d programs, %d tables, %d binds, %d prefixes of groups read",
		after.Programs-before.Programs, after.Tables-before.Tables, after.Binds-before.Binds, after.GroupPrefixes-before.GroupPrefixes)
}

func apply(t testing.TB, e *Engine, c Change) (before, after Counters) {
	t.Helper()
	before = e.Counters()
	if err := e.Apply(c); err != nil {
		t.Fatal(err)
	}
	return before, e.Counters()
}

func TestGroupsAreReadOnceEach(t *testing.T) {
	e := New(Config{Cluster: "default", AllowHost: true})
	var c Change
	for i := range 400 {
		c.UpsertPolicies = append(c.UpsertPolicies, addressGroup(t, i, 500))
	}
	if got, want := work(apply(t, e, c)), "0 programs, 0 tables, 0 binds, 200000 prefixes of groups read"; got != want {
		t.Errorf("400 groups of 500 prefixes: %s, want %s", got, want)
	}
	if got, want := work(apply(t, e, Change{UpsertPolicies: []policy.Object{addressGroup(t, 3, 400)}})),
		"0 programs, 0 tables, 0 binds, 400 prefixes of groups read"; got != want {
		t.Errorf("one of them again: %s, want %s", got, want)
	}
}

func TestAGroupConcernsOnlySubjectsThatMatchIt(t *testing.T) {
	const groups, subjects = 100, 200
	peers := map[string]struct {
		peer func(i int) string
		// of7 is the number of subjects with group 7 (team t7) as a peer, and ofT7 the number of subjects that a new
		// group of team t7 affects.
		of7, ofT7 int
	}{
		"by name":  {func(i int) string { return fmt.Sprintf("{cidrGroupRef: g%d}", i%groups) }, 2, 0},
		"by label": {func(i int) string { return fmt.Sprintf("{cidrGroupSelector: {matchLabels: {team: t%d}}}", i%10) }, 20, 20},
		"by other labels": {func(int) string {
			return "{cidrGroupSelector: {matchExpressions: [{key: team, operator: NotIn, values: [t7]}]}}"
		}, 200, 200},
	}
	for name, test := range peers {
		t.Run(name, func(t *testing.T) {
			e := New(Config{Cluster: "default", AllowHost: true})
			c := groupSubjects(t, subjects, test.peer)
			for i := range groups {
				c.UpsertPolicies = append(c.UpsertPolicies, addressGroup(t, i, 20))
			}
			apply(t, e, c)
			// For each affected subject, one program is compiled, and the subject is bound to a new table. Subjects
			// with the same peer share a table.
			want := func(subjects, read int) string {
				return fmt.Sprintf("%d programs, %d tables, %d binds, %d prefixes of groups read", subjects, min(subjects, 1), subjects, read)
			}
			for _, change := range []struct {
				what     string
				group    policy.Object
				subjects int
				read     int
			}{
				{"add a group that no rule refers to", labelledGroup(t, 500, 10, "{color: red}"), 0, 10},
				{"add a group of team t7", labelledGroup(t, 507, 10, "{team: t7}"), test.ofT7, 10},
				{"change the prefixes of g7", addressGroup(t, 7, 21), test.of7, 21},
				{"give g7 a label that no rule refers to", labelledGroup(t, 7, 21, "{team: t7, color: blue}"), 0, 21},
				{"apply g7 unchanged", labelledGroup(t, 7, 21, "{team: t7, color: blue}"), 0, 21},
			} {
				if got, want := work(apply(t, e, Change{UpsertPolicies: []policy.Object{change.group}})), want(change.subjects, change.read); got != want {
					t.Errorf("%s: %s, want %s", change.what, got, want)
				}
			}
			if got, want := work(apply(t, e, Change{DeletePolicies: []policy.Key{{Kind: "CiliumCIDRGroup", Name: "g500"}}})), want(0, 0); got != want {
				t.Errorf("delete the group that no rule refers to: %s, want %s", got, want)
			}
		})
	}
}

// TestEveryGroupConcernsANegativeSelectorThatReachesNodes: if address rules also apply to nodes, any group may
// contain an address of a node. A rule without a positive requirement therefore depends on every group, whatever
// labels the group has.
func TestEveryGroupConcernsANegativeSelectorThatReachesNodes(t *testing.T) {
	node, err := peer.New(identity.RemoteNode, label.NewSet(label.Reserved(identity.NameRemoteNode)))
	if err != nil {
		t.Fatal(err)
	}
	c := groupSubjects(t, 1, func(int) string {
		return "{cidrGroupSelector: {matchExpressions: [{key: team, operator: NotIn, values: [t7]}]}}"
	})
	c.AddIdentities = append(c.AddIdentities, node)
	for _, spec := range c.UpsertPolicies[0].Specs {
		for _, r := range spec.Rules {
			for i := range r.Peers.Groups {
				r.Peers.Groups[i].NodesToo = true
			}
			r.Seal()
		}
	}
	e := New(Config{Cluster: "default", AllowHost: true})
	apply(t, e, c)
	ask := func() policytable.Action {
		v, err := e.Lookup(1000, policytable.Egress, identity.RemoteNode, netip.MustParseAddr("10.1.0.3"), 6<<16|80)
		if err != nil {
			t.Fatal(err)
		}
		return v.Action
	}
	if got := ask(); got != policytable.Deny {
		t.Fatalf("a node in no group: %s, want %s", got, policytable.Deny)
	}
	apply(t, e, Change{UpsertPolicies: []policy.Object{labelledGroup(t, 1, 10, "{color: red}")}})
	if got := ask(); got != policytable.Allow {
		t.Fatalf("a node in a group with another label: %s, want %s", got, policytable.Allow)
	}
	apply(t, e, Change{DeletePolicies: []policy.Key{{Kind: "CiliumCIDRGroup", Name: "g1"}}})
	if got := ask(); got != policytable.Deny {
		t.Fatalf("a node that left its group: %s, want %s", got, policytable.Deny)
	}
}
