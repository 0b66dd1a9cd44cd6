// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// policyOf returns the Cilium policy of all pods in the namespace "a" with entries of egress and egressDeny.
func policyOf(t *testing.T, o rule.Options, name, egress, deny string) policy.Object {
	t.Helper()
	docs, err := manifest.Parse([]byte("apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\n" +
		"metadata: {name: " + name + ", namespace: a}\n" +
		"spec: {endpointSelector: {}, egress: [" + egress + "], egressDeny: [" + deny + "]}"))
	if err != nil {
		t.Fatal(err)
	}
	out, err := policy.Decode(docs[0], o)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestImplicitDNSRuleRedirectsWhatRulesAllow: with dns.implicit, DNS queries of pods that have toFQDNs and no DNS
// rule are redirected to the proxy with a rule set for every name. No connection becomes allowed that was denied
// before.
func TestImplicitDNSRuleRedirectsWhatRulesAllow(t *testing.T) {
	const subject, server, other = identity.MinCluster, identity.MinCluster + 1, identity.MinCluster + 2
	const (
		names   = `{toFQDNs: [{matchName: api.example.com}], toPorts: [{ports: [{port: "443", protocol: TCP}]}]}`
		to      = `toEndpoints: [{matchLabels: {"k8s:io.kubernetes.pod.namespace": b, server: ""}}]`
		plain   = `{` + to + `, toPorts: [{ports: [{port: "53", protocol: ANY}]}]}`
		every   = `{` + to + `}`
		some    = `{` + to + `, toPorts: [{ports: [{port: "5", endPort: 60, protocol: UDP}]}]}`
		beside  = `{` + to + `, toPorts: [{ports: [{port: "54", protocol: UDP}]}]}`
		dnsRule = `{toEndpoints: [{matchLabels: {other: ""}}], toPorts: [{ports: [{port: "53", protocol: UDP}], ` +
			`rules: {dns: [{matchName: b.example.com}]}}]}`
	)
	redirect, allow, deny := policytable.Redirect, policytable.Allow, policytable.Deny
	on := rule.Options{ImplicitDNS: true}
	for _, c := range []struct {
		what            string
		options         rule.Options
		policies        []string
		denied          string
		at53, at54, tcp policytable.Action
	}{
		{"a plain rule", on, []string{names, plain}, "", redirect, deny, redirect},
		{"all ports", on, []string{names, every}, "", redirect, allow, redirect},
		{"a range", on, []string{names, some}, "", redirect, allow, deny},
		{"another port", on, []string{names, beside}, "", deny, allow, deny},
		{"a deny rule", on, []string{names, every}, plain, deny, allow, deny},
		{"without names", on, []string{every}, "", allow, allow, allow},
		{"with a DNS rule", on, []string{names, every, dnsRule}, "", allow, allow, allow},
		{"setting off", rule.Options{}, []string{names, every}, "", allow, allow, allow},
		{
			"without sluice-dns",
			rule.Options{ImplicitDNS: true, WithoutDNSProxy: true},
			[]string{names, every},
			"", allow, allow, allow,
		},
	} {
		e := New(Config{WithoutDNSProxy: c.options.WithoutDNSProxy})
		change := Change{
			AddIdentities: []peer.Identity{
				labelled(t, subject, "a"), labelled(t, server, "b", "server"), labelled(t, other, "b", "other"),
			},
			AddSubjects: []identity.Numeric{subject},
		}
		for i, p := range c.policies {
			denied := ""
			if i == 0 {
				denied = c.denied
			}
			change.UpsertPolicies = append(change.UpsertPolicies,
				policyOf(t, c.options, "p"+string(rune('a'+i)), p, denied))
		}
		apply(t, e, change)
		at := func(proto port.Protocol, number uint16) (policytable.Action, uint16) {
			v, err := e.Lookup(subject, policytable.Egress, server, netip.MustParseAddr("10.0.0.9"), port.At(proto, number))
			if err != nil {
				t.Fatal(err)
			}
			return v.Action, v.Rule
		}
		got53, number := at(port.UDP, 53)
		got54, _ := at(port.UDP, 54)
		tcp, _ := at(port.TCP, 53)
		if got53 != c.at53 || got54 != c.at54 || tcp != c.tcp {
			t.Errorf("%s: %s, %s and %s over TCP, want %s, %s and %s", c.what, got53, got54, tcp, c.at53, c.at54,
				c.tcp)
		}
		if got53 == redirect {
			if l := e.subjects[subject].bound[policytable.Egress]; !l.program.Set(number).EveryName() ||
				!l.table.Rules[number-1].PassesWithoutProxy {
				t.Errorf("%s: the set has names, or its queries do not pass without sluice-dns", c.what)
			}
		}
	}
}

// TestImplicitDNSRuleEndsWithTheNames: the implicit DNS rule of a pod is removed with the last of its policies that
// contains DNS names.
func TestImplicitDNSRuleEndsWithTheNames(t *testing.T) {
	const subject, server = identity.MinCluster, identity.MinCluster + 1
	on := rule.Options{ImplicitDNS: true}
	plain := policyOf(t, on, "plain", `{toEntities: [all]}`, "")
	names := policyOf(t, on, "names", `{toFQDNs: [{matchName: api.example.com}]}`, "")
	e := New(Config{})
	want := func(what string, a policytable.Action) {
		t.Helper()
		v, err := e.Lookup(subject, policytable.Egress, server, netip.MustParseAddr("10.0.0.9"), port.At(port.UDP, 53))
		if err != nil || v.Action != a {
			t.Errorf("%s: %s, %v, want %s", what, v.Action, err, a)
		}
	}
	apply(t, e, Change{
		AddIdentities: []peer.Identity{labelled(t, subject, "a"), labelled(t, server, "b")},
		AddSubjects:   []identity.Numeric{subject}, UpsertPolicies: []policy.Object{plain},
	})
	want("without names", policytable.Allow)
	apply(t, e, Change{UpsertPolicies: []policy.Object{names}})
	want("with names", policytable.Redirect)
	apply(t, e, Change{DeletePolicies: []policy.Key{names.Key}})
	want("without names again", policytable.Allow)
}
