// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package model

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// newWorld returns a cluster of two nodes with six pods, and an outsider.
func newWorld(t *testing.T, native bool) *World {
	t.Helper()
	pair := func(ipv4, ipv6 string, n int) Pair {
		return Pair{netip.MustParseAddr(fmt.Sprint(ipv4, n)), netip.MustParseAddr(fmt.Sprint(ipv6, n))}
	}
	w := &World{Native: native, Outsider: Outsider{Name: "outsider"}}
	for i := range 2 {
		w.Nodes = append(w.Nodes, &Node{
			Name: fmt.Sprint("node-", i), Addresses: pair("10.245.0.", "fd00:245::", i+1),
			Inside: pair(fmt.Sprintf("10.244.%d.", i), fmt.Sprintf("fd00:244:%d::", i), 1),
			Range: [2]netip.Prefix{
				netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", i)), netip.MustParsePrefix(fmt.Sprintf("fd00:244:%d::/64", i)),
			},
		})
	}
	g := NewGenerator(1, 1)
	for i := range 6 {
		p := &Pod{
			Name: fmt.Sprint("pod-", i), Namespace: Namespaces[i/2%2], Labels: g.Labels(), Ports: g.NamedPorts(),
			Node: w.Nodes[i%2], Addresses: pair(fmt.Sprintf("10.244.%d.", i%2), fmt.Sprintf("fd00:244:%d::", i%2), 2+i),
		}
		if i < 2 {
			p.HostPorts = []HostPort{{uint16(9100 + i), 8080}}
		}
		w.Pods = append(w.Pods, p)
	}
	for i := range 3 {
		w.Outsider.Addresses = append(w.Outsider.Addresses, pair("10.245.0.", "fd00:245::", 200+i))
	}
	return w
}

// clone returns a copy of policies that shares nothing with them.
func clone(t *testing.T, p Policies) (c Policies) {
	t.Helper()
	text, err := json.Marshal(p)
	if err == nil {
		err = json.Unmarshal(text, &c)
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// rulesOf returns all rules of all CiliumNetworkPolicies.
func rulesOf(p *Policies) (all []*CiliumRule) {
	for i := range p.Cilium {
		s := &p.Cilium[i].Spec
		for _, rules := range [][]CiliumRule{s.Ingress, s.IngressDeny, s.Egress, s.EgressDeny} {
			for k := range rules {
				all = append(all, &rules[k])
			}
		}
	}
	return all
}

// peersOf returns all peers of all NetworkPolicies.
func peersOf(p *Policies) (all []*networkingv1.NetworkPolicyPeer) {
	for i := range p.Network {
		for k := range p.Network[i].Spec.Ingress {
			for n := range p.Network[i].Spec.Ingress[k].From {
				all = append(all, &p.Network[i].Spec.Ingress[k].From[n])
			}
		}
		for k := range p.Network[i].Spec.Egress {
			for n := range p.Network[i].Spec.Egress[k].To {
				all = append(all, &p.Network[i].Spec.Egress[k].To[n])
			}
		}
	}
	return all
}

// portsOf returns all ports of all NetworkPolicies.
func portsOf(p *Policies) (all []*networkingv1.NetworkPolicyPort) {
	for i := range p.Network {
		for k := range p.Network[i].Spec.Ingress {
			for n := range p.Network[i].Spec.Ingress[k].Ports {
				all = append(all, &p.Network[i].Spec.Ingress[k].Ports[n])
			}
		}
		for k := range p.Network[i].Spec.Egress {
			for n := range p.Network[i].Spec.Egress[k].Ports {
				all = append(all, &p.Network[i].Spec.Egress[k].Ports[n])
			}
		}
	}
	return all
}

// withoutFeatures are engines that each ignore one feature of policies.
var withoutFeatures = map[string]func(w *World, p *Policies){
	"except of an ipBlock": func(_ *World, p *Policies) {
		for _, peer := range peersOf(p) {
			if peer.IPBlock != nil {
				peer.IPBlock.Except = nil
			}
		}
	},
	"except of a CIDR set": func(_ *World, p *Policies) {
		for _, r := range rulesOf(p) {
			for _, sets := range [][]CIDRRule{r.FromCIDRSet, r.ToCIDRSet} {
				for i := range sets {
					sets[i].Except = nil
				}
			}
		}
	},
	"ingressDeny": func(_ *World, p *Policies) {
		for i := range p.Cilium {
			if s := &p.Cilium[i].Spec; len(s.IngressDeny) > 0 {
				s.IngressDeny = []CiliumRule{{}}
			}
		}
	},
	"egressDeny": func(_ *World, p *Policies) {
		for i := range p.Cilium {
			if s := &p.Cilium[i].Spec; len(s.EgressDeny) > 0 {
				s.EgressDeny = []CiliumRule{{}}
			}
		}
	},
	"enableDefaultDeny": func(_ *World, p *Policies) {
		for i := range p.Cilium {
			p.Cilium[i].Spec.EnableDefaultDeny = nil
		}
	},
	"named ports": func(w *World, _ *Policies) {
		for _, pod := range w.Pods {
			pod.Ports = nil
		}
	},
	"endPort of NetworkPolicies": func(_ *World, p *Policies) {
		for _, port := range portsOf(p) {
			port.EndPort = nil
		}
	},
	"endPort of CiliumNetworkPolicies": func(_ *World, p *Policies) {
		for _, r := range rulesOf(p) {
			for _, list := range r.ToPorts {
				for i := range list.Ports {
					list.Ports[i].EndPort = 0
				}
			}
		}
	},
	"icmps": func(_ *World, p *Policies) {
		for _, r := range rulesOf(p) {
			for i := range r.ICMPs {
				r.ICMPs[i].Fields = nil
			}
		}
	},
	"entities": func(_ *World, p *Policies) {
		for _, r := range rulesOf(p) {
			if len(r.FromEntities) > 0 {
				r.FromEntities = []string{entityHealth}
			}
			if len(r.ToEntities) > 0 {
				r.ToEntities = []string{entityHealth}
			}
		}
	},
	"namespace selectors": func(_ *World, p *Policies) {
		for _, peer := range peersOf(p) {
			if peer.NamespaceSelector != nil {
				peer.NamespaceSelector.MatchLabels = nil
			}
		}
	},
	"namespaces in selectors of endpoints": func(_ *World, p *Policies) {
		for _, r := range rulesOf(p) {
			for _, selectors := range [][]metav1.LabelSelector{r.FromEndpoints, r.ToEndpoints} {
				for i := range selectors {
					delete(selectors[i].MatchLabels, podNamespace)
				}
			}
		}
	},
}

// TestQuestionsDependOnEveryFeature counts the questions whose answer changes if an engine ignores a feature of
// policies. Without such questions, a cluster that ignores the feature would pass the test.
func TestQuestionsDependOnEveryFeature(t *testing.T) {
	t.Parallel()
	const rounds, questions, least = 40, 240, 10
	changed := map[string]int{}
	for round := range uint64(rounds) {
		w := newWorld(t, round%2 == 0)
		g := NewGenerator(7, round)
		w.Policies = g.NewPolicies(w)
		w.Services = g.NewServices(w)
		type expected struct {
			q *Question
			e Expectation
		}
		var all []expected
		for range questions {
			q := g.NewQuestion(w)
			all = append(all, expected{q, w.Expect(q)})
		}
		policies, ports := w.Policies, map[*Pod][]NamedPort{}
		for _, p := range w.Pods {
			ports[p] = p.Ports
		}
		for name, without := range withoutFeatures {
			w.Policies = clone(t, policies)
			without(w, &w.Policies)
			for _, was := range all {
				if now := w.Expect(was.q); !reflect.DeepEqual(now, was.e) {
					changed[name]++
				}
			}
			for p, have := range ports {
				p.Ports = have
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(withoutFeatures)) {
		t.Logf("%s: %d of %d questions", name, changed[name], rounds*questions)
		if changed[name] < least {
			t.Errorf("%s: %d questions depend on it, want >= %d", name, changed[name], least)
		}
	}
}
