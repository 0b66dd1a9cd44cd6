// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// TestQueryIsExplained checks the outcome of a query, the rules that decide about its name, and the ports that are
// allowed at its addresses.
func TestQueryIsExplained(t *testing.T) {
	const subject, server = identity.MinCluster, identity.MinCluster + 1
	const (
		to  = `toEndpoints: [{matchLabels: {"k8s:io.kubernetes.pod.namespace": b, server: ""}}]`
		udp = `toPorts: [{ports: [{port: "53", protocol: UDP}]`
		// one allows a.example; two allows b.example; plain allows every query.
		one   = `{` + to + `, ` + udp + `, rules: {dns: [{matchName: a.example}]}}]}`
		two   = `{` + to + `, ` + udp + `, rules: {dns: [{matchName: b.example}]}}]}`
		plain = `{` + to + `, ` + udp + `}]}`
		http  = `{` + to + `, toPorts: [{ports: [{port: "53", protocol: TCP}], rules: {http: [{}]}}]}`
		names = `{toFQDNs: [{matchPattern: "*.example"}], toPorts: [{ports: [{port: "443", protocol: TCP}, ` +
			`{port: "8000", endPort: 8010, protocol: TCP}]}]}`
		others = `{toFQDNs: [{matchName: c.example}]}`
	)
	on := rule.Options{}
	addr := netip.MustParseAddr("192.0.2.7")
	world, err := peer.New(identity.WorldIPv4, label.NewSet(label.Reserved(identity.NameWorldIPv4)))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what     string
		policies []string
		denied   string
		name     string
		proto    port.Protocol
		without  bool
		want     string
	}{
		{
			"allowed",
			[]string{one, names},
			"", "A.Example", port.UDP, false,
			"2 map[1:true] 1 rules [192.0.2.7 TCP/443 TCP/8000-8010]",
		},
		{"refused", []string{one, names}, "", "b.example.", port.UDP, false, "3 map[1:false] 1 rules []"},
		{"one of two", []string{one, two, names}, "", "b.example", port.UDP, false, "2 one true, one false, 1 rules []"},
		{
			"every name by a plain rule",
			[]string{one, plain},
			"", "z.test", port.UDP, false,
			"2 one true, one false, 0 rules []",
		},
		{"no DNS rule", []string{plain, others}, "", "c.example", port.UDP, false, "4 map[] 1 rules []"},
		{
			"denied",
			[]string{names},
			"", "a.example", port.UDP, false,
			"1 map[] 1 rules [192.0.2.7 TCP/443 TCP/8000-8010]",
		},
		{
			"a port denied",
			[]string{one, names},
			`{toPorts: [{ports: [{port: "443", protocol: TCP}]}]}`, "a.example", port.UDP,
			false, "2 map[1:true] 1 rules [192.0.2.7 TCP/8000-8010]",
		},
		{"another proxy", []string{http}, "", "a.example", port.TCP, false, "5 map[] 0 rules [192.0.2.7]"},
		{"without dns.proxy", []string{one}, "", "a.example", port.UDP, true, "5 map[] 0 rules [192.0.2.7]"},
		{"no policy", nil, "", "a.example", port.UDP, false, "4 map[] 0 rules []"},
	} {
		e := New(Config{WithoutDNSProxy: c.without})
		change := Change{
			AddIdentities: []peer.Identity{labelled(t, subject, "a"), labelled(t, server, "b", "server"), world},
			AddSubjects:   []identity.Numeric{subject},
			Learn:         []Name{{Name: "a.example.", Addrs: []netip.Addr{addr}}},
		}
		for i, p := range c.policies {
			denied := ""
			if i == 0 {
				denied = c.denied
			}
			o := on
			o.WithoutDNSProxy = c.without
			change.UpsertPolicies = append(change.UpsertPolicies, policyOf(t, o, fmt.Sprint("p", i), p, denied))
		}
		apply(t, e, change)
		at := port.At(c.proto, 53)
		x, err := e.Explain(subject, policytable.Egress, server, netip.MustParseAddr("10.0.0.9"), at)
		if err != nil {
			t.Fatal(err)
		}
		n, err := e.ExplainName(subject, x, c.name)
		if err != nil {
			t.Fatal(err)
		}
		// The numbers of rules depend on the digests of the rules.
		var allows string
		switch yes, no := countOf(n.Allows); {
		case yes == 1 && no == 1:
			allows = "one true, one false,"
		case yes == 1:
			allows = "map[1:true]"
		case no == 1:
			allows = "map[1:false]"
		default:
			allows = fmt.Sprint(n.Allows)
		}
		addresses := []string{}
		for _, a := range n.Addresses {
			text := a.Addr.String()
			for _, r := range a.Allowed {
				text += " " + rule.PortsText(r)
			}
			addresses = append(addresses, text)
		}
		got := fmt.Sprintf("%d %s %d rules %v", n.Outcome, allows, len(n.Rules), addresses)
		if got != c.want {
			t.Errorf("%s: got %s, want %s", c.what, got, c.want)
		}
	}
}

func countOf(m map[uint16]bool) (yes, no int) {
	for _, allows := range m {
		if allows {
			yes++
		} else {
			no++
		}
	}
	return yes, no
}
