// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"strings"
	"testing"

	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// egress returns a Cilium policy with entries of spec.egress.
func egress(kind, namespace, subject, entries string) string {
	return "apiVersion: cilium.io/v2\nkind: " + kind + "\nmetadata: {name: p, namespace: '" + namespace + "'}\n" +
		"spec:\n  endpointSelector: " + subject + "\n  egress:\n" + entries
}

func TestNamesWithoutDNSRuleAreNoted(t *testing.T) {
	const (
		names = "  - {toFQDNs: [{matchName: a.b}]}\n"
		web   = "{matchLabels: {app: web}}"
		ports = "toPorts: [{ports: [{port: '53', protocol: ANY}]"
	)
	every := "  - {toEntities: [all], " + ports + ", rules: {dns: [{matchPattern: '*'}]}}]}\n"
	one := strings.Replace(every, "matchPattern: '*'", "matchName: a.b", 1)
	other := strings.Replace(every, "'53'", "'5353'", 1)
	for _, c := range []struct {
		what     string
		policies []string // the first policy contains the DNS names
		noted    bool
	}{
		{"no DNS rule", []string{egress("CiliumNetworkPolicy", "shop", web, names)}, true},
		{
			"plain port 53",
			[]string{egress("CiliumNetworkPolicy", "shop", web, names+"  - {toEntities: [all], "+ports+"}]}\n")},
			true,
		},
		{"in the same policy", []string{egress("CiliumNetworkPolicy", "shop", web, names+every)}, false},
		{"for one name", []string{egress("CiliumNetworkPolicy", "shop", web, names+one)}, false},
		{"another port", []string{egress("CiliumNetworkPolicy", "shop", web, names+other)}, false},
		{"the printed rule", []string{egress("CiliumNetworkPolicy", "shop", web, names+"  "+dnsRule+"\n")}, false},
		{"no names", []string{egress("CiliumNetworkPolicy", "shop", web, one)}, false},
		{"in a policy of the same pods", []string{
			egress("CiliumNetworkPolicy", "shop", web, names), egress("CiliumNetworkPolicy", "shop", web, every),
		}, false},
		{"in a policy of the namespace", []string{
			egress("CiliumNetworkPolicy", "shop", web, names), egress("CiliumNetworkPolicy", "shop", "{}", every),
		}, false},
		{"in a policy of all pods", []string{
			egress("CiliumNetworkPolicy", "shop", web, names), egress("CiliumClusterwideNetworkPolicy", "", "{}", every),
		}, false},
		{"in a policy of other pods", []string{
			egress("CiliumNetworkPolicy", "shop", "{}", names), egress("CiliumNetworkPolicy", "shop", web, every),
		}, true},
		{"in a policy of another namespace", []string{
			egress("CiliumNetworkPolicy", "shop", web, names), egress("CiliumNetworkPolicy", "other", web, every),
		}, true},
		{"names for all pods, DNS for a namespace", []string{
			egress("CiliumClusterwideNetworkPolicy", "", "{}", names), egress("CiliumNetworkPolicy", "shop", "{}", every),
		}, true},
	} {
		var rules DNSRules
		var first *Object
		for _, text := range c.policies {
			o, err := decodeText(text)
			if err != nil {
				t.Fatalf("%s: %v", c.what, err)
			}
			if rules.Add(&o); first == nil {
				first = &o
			}
		}
		before := len(first.Notes)
		notes := rules.WithNotes(first, first.Notes)
		if len(first.Notes) != before {
			t.Errorf("%s: the notes of the object have changed", c.what)
		}
		var got manifest.Notes
		for _, n := range notes {
			if n.Kind == manifest.NoteNoDNSRule {
				got = append(got, n)
			}
		}
		if (len(got) > 0) != c.noted {
			t.Errorf("%s: noted %v, want a note: %t", c.what, got, c.noted)
		}
		if len(got) == 1 && (got[0].Path != "spec.egress[0].toFQDNs" || !strings.HasSuffix(got[0].Text, dnsRule)) {
			t.Errorf("%s: noted %s; want the path, and the rule at the end", c.what, got[0])
		}
	}
}

// TestPlainRulesReplaceDNSRules: with dns.implicit, a rule that allows DNS queries serves in place of a DNS rule.
func TestPlainRulesReplaceDNSRules(t *testing.T) {
	const names = "  - {toFQDNs: [{matchName: a.b}], toPorts: [{ports: [{port: '443', protocol: TCP}]}]}\n"
	for entry, noted := range map[string]bool{
		"": true,
		"  - {toEntities: [all], toPorts: [{ports: [{port: '53'}]}]}\n":                 false,
		"  - {toEntities: [all]}\n":                                                     false,
		"  - {toEntities: [all], toPorts: [{ports: [{port: dns, protocol: UDP}]}]}\n":   false,
		"  - {toEntities: [all], toPorts: [{ports: [{port: '53', protocol: TCP}]}]}\n":  false,
		"  - {toEntities: [all], toPorts: [{ports: [{port: '443', protocol: UDP}]}]}\n": true,
	} {
		docs, err := manifest.Parse([]byte(egress("CiliumNetworkPolicy", "shop", "{}", names+entry)))
		if err != nil {
			t.Fatal(err)
		}
		for _, implicit := range []bool{false, true} {
			o, err := Decode(docs[0], rule.Options{ImplicitDNS: implicit})
			if err != nil {
				t.Fatal(err)
			}
			var rules DNSRules
			rules.Add(&o)
			got := false
			for _, n := range rules.WithNotes(&o, o.Notes) {
				got = got || n.Kind == manifest.NoteNoDNSRule
			}
			if want := noted || !implicit; got != want {
				t.Errorf("%q, dns.implicit %t: noted %t, want %t", entry, implicit, got, want)
			}
		}
	}
}
