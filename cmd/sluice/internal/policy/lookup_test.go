// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"strings"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// TestQueryIsExplained: also while sluice-dns does not run, because sluice-policy has the rules and the addresses.
func TestQueryIsExplained(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Stop("dns")
	yes, no := true, false
	source := func(name string) []*policyv1.RuleSource {
		return []*policyv1.RuleSource{{
			Kind: "CiliumNetworkPolicy", Namespace: "shop", Name: name, Path: "spec.egress[0]",
		}}
	}
	n.Policy.Lookup = &policyv1.ExplainResponse{
		Verdict: policyv1.Action_ACTION_REDIRECT, Revision: 7,
		Egress: &policyv1.SideExplanation{
			Subject: 300, Action: policyv1.Action_ACTION_REDIRECT, Proxy: netv1.Proxy_PROXY_DNS,
			DecidedBy: netv1.DecidedBy_DECIDED_BY_RULE, Rule: 1, Enforced: true,
			Matches: []*policyv1.MatchingRule{
				{Number: 1, Sources: source("one"), Text: "redirect to dns", Decides: true, AllowsName: &yes},
				{Number: 2, Sources: source("two"), Text: "redirect to dns", AllowsName: &no},
				{Number: 3, Sources: source("three"), Text: "allow"},
			},
		},
		Dns: &policyv1.LookupExplanation{
			Name: "api.example.com.", Outcome: policyv1.QueryOutcome_QUERY_OUTCOME_ALLOWED,
			Rules: []*policyv1.MatchingRule{{Number: 4, Sources: source("names"), Text: "allow to names"}},
			Addresses: []*policyv1.ReachableAddress{
				{Address: "192.0.2.7", Ports: []string{"tcp/443", "tcp/80"}}, {Address: "192.0.2.8"},
			},
		},
	}
	args := []string{"policy", "explain", "--from", "300", "--to", "301", "--dns", "API.example.com"}
	out, _ := n.Want(t, 0, append(args, "-o", "wide")...)
	nodetest.WantLines(t, out,
		"300 -> 301, udp port 53, query for api.example.com.: "+
			"ALLOWED by sluice-dns, which learns from the answer by policy revision 7",
		"> 1 - - CiliumNetworkPolicy shop/one spec.egress[0] redirect to dns; allows the name",
		"2 - - CiliumNetworkPolicy shop/two spec.egress[0] redirect to dns; does not allow the name",
		"3 - - CiliumNetworkPolicy shop/three spec.egress[0] allow",
		"Rules that allow connections by this name:",
		"4 - - CiliumNetworkPolicy shop/names spec.egress[0] allow to names",
		"ADDRESS ALLOWED PORTS", "192.0.2.7 tcp/443, tcp/80", "192.0.2.8 none")
	if r := n.Policy.Explained; r.GetDnsName() != "API.example.com" || r.GetPort() != 53 ||
		r.GetProtocol() != netv1.Protocol_PROTOCOL_UDP {
		t.Errorf("asked for %v", r)
	}
	out, _ = n.Want(t, 0, append(args, "--port", "5353/udp", "-o", "json")...)
	if !strings.Contains(out, `"outcome": "allowed"`) || !strings.Contains(out, `"allowsName": false`) ||
		n.Policy.Explained.GetPort() != 5353 {
		t.Errorf("printed %s", out)
	}
	n.Policy.Lookup.Dns = &policyv1.LookupExplanation{
		Name: "b.example.", Outcome: policyv1.QueryOutcome_QUERY_OUTCOME_REFUSED,
	}
	out, _ = n.Want(t, 0, args...)
	if !strings.Contains(out, "REFUSED by sluice-dns") ||
		!strings.Contains(out, "No rule allows connections by this name") {
		t.Errorf("printed %s", out)
	}
	for outcome := range policyv1.QueryOutcome_name {
		if text := outcomeText(policyv1.QueryOutcome(outcome)); outcome != 0 && !strings.Contains(text, "ED") {
			t.Errorf("outcome %d has the text %q", outcome, text)
		}
	}
	n.Policy.Lookup = &policyv1.ExplainResponse{Revision: 7}
	out, _ = n.Want(t, 0, args...)
	if !strings.Contains(out, "is not a workload, so no policy applies to its queries.") {
		t.Errorf("printed %s", out)
	}
	out, _ = n.Want(t, 0, append(args, "--port", "53/tcp")...)
	if r := n.Policy.Explained; r.GetProtocol() != netv1.Protocol_PROTOCOL_TCP || r.GetPort() != 53 {
		t.Errorf("asked for %v, printed %s", r, out)
	}
	n.Want(t, invocation.ExitUsage, append(args, "--port", "53/sctp")...)
}
