// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
	"github.com/sluice-net/sluice/services/policy/internal/test/scenario"
)

// TestLabelsThatNarrowAllowNothingElse compares the verdicts of two identities, where the rules of the second identity
// narrow the rules of the first.
func TestLabelsThatNarrowAllowNothingElse(t *testing.T) {
	t.Parallel()
	w := seeded(t, 34)
	narrow, enforced := 0, 0
	for range runs(t, 1500) {
		s, config := w.Draw(), drawConfig(w)
		e := fresh(t, config, s)
		for x := range s.Subjects {
			for y := range s.Subjects {
				next := s.Identities[y]
				next.Number = x
				if x == y || !e.Narrows(x, next) {
					continue
				}
				if narrow++; e.subjects[x].bound != [2]*live{} {
					enforced++
				}
				for range 60 {
					q, ok := w.Question(s)
					if !ok {
						break
					}
					before, err := e.Lookup(x, q.Direction, q.Peer, q.Addr, q.Point)
					if err != nil {
						t.Fatal(err)
					}
					after, err := e.Lookup(y, q.Direction, q.Peer, q.Addr, q.Point)
					if err != nil {
						t.Fatal(err)
					}
					if after.Action != policytable.Deny && (before.Action == policytable.Deny ||
						before.Action == policytable.Redirect && after.Action == policytable.Allow) {
						t.Fatalf("%+v: labels %s have %+v, labels %s have %+v\n%s",
							q, s.Identities[x].Labels, before, next.Labels, after, s)
					}
				}
			}
		}
	}
	if narrow < 100 || enforced < 20 {
		t.Errorf("%d pairs of labels narrow, %d of them with policies before", narrow, enforced)
	}
}

// TestQuarantineNarrows: a pod gets a label that a policy selects to deny everything. The change of labels counts as
// narrowing.
func TestQuarantineNarrows(t *testing.T) {
	all := rule.Peers{Any: true}
	object := func(name, key, value string, rules ...*rule.Rule) policy.Object {
		spec := rule.Spec{
			Namespace: "shop", Selects: [2]bool{true, true}, DefaultDeny: [2]bool{true, true},
			Subject: selector.New(selector.Requirement{
				Op: selector.In, Source: label.SourceKubernetes, Key: key, Values: []string{value},
			}),
		}
		source := policytable.Source{Kind: "NetworkPolicy", Namespace: "shop", Name: name}
		for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
			spec.Rules = append(spec.Rules, rule.Isolate(source, d, policytable.Isolation, 0))
		}
		for _, r := range rules {
			r.Source = source
			spec.Rules = append(spec.Rules, r.Seal())
		}
		return policy.Object{Key: policy.Key{Kind: "NetworkPolicy", Namespace: "shop", Name: name}, Specs: []rule.Spec{spec}}
	}
	allow := func() *rule.Rule {
		return &rule.Rule{Direction: policytable.Ingress, Tier: policytable.Normal, Action: policytable.Allow, Peers: all, AllPorts: true}
	}
	deny := allow()
	deny.Action, deny.Priority = policytable.Deny, -1
	pod := func(n identity.Numeric, labels ...string) peer.Identity {
		list := []label.Label{
			label.Kubernetes(label.KeyNamespace, "shop"), label.Kubernetes(label.KeyCluster, scenario.Cluster),
		}
		for i := 0; i < len(labels); i += 2 {
			list = append(list, label.Kubernetes(labels[i], labels[i+1]))
		}
		id, err := peer.New(n, label.NewSet(list...))
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	e := New(Config{Cluster: scenario.Cluster})
	if err := e.Apply(Change{
		UpsertPolicies: []policy.Object{
			object("web", "app", "web", allow()), object("isolate", "app", "isolated"),
			object("quarantine", "quarantine", "true", deny),
		},
		AddIdentities: []peer.Identity{
			pod(300, "app", "web"), pod(301, "app", "none"), pod(302, "app", "web", "quarantine", "true"),
		},
	}); err != nil {
		t.Fatal(err)
	}
	for _, v := range []struct {
		name string
		now  identity.Numeric
		next peer.Identity
		want bool
	}{
		{"a quarantine label", 300, pod(300, "app", "web", "quarantine", "true"), true},
		{"a quarantine label without policies", 301, pod(301, "quarantine", "true"), true},
		{"another label whose policy allows nothing", 300, pod(300, "app", "isolated"), true},
		{"a label that no policy selects", 300, pod(300, "app", "web", "version", "v2"), false},
		{"no policy after the change", 300, pod(300, "app", "none"), false},
		{"quarantine removed", 302, pod(302, "app", "web"), false},
		{"an unknown identity", 399, pod(399, "quarantine", "true"), false},
	} {
		if got := e.Narrows(v.now, v.next); got != v.want {
			t.Errorf("%s: narrows is %t", v.name, got)
		}
	}
}
