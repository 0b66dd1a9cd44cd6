// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cilium

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// policyWith returns a policy with one port rule on egress.
func policyWith(t *testing.T, portRule string) *NetworkPolicy {
	t.Helper()
	var p NetworkPolicy
	text := `{"metadata": {"name": "p", "namespace": "n"},
		"spec": {"endpointSelector": {}, "egress": [{"toPorts": [` + portRule + `]}]}}`
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		t.Fatal(err)
	}
	if ps := p.Validate(true, rule.Options{}); len(ps) > 0 {
		t.Fatalf("%s: %v", portRule, ps)
	}
	return &p
}

func TestLayer7RulesReachTheRule(t *testing.T) {
	const tcp = `"ports": [{"port": "80", "protocol": "TCP"}]`
	for _, c := range []struct {
		name, rule string
		proxy      policytable.Proxy
		want       string
	}{
		{
			"dns", `{` + tcp + `, "rules": {"dns": [{"matchName": "B.example"}, {"matchPattern": "*.a.example."}]}}`,
			policytable.ProxyDNS, "dns *.a.example.\ndns b.example.",
		},
		{
			"http", `{` + tcp + `, "rules": {"http": [{"method": "GET", "path": "/a.*", "host": "h"}, {}]}}`,
			policytable.ProxyHTTP, `http "" "" ""` + "\n" + `http "GET" "/a.*" "h"`,
		},
		{
			"headers", `{` + tcp + `, "rules": {"http": [{"headers": ["X-Here", "X-Is: a b", "X-Bare c"]}]}}`,
			policytable.ProxyHTTP,
			`http "" "" "" header "x-bare" "c" true header "x-here" "" false header "x-is" "a b" true`,
		},
		{
			"header matches", `{` + tcp + `,
				"rules": {"http": [{"headerMatches": [{"name": "X", "value": "v", "mismatch": "ADD"}]}]}}`,
			policytable.ProxyHTTP, `http "" "" "" match "x" "v" 2`,
		},
		{
			"server names", `{` + tcp + `, "serverNames": ["*.example.com"]}`,
			policytable.ProxyTLS, "server *.example.com.",
		},
		{
			"a host that is no expression", `{` + tcp + `, "rules": {"http": [{"host": "*"}]}}`,
			policytable.ProxyHTTP, "",
		},
		{
			"no header name", `{` + tcp + `, "rules": {"http": [{"headers": [""]}]}}`,
			policytable.ProxyHTTP, "",
		},
		{
			"a secret", `{` + tcp + `,
				"rules": {"http": [{"headerMatches": [{"name": "X", "secret": {"name": "s"}}]}]}}`,
			policytable.ProxyHTTP, "",
		},
		{
			"termination", `{` + tcp + `, "terminatingTLS": {"secret": {"name": "s"}}, "rules": {"http": [{}]}}`,
			policytable.ProxyHTTP, "",
		},
		{
			"a proxy of the user", `{` + tcp + `, "listener": {"name": "l", "envoyConfig": {"name": "e"}}}`,
			policytable.ProxyListener, "",
		},
	} {
		p := policyWith(t, c.rule)
		rules := p.Rules(true, rule.Options{})[0].Rules
		if len(rules) != 1 || rules[0].Action != policytable.Redirect || rules[0].Proxy != c.proxy ||
			rules[0].Layer7 == nil {
			t.Errorf("%s: rules %+v", c.name, rules)
			continue
		}
		if got := rules[0].Layer7.Content(); got != c.want {
			t.Errorf("%s: content %q, want %q", c.name, got, c.want)
		}
	}
}

// TestRuleForEveryNameRedirectsUDP: DNS rules redirect the packets of all protocols to the DNS proxy, also if a rule
// allows every name. Without a DNS proxy, a rule for every name allows the packets.
func TestRuleForEveryNameRedirectsUDP(t *testing.T) {
	const ports = `{"ports": [{"port": "53", "protocol": "ANY"}, {"port": "dns"}], `
	rules := func(names string, o rule.Options) string {
		var out []string
		for _, r := range policyWith(t, ports+`"rules": {"dns": [`+names+`]}}`).Rules(true, o)[0].Rules {
			for _, proto := range port.WithPorts {
				number := slices.ContainsFunc(r.Ports, func(p rule.Port) bool {
					return p.Name == "" && p.Range.Contains(port.At(proto, 53))
				})
				named := slices.ContainsFunc(r.Ports, func(p rule.Port) bool { return p.Name != "" && p.Names("DNS", proto) })
				if number != named {
					t.Errorf("%s: %v: port 53 %t, port dns %t", names, proto, number, named)
				}
				if number {
					out = append(out, fmt.Sprint(proto, " ", r.Action, " ", r.Proxy))
				}
			}
		}
		slices.Sort(out)
		return strings.Join(out, ", ")
	}
	const every, some = `{"matchName": "a.test"}, {"matchPattern": "*"}`, `{"matchPattern": "*.a.test"}`
	for _, c := range []struct {
		names string
		o     rule.Options
		want  string
	}{
		{every, rule.Options{}, "sctp redirect dns, tcp redirect dns, udp redirect dns"},
		{every, rule.Options{WithoutDNSProxy: true}, "sctp allow none, tcp allow none, udp allow none"},
		{some, rule.Options{}, "sctp redirect dns, tcp redirect dns, udp redirect dns"},
		{some, rule.Options{WithoutDNSProxy: true}, "sctp redirect dns, tcp redirect dns, udp redirect dns"},
	} {
		if got := strings.ToLower(rules(c.names, c.o)); got != c.want {
			t.Errorf("%s, %+v: %s, want %s", c.names, c.o, got, c.want)
		}
	}
}

// TestDNSRulesAreNotedAsFarAsNothingEvaluatesThem: DNS rules and toFQDNs get a note that they are not supported,
// unless a DNS proxy is configured, which enforces them.
func TestDNSRulesAreNotedAsFarAsNothingEvaluatesThem(t *testing.T) {
	const dns = "spec.egress[0].toPorts[0].rules.dns: "
	for _, c := range []struct{ rule, with, without string }{
		{
			`{"ports": [{"port": "53", "protocol": "UDP"}], "rules": {"dns": [{"matchName": "a.test"}]}}`,
			"", dns + "not supported by Sluice: DNS rules; ",
		},
		{
			`{"ports": [{"port": "53", "protocol": "ANY"}], "rules": {"dns": [{"matchName": "a.test"}]}}`,
			"", dns + "not supported by Sluice: DNS rules; ",
		},
		{
			`{"ports": [{"port": "53", "protocol": "SCTP"}], "rules": {"dns": [{"matchName": "a.test"}]}}`,
			dns + "not supported by Sluice: DNS rules for SCTP; ", dns + "not supported by Sluice: DNS rules; ",
		},
		{
			`{"ports": [{"port": "53"}], "rules": {"dns": [{"matchPattern": "*"}]}}`,
			"", dns + "allows every name: ",
		},
	} {
		for without, want := range map[bool]string{false: c.with, true: c.without} {
			got := ""
			for _, n := range policyWith(t, c.rule).Notes(rule.Options{WithoutDNSProxy: without}) {
				got += n.Path + ": " + n.Text
			}
			if !strings.HasPrefix(got, want) || want == "" && got != "" {
				t.Errorf("%s, without a proxy %t: noted %q, want %q", c.rule, without, got, want)
			}
		}
	}
}

// TestHTTPRulesAndServerNamesAreNotedWhereNoProxyEvaluatesThem: sluice-http evaluates egress rules only, and ends no
// TLS.
func TestHTTPRulesAndServerNamesAreNotedWhereNoProxyEvaluatesThem(t *testing.T) {
	const at = "spec.egress[0].toPorts[0]."
	for _, c := range []struct{ rule, with, without string }{
		{`"rules": {"http": [{"path": "/a"}]}`, "", "rules.http: not supported by Sluice: HTTP rules; packets"},
		{`"serverNames": ["a.test"]`, "", "serverNames: not supported by Sluice: TLS server names; packets"},
		{
			`"terminatingTLS": {"secret": {"name": "x"}}, "rules": {"http": [{"path": "/a"}]}`,
			"rules.http: not supported by Sluice: HTTP rules within TLS; sluice-http refuses",
			"rules.http: not supported by Sluice: HTTP rules; packets",
		},
		{
			`"terminatingTLS": {"secret": {"name": "x"}}`,
			"terminatingTLS: not supported by Sluice: TLS termination; sluice-http refuses",
			"terminatingTLS: not supported by Sluice: TLS termination; packets",
		},
	} {
		p := policyWith(t, `{"ports": [{"port": "80", "protocol": "TCP"}], `+c.rule+`}`)
		for with, want := range map[bool]string{true: c.with, false: c.without} {
			got := ""
			for _, n := range p.Notes(rule.Options{HTTPProxy: with}) {
				got += strings.TrimPrefix(n.Path, at) + ": " + n.Text
			}
			if !strings.HasPrefix(got, want) || want == "" && got != "" {
				t.Errorf("%s, with a proxy %t: noted %q, want %q", c.rule, with, got, want)
			}
		}
		if r := p.Rules(true, rule.Options{})[0].Rules[0]; c.with != "" && len(r.Layer7.HTTP)+len(r.Layer7.ServerNames) > 0 {
			t.Errorf("%s allows %+v", c.rule, r.Layer7)
		}
	}
}

func TestHTTPRuleThatMatchesNothingIsNoted(t *testing.T) {
	for text, want := range map[string]string{
		`{"host": "*"}`: "host: not supported by Sluice: not a regular expression: ",
		`{"headerMatches": [{"name": "X", "value": "y\r\n\r\nGET / HTTP/1.1", "mismatch": "ADD"}]}`: "headerMatches[0].value: " +
			"not supported by Sluice: control characters, which no header has",
		`{"headers": ["X:"]}`: `headers[0]: not supported by Sluice: "X:" is not a name of a header; write "Name" or "Name: value"`,
		`{"headerMatches": [{"name": "X", "secret": {"name": "s"}}]}`: "headerMatches[0].secret: not supported by Sluice: " +
			"values from secrets; write the value in the policy; the HTTP rule allows nothing",
	} {
		const ports = `{"ports": [{"port": "80", "protocol": "TCP"}], `
		p := policyWith(t, ports+`"rules": {"http": [`+text+`]}}`)
		found := false
		for _, n := range p.Notes(rule.Options{HTTPProxy: true}) {
			found = found || strings.HasPrefix(n.Path+": "+n.Text, "spec.egress[0].toPorts[0].rules.http[0]."+want)
		}
		if !found {
			t.Errorf("%s: notes %v, want %q", text, p.Notes(rule.Options{HTTPProxy: true}), want)
		}
	}
}

// TestContentIsPartOfTheDigest: rules that allow different requests have different digests. With equal digests, one
// of them would be left out of a table as a duplicate.
func TestContentIsPartOfTheDigest(t *testing.T) {
	digest := func(path string) rule.Digest {
		p := policyWith(t, `{"ports": [{"port": "80", "protocol": "TCP"}], "rules": {"http": [{"path": "`+path+`"}]}}`)
		return p.Rules(true, rule.Options{})[0].Rules[0].Digest()
	}
	first, again := digest("/a"), digest("/a")
	if first == digest("/b") || first != again {
		t.Error("the digest does not follow the content")
	}
}
