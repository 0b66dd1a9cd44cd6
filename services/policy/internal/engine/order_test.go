// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/test/synthetic"
)

// egress returns a rule of a ClusterNetworkPolicy with a namespace as peer.
func egress(action, namespace string) string {
	return fmt.Sprintf("{action: %s, to: [{namespaces: {matchLabels: {kubernetes.io/metadata.name: %s}}}]}", action, namespace)
}

// clusterPolicy returns a policy that selects the namespace app.
func clusterPolicy(name, tier string, priority int, egress string) string {
	return fmt.Sprintf(`{apiVersion: policy.networking.k8s.io/v1alpha2, kind: ClusterNetworkPolicy, metadata: {name: %s},
spec: {tier: %s, priority: %d, subject: {namespaces: {matchLabels: {kubernetes.io/metadata.name: app}}}, egress: [%s]}}`, name, tier, priority, egress)
}

// ciliumPolicy returns a policy that selects the namespace app; verb is egress or egressDeny.
func ciliumPolicy(name, verb, peer string) string {
	return fmt.Sprintf(`{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicy, metadata: {name: %s, namespace: app},
spec: {endpointSelector: {}, %s: [%s]}}`, name, verb, peer)
}

// TestTheOrderOfRulesDecides: each case evaluates a connection from one namespace to another on TCP 5432. The
// policies of each case are applied in both orders.
func TestTheOrderOfRulesDecides(t *testing.T) {
	const db = `toEndpoints: [{matchLabels: {"k8s:io.kubernetes.pod.namespace": db}}]`
	for _, test := range []struct {
		name     string
		policies []string
		want     map[string]policytable.Action // by namespace
	}{
		{
			// The accept is the first rule of its policy. The deny is the second rule of a policy with a better
			// priority.
			"priority comes before the place in the policy",
			[]string{
				clusterPolicy("one", "Admin", 1, egress("Accept", "ops")+", "+egress("Deny", "db")),
				clusterPolicy("two", "Admin", 2, egress("Accept", "db")),
			},
			map[string]policytable.Action{"db": policytable.Deny, "ops": policytable.Allow},
		},
		{
			"priority comes before the action",
			[]string{clusterPolicy("one", "Admin", 1, egress("Accept", "db")), clusterPolicy("two", "Admin", 2, egress("Deny", "db"))},
			map[string]policytable.Action{"db": policytable.Allow},
		},
		{
			"priority orders the Baseline tier too",
			[]string{
				clusterPolicy("one", "Baseline", 1, egress("Accept", "ops")+", "+egress("Deny", "db")),
				clusterPolicy("two", "Baseline", 2, egress("Accept", "db")+", "+egress("Deny", "ops")),
			},
			map[string]policytable.Action{"db": policytable.Deny, "ops": policytable.Allow},
		},
		{
			"the place in the policy comes before the action",
			[]string{clusterPolicy("one", "Admin", 1, egress("Accept", "db")+", "+egress("Deny", "db"))},
			map[string]policytable.Action{"db": policytable.Allow},
		},
		{
			"the tier comes before the priority",
			[]string{clusterPolicy("one", "Baseline", 1, egress("Deny", "db")), clusterPolicy("two", "Admin", 900, egress("Accept", "db"))},
			map[string]policytable.Action{"db": policytable.Allow},
		},
		{
			"the tier comes before the action",
			[]string{clusterPolicy("one", "Baseline", 0, egress("Deny", "db")), ciliumPolicy("two", "egress", "{"+db+"}")},
			map[string]policytable.Action{"db": policytable.Allow},
		},
		{
			"an earlier pass hides later rules of its tier",
			[]string{
				clusterPolicy("one", "Admin", 1, egress("Pass", "db")), clusterPolicy("two", "Admin", 2, egress("Deny", "db")),
				ciliumPolicy("three", "egress", "{"+db+"}"),
			},
			map[string]policytable.Action{"db": policytable.Allow, "ops": policytable.Deny},
		},
		{
			"a later pass hides nothing",
			[]string{
				clusterPolicy("one", "Admin", 2, egress("Pass", "db")), clusterPolicy("two", "Admin", 1, egress("Deny", "db")),
				ciliumPolicy("three", "egress", "{"+db+"}"),
			},
			map[string]policytable.Action{"db": policytable.Deny},
		},
		{
			"a deny comes before an allow of the same place",
			[]string{ciliumPolicy("one", "egress", "{"+db+"}"), ciliumPolicy("two", "egressDeny", "{"+db+"}")},
			map[string]policytable.Action{"db": policytable.Deny},
		},
		{
			"a redirect comes before an allow of the same place",
			[]string{
				ciliumPolicy("one", "egress", "{"+db+"}"),
				ciliumPolicy("two", "egress", "{"+db+`, toPorts: [{ports: [{port: "5432", protocol: TCP}], rules: {http: [{method: GET}]}}]}`),
			},
			map[string]policytable.Action{"db": policytable.Redirect},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			for range 2 {
				e := New(Config{Cluster: synthetic.Name, AllowHost: true})
				var c Change
				number := make(map[string]identity.Numeric)
				for i, ns := range []string{"app", "db", "ops"} {
					id, err := peer.New(identity.MinCluster+identity.Numeric(i), label.NewSet(
						label.Kubernetes(label.KeyNamespace, ns), label.Kubernetes(label.KeyCluster, synthetic.Name),
						label.Kubernetes(label.KeyNamespaceLabels+"kubernetes.io/metadata.name", ns),
					))
					if err != nil {
						t.Fatal(err)
					}
					c.AddIdentities = append(c.AddIdentities, id)
					number[ns] = id.Number
				}
				c.AddSubjects = []identity.Numeric{number["app"]}
				apply(t, e, c)
				for _, m := range test.policies {
					apply(t, e, Change{UpsertPolicies: []policy.Object{decodeOne(t, m)}})
				}
				for ns, want := range test.want {
					got, err := e.Lookup(number["app"], policytable.Egress, number[ns], netip.MustParseAddr("10.0.0.9"), port.At(port.TCP, 5432))
					if err != nil {
						t.Fatal(err)
					}
					if got.Action != want {
						t.Errorf("app → %s: %s by rule %d, want %s", ns, got.Action, got.Rule, want)
					}
				}
				slices.Reverse(test.policies)
			}
		})
	}
}
