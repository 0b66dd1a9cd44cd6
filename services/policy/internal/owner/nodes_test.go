// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
)

// TestNodesOfUnknownLabelsAreLetInByNothingThatNamesLabels (INV-106): a node's labels are unknown. A rule that
// selects nodes by label never allows the node, even if the rule would match its real labels.
func TestNodesOfUnknownLabelsAreLetInByNothingThatNamesLabels(t *testing.T) {
	const east, west = identity.MinNodeLocal, identity.MinNodeLocal + 1
	cilium := func(rules string) string {
		return "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: db, namespace: shop}\nspec:\n" +
			"  endpointSelector: {matchLabels: {app: db}}\n" + rules
	}
	cluster := func(rules string) string {
		return "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {name: db}\nspec:\n" +
			"  tier: Admin\n  priority: 1\n  subject: {namespaces: {}}\n  egress:\n" + rules
	}
	const (
		allEntities = "  ingress: [{fromEntities: [remote-node]}]\n"
		notWest     = "{matchExpressions: [{key: zone, operator: NotIn, values: [west]}]}"
		everyone    = "  - {name: rest, action: Accept, to: [{nodes: {}}]}\n"
	)
	for _, c := range []struct {
		name, manifest      string
		egress              bool
		east, west, unknown bool
	}{
		{"allow by a value", cilium("  ingress: [{fromNodes: [{matchLabels: {zone: east}}]}]\n"), false, true, false, false},
		{"allow except a value", cilium("  ingress: [{fromNodes: [" + notWest + "]}]\n"), false, true, false, false},
		{"allow every node", cilium("  ingress: [{fromNodes: [{}]}]\n"), false, true, true, true},
		{
			"deny by a value", cilium(allEntities + "  ingressDeny: [{fromNodes: [{matchLabels: {zone: west}}]}]\n"),
			false, true, false, false,
		},
		{
			"deny except a value", cilium(allEntities + "  ingressDeny: [{fromNodes: [" + notWest + "]}]\n"),
			false, false, true, false,
		},
		{
			"deny before an allow of all", cluster("  - {name: d, action: Deny, to: [{nodes: {matchLabels: {zone: west}}}]}\n" +
				everyone), true, true, false, false,
		},
		{
			"pass before an allow of all, with nothing that denies later",
			cluster("  - {name: p, action: Pass, to: [{nodes: {matchLabels: {zone: west}}}]}\n" + everyone),
			true, true, true, false,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			o, stop := run(t, t.TempDir(), func(c *Config) { c.Rules.NodeLabels = true })
			defer stop()
			pods(t, o, "shop")
			var set []peer.Identity
			node := func(n identity.Numeric, zone string) {
				labels := []label.Label{label.Reserved(identity.NameRemoteNode)}
				if zone != "" {
					labels = append(labels, label.Label{Source: label.SourceNode, Key: "zone", Value: zone})
				}
				id, err := peer.New(n, label.NewSet(labels...))
				if err != nil {
					t.Fatal(err)
				}
				set = append(set, id)
			}
			node(east, "east")
			node(west, "west")
			node(identity.RemoteNode, "")
			if err := o.Identities().TakeIdentities(t.Context(), set, nil, peer.Revision{}); err != nil {
				t.Fatal(err)
			}
			if _, err := o.Upsert(t.Context(), []byte(c.manifest), "", false); err != nil {
				t.Fatal(err)
			}
			for n, want := range map[identity.Numeric]bool{east: c.east, west: c.west, identity.RemoteNode: c.unknown} {
				from, to := n, identity.Numeric(301)
				if c.egress {
					from, to = to, from
				}
				if got := passes(t, o, from, to); got != want {
					t.Errorf("%d to %d passes: %t, want %t", from, to, got, want)
				}
			}
		})
	}
}

// TestLabelsOfNodesAreNoLabelsOfPodsWithoutTheSetting: without the setting cluster.nodeLabels, selectors of pods
// never match the labels of nodes, although the identity service sends these labels.
func TestLabelsOfNodesAreNoLabelsOfPodsWithoutTheSetting(t *testing.T) {
	id, err := peer.New(identity.Host, label.NewSet(
		label.Reserved(identity.NameHost), label.Label{Source: label.SourceNode, Key: "app", Value: "web"}))
	if err != nil {
		t.Fatal(err)
	}
	if got := id.Node(false).Labels.String(); got != "reserved:host=;" {
		t.Errorf("without the setting the labels are %s", got)
	}
	if got := id.Node(true); !got.Labels.Equal(id.Labels) {
		t.Errorf("with the setting the labels are %s, want %s", got.Labels, id.Labels)
	}
	if got := id.Node(false).Given(); !got.Equal(id.Labels) {
		t.Errorf("the announced labels are %s, want %s", got, id.Labels)
	}
}
