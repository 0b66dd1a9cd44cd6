// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package adminpolicy

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// TestDomainNamesAllowAllQueries: domainNames must not restrict which names a pod can look up. Without a DNS proxy,
// the queries are forwarded directly. The prefix "*." matches any number of labels.
func TestDomainNamesAllowAllQueries(t *testing.T) {
	var p Policy
	if err := json.Unmarshal([]byte(`{"metadata": {"name": "p"}, "spec": {
		"tier": "Admin", "priority": 1, "subject": {"namespaces": {}},
		"egress": [{"action": "Accept", "to": [
			{"domainNames": ["*.Example.com", "b.test"]}, {"networks": ["10.0.0.0/8"]}, {"domainNames": ["c.test."]}
		]}]}}`), &p); err != nil {
		t.Fatal(err)
	}
	for _, without := range []bool{false, true} {
		options := rule.Options{WithoutDNSProxy: without}
		if ps := p.Validate(options); len(ps) > 0 {
			t.Fatal(ps)
		}
		queries := 0
		var names []string
		for _, r := range p.Rules(options).Rules {
			for _, n := range r.Peers.Names {
				names = append(names, n.Pattern.String())
			}
			switch {
			case len(r.Peers.Names) > 0:
			case !r.Ports[0].Names("dns", port.UDP) || !r.Ports[0].Names("dns", port.TCP) ||
				!r.Ports[1].Names("dns-tcp", port.TCP):
				t.Errorf("the rule %s does not select the ports of the resolver", r.Content())
			case without && (r.Action != policytable.Allow || r.Layer7 != nil),
				!without && (r.Action != policytable.Redirect || r.Proxy != policytable.ProxyDNS || r.Layer7 == nil ||
					len(r.Layer7.DNS) != 1 || !r.Layer7.DNS[0].Every()):
				t.Errorf("without a proxy %t: the rule %s, want one for the queries for every name", without, r.Content())
			default:
				queries++
			}
		}
		if queries != 2 || !slices.Equal(names, []string{"**.example.com.", "b.test.", "c.test."}) {
			t.Errorf("without a proxy %t: %d rules for queries and the names %v, want 2 rules", without, queries, names)
		}
	}
}

// TestOnlyTheClustersResolverIsImplied: a pod of another namespace or cluster with the resolver's labels does not
// count as the resolver. The DNS proxy learns no addresses from its answers.
func TestOnlyTheClustersResolverIsImplied(t *testing.T) {
	var p Policy
	if err := json.Unmarshal([]byte(`{"metadata": {"name": "p"}, "spec": {
		"tier": "Admin", "priority": 1, "subject": {"namespaces": {}},
		"egress": [{"action": "Accept", "to": [{"domainNames": ["a.test"]}]}]}}`), &p); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		namespace, cluster string
		local, selected    bool
	}{
		{"kube-system", "here", true, true},
		{"kube-system", "here", false, true},
		{"shop", "here", true, false},
		{"shop", "here", false, false},
		{"kube-system", "there", true, false},
	} {
		pod := label.NewSet(label.Kubernetes("k8s-app", "kube-dns"), label.Kubernetes(label.KeyNamespace, c.namespace),
			label.Kubernetes(label.KeyCluster, c.cluster))
		selected := false
		for _, r := range p.Rules(rule.Options{Cluster: "here", LocalClusterOnly: c.local}).Rules {
			for _, s := range r.Peers.Selectors {
				selected = selected || s.Matches(pod)
			}
		}
		if selected != c.selected {
			t.Errorf("%+v: selected %t", c, selected)
		}
	}
}
