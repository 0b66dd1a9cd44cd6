// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// QueryOutcome tells what happens to a DNS query of a subject.
type QueryOutcome uint8

// The outcomes.
const (
	QueryDenied       QueryOutcome = iota + 1 // the packets are denied
	QueryAllowed                              // the DNS proxy passes the query, and learns from its answer
	QueryRefused                              // the DNS proxy refuses the name
	QueryNotEvaluated                         // the packets pass without the DNS proxy, and teach nothing
	QueryNoProxy                              // no proxy evaluates the packets, so they are dropped
)

// Limits of a NameExplanation. They bound the time that a policy with many ports takes in the goroutine of the owner,
// and the size of the answer.
const (
	maxNameRules = 256
	maxNamePorts = 32 // evaluated for each address
)

// NameExplanation explains a DNS query, and lists the addresses of its name to which the subject may connect.
type NameExplanation struct {
	Name    string // canonical
	Outcome QueryOutcome
	// Allows tells, by rule number, whether a rule allows the name. It contains the matching redirect rules whose
	// union decides about the name.
	Allows map[uint16]bool
	// Rules are the first egress rules with a name or pattern that matches the name, in the order of evaluation.
	Rules     []Match
	Addresses []NamedAddress // sorted
}

// NamedAddress is a learned address of a name.
type NamedAddress struct {
	Addr netip.Addr
	// Allowed are the first 32 ranges of ports of Rules at which the subject may connect to the address. For a
	// range, this is the verdict at its first port. Named ports are left out.
	Allowed []port.Range
}

// ExplainName explains a query for a name. x is the explanation of the connection to the DNS server, on egress.
func (e *Engine) ExplainName(subject identity.Numeric, x Explanation, name string) (NameExplanation, error) {
	out := NameExplanation{Name: dnsname.Canonical(name), Allows: make(map[uint16]bool)}
	s := e.subjects[subject]
	if s == nil || s.bound[policytable.Egress] == nil {
		out.Outcome = QueryNotEvaluated
		return out, nil
	}
	l := s.bound[policytable.Egress]
	e.explainQuery(&out, l, x)
	sources := l.program.Spread(s.sources[policytable.Egress])
	for i, r := range l.program.Rules() {
		n := uint16(i + 1) //nolint:gosec // at most table.MaxRules
		if members := l.program.Members(n); len(members) > 1 || members[0] != n {
			continue // a joint rule; its members are listed
		}
		selects := func(p rule.NamePeer) bool { return p.Pattern.Matches(out.Name) }
		if len(out.Rules) < maxNameRules && slices.ContainsFunc(r.Peers.Names, selects) {
			out.Rules = append(out.Rules, Match{Number: n, Rule: r, Sources: sources[i], ByAddress: true})
		}
	}
	var addrs []netip.Addr
	for _, key := range []dnsname.Learned{
		dnsname.ForAll(out.Name), dnsname.ForNamespace(out.Name, l.program.SubjectNamespace()),
	} {
		if known := e.learned.byName[key]; known != nil {
			addrs = append(addrs, known.addrs...)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	ranges := portsOf(out.Rules)
	for _, a := range slices.Compact(addrs) {
		one := NamedAddress{Addr: a}
		for _, r := range ranges {
			v, err := e.Lookup(subject, policytable.Egress, e.outside(a), a, r.Lo)
			if err != nil {
				return out, err
			}
			if v.Action != policytable.Deny {
				one.Allowed = append(one.Allowed, r)
			}
		}
		out.Addresses = append(out.Addresses, one)
	}
	return out, nil
}

// portsOf returns the first port ranges of rules, without duplicates.
func portsOf(rules []Match) (out []port.Range) {
	for _, m := range rules {
		list := m.Rule.Ports
		if m.Rule.AllPorts {
			list = []rule.Port{{Range: port.Everything}}
		}
		for _, p := range list {
			if p.Name == "" && len(out) < maxNamePorts && !slices.Contains(out, p.Range) {
				out = append(out, p.Range)
			}
		}
	}
	return out
}

// explainQuery sets the outcome of a query, and the rules that decide about names.
func (e *Engine) explainQuery(out *NameExplanation, l *live, x Explanation) {
	switch x.Verdict.Action {
	case policytable.Deny:
		out.Outcome = QueryDenied
		return
	case policytable.Allow:
		out.Outcome = QueryNotEvaluated
		return
	}
	if x.Verdict.Proxy != policytable.ProxyDNS || x.TableRule == 0 || l.table.Rules[x.TableRule-1].RuleSet == 0 {
		out.Outcome = QueryNoProxy
		return
	}
	if out.Outcome = QueryRefused; l.program.Set(x.TableRule).AllowsName(out.Name) {
		out.Outcome = QueryAllowed
	}
	for _, n := range l.program.Members(x.TableRule) {
		r, _, err := l.program.Rule(n)
		if err == nil && slices.ContainsFunc(x.Matches, func(m Match) bool { return m.Number == n }) {
			out.Allows[n] = r.Action == policytable.Allow || r.Set() != nil && r.Set().AllowsName(out.Name)
		}
	}
}

// outside returns the identity of addresses outside of the cluster.
func (e *Engine) outside(a netip.Addr) identity.Numeric {
	n := identity.WorldIPv4
	if a.Is6() {
		n = identity.WorldIPv6
	}
	if e.peers[n] == nil {
		return identity.World
	}
	return n
}

// tableRule returns the number of the rule in a verdict of a table; 0 if no rule decided.
func tableRule(v table.Verdict) uint16 {
	if v.Reason != table.ByRule {
		return 0
	}
	return v.Rule
}
