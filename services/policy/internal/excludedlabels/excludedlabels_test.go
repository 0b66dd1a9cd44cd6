// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package excludedlabels

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/labelfilter"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// lines returns the subject and the rules of an object.
func lines(ob policy.Object) (out []string) {
	for _, spec := range ob.Specs {
		out = append(out, "subject "+spec.Subject.String())
		for _, r := range spec.Rules {
			peers := "any"
			if !r.Peers.Any {
				var list []string
				for _, s := range r.Peers.Selectors {
					list = append(list, s.String())
				}
				for _, n := range r.Peers.Networks {
					list = append(list, n.Prefix.String())
				}
				peers = strings.Join(list, " or ")
			}
			out = append(out, fmt.Sprintf("%s %s %s %s", r.Direction, r.Action, r.Tier, peers))
		}
	}
	return out
}

func decode(t *testing.T, text string) policy.Object {
	t.Helper()
	docs, err := manifest.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	ob, err := policy.Decode(docs[0], rule.Options{Cluster: "here", NodeLabels: true})
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return ob
}

func TestSelectorsOverMissingLabelsAreClosed(t *testing.T) {
	const (
		np  = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: a}\nspec: "
		cnp = "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p, namespace: a}\nspec: "
		anp = "apiVersion: policy.networking.k8s.io/v1alpha1\nkind: AdminNetworkPolicy\nmetadata: {name: p}\nspec: "
		ns  = `k8s:io.kubernetes.pod.namespace In "a"`
		in  = "k8s:io.kubernetes.pod.namespace Exists"
	)
	filter := Default()
	var err error
	if filter.Nodes, err = labelfilter.New([]labelfilter.Rule{{Text: "zone", Counts: false}}); err != nil {
		t.Fatal(err)
	}
	for _, op := range []string{
		"operator: In, values: [x]", "operator: NotIn, values: [x]", "operator: Exists", "operator: DoesNotExist",
	} {
		selects := "{matchLabels: {app: web}, matchExpressions: [{key: job-name, " + op + "}]}"
		for text, want := range map[string][]string{
			np + "{podSelector: " + selects + ", ingress: [{}]}": {
				`subject k8s:app In "web", ` + ns, "ingress deny Isolation any",
			},
			np + "{podSelector: {}, ingress: [{from: [{podSelector: " + selects + "}]}, " +
				"{from: [{podSelector: " + selects + "}, {ipBlock: {cidr: 10.0.0.0/8}}]}]}": {
				"subject " + ns, "ingress allow Normal 10.0.0.0/8", "ingress deny Isolation any",
			},
			np + "{podSelector: {}, egress: [{to: [{namespaceSelector: {}, podSelector: " + selects + "}, " +
				"{podSelector: {}}]}], policyTypes: [Egress]}": {
				"subject " + ns, "egress allow Normal " + ns, "egress deny Isolation any",
			},
			cnp + "{endpointSelector: {}, ingress: [{fromEndpoints: [" + selects + "]}]}": {"subject " + ns},
			cnp + "{endpointSelector: {}, ingressDeny: [{fromEndpoints: [" + selects + "]}]}": {
				"subject " + ns, `ingress deny Normal any:app In "web", ` + ns,
			},
			cnp + "{endpointSelector: " + selects + ", ingressDeny: [{fromEntities: [world]}]}": {
				`subject any:app In "web", ` + ns, "ingress deny Normal any",
			},
			cnp + "{endpointSelector: {}, egress: [{toNodes: [{matchExpressions: [{key: zone, " + op + "}]}]}]}": {
				"subject " + ns,
			},
			anp + "{priority: 5, subject: {pods: {namespaceSelector: {}, podSelector: " + selects + "}}, " +
				"ingress: [{action: Deny, from: [{namespaces: {}}]}]}": {
				`subject k8s:app In "web", ` + in, "ingress deny Admin any",
			},
			anp + "{priority: 5, subject: {namespaces: {}}, " +
				"ingress: [{action: Allow, from: [{pods: {namespaceSelector: {}, podSelector: " + selects + "}}]}]}": {
				"subject " + in,
			},
			anp + "{priority: 5, subject: {namespaces: {}}, " +
				"ingress: [{action: Deny, from: [{pods: {namespaceSelector: {}, podSelector: " + selects + "}}]}]}": {
				"subject " + in, `ingress deny Admin k8s:app In "web", ` + in,
			},
		} {
			before := decode(t, text)
			was := lines(before)
			got, closed := filter.Apply(before)
			if !closed || !slices.Equal(lines(got), want) {
				t.Errorf("%s: closed %t\n%s\nwant\n%s", text, closed, strings.Join(lines(got), "\n"), strings.Join(want, "\n"))
			}
			if !strings.Contains(fmt.Sprint(got.Notes), "of sluice-identity includes the key") || len(before.Notes) != 0 {
				t.Errorf("%s: notes %v, of the object before %v", text, got.Notes, before.Notes)
			}
			if !slices.Equal(lines(before), was) {
				t.Errorf("%s: the object itself was changed", text)
			}
			if again, closed := filter.Apply(got); closed {
				t.Errorf("%s: a second Apply changes the object again: %v", text, lines(again))
			}
		}
	}
	for _, text := range []string{
		np + "{podSelector: {matchLabels: {app: a}}, " +
			"ingress: [{from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: b}}}]}]}",
		cnp + "{endpointSelector: {}, ingress: [{fromEntities: [host, cluster, world]}], egress: [{toCIDR: [10.0.0.0/8]}]}",
		"apiVersion: cilium.io/v2\nkind: CiliumCIDRGroup\nmetadata: {name: p}\nspec: {externalCIDRs: [10.0.0.0/8]}",
	} {
		if got, closed := Default().Apply(decode(t, text)); closed || len(got.Notes) > 0 {
			t.Errorf("%s: closed: %v, %v", text, lines(got), got.Notes)
		}
	}
}
