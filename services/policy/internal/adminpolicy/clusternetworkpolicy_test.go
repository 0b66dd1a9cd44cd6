// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package adminpolicy

import (
	"encoding/json"
	"testing"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// TestDomainNamesAllowTheirQueries: the rule that allows queries to the resolver allows the names of all peers of the
// rule, because the queries have one deciding rule. "*." means any depth.
func TestDomainNamesAllowTheirQueries(t *testing.T) {
	var p Policy
	if err := json.Unmarshal([]byte(`{"metadata": {"name": "p"}, "spec": {
		"tier": "Admin", "priority": 1, "subject": {"namespaces": {}},
		"egress": [{"action": "Accept", "to": [
			{"domainNames": ["*.Example.com", "b.test"]}, {"networks": ["10.0.0.0/8"]}, {"domainNames": ["c.test."]}
		]}]}}`), &p); err != nil {
		t.Fatal(err)
	}
	if ps := p.Validate(rule.Options{}); len(ps) > 0 {
		t.Fatal(ps)
	}
	const want = "dns **.example.com.\ndns b.test.\ndns c.test."
	queries, plain := 0, 0
	for _, r := range p.Rules(rule.Options{}).Rules {
		switch {
		case r.Action != policytable.Redirect:
			plain += len(r.Peers.Names)
		case r.Proxy != policytable.ProxyDNS || r.Layer7 == nil || r.Layer7.Content() != want:
			t.Errorf("the rule %s, want the queries %q", r.Content(), want)
		default:
			queries++
		}
	}
	if queries != 2 || plain != 3 {
		t.Errorf("%d rules for queries and %d names, want 2 and 3", queries, plain)
	}
}
