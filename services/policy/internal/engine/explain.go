// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// Match is a rule that matches a connection, with the way in which it matched.
type Match struct {
	Number  uint16 // its number in the table, starting with 1
	Rule    *rule.Rule
	Sources []policytable.Source // all its source locations
	// ByIdentity and ByAddress report whether the rule matched the identity of the peer, its address, or both.
	ByIdentity, ByAddress bool
}

// Explanation is a verdict with all matching rules.
type Explanation struct {
	Verdict table.Verdict
	// TableRule is the number of the deciding rule in the table, which may be a joint rule; 0: none. Verdict contains
	// the number of a rule that a policy contains.
	TableRule uint16
	Matches   []Match // in the order of evaluation
	// Flags are the defaults that apply if no rule decides. If Enforced is false, there is no table, and everything
	// is allowed.
	Flags    table.Flags
	Enforced bool
}

// Explain evaluates one side of a connection and returns the verdict with its reasons. It takes the verdict from the
// table, and finds the matching rules by comparing the connection with every rule.
func (e *Engine) Explain(subject identity.Numeric, d policytable.Direction, number identity.Numeric, addr netip.Addr, q port.Point) (Explanation, error) {
	verdict, err := e.Lookup(subject, d, number, addr, q)
	if err != nil {
		return Explanation{}, err
	}
	s := e.subjects[subject]
	l := s.bound[d]
	if l == nil {
		return Explanation{Verdict: verdict}, nil
	}
	x := Explanation{Verdict: verdict, TableRule: tableRule(verdict), Flags: l.table.Flags, Enforced: true}

	var who []uint16
	var ports []workload.NamedPort
	scope, unknown := identity.PeerScopeCluster, true
	if p := e.peers[number]; p != nil && p.class != nil {
		var brought [][]uint16
		for sel, b := range l.brings {
			if _, ok := sel.classes[p.class]; ok {
				brought = append(brought, b)
			}
		}
		who, ports, scope = l.program.Matched(brought, p.id.Kind), p.id.Ports, p.id.Scope
		unknown = p.id.Kind == identity.KindUnknown
	} else {
		who = l.program.Matched(nil, identity.KindUnknown)
	}
	where, placePorts := l.program.Where(addr, scope, e.places(l))

	covers := func(n uint16, ports []workload.NamedPort, unknown bool) bool {
		for _, i := range l.program.Function([]uint16{n}, ports, unknown) {
			if q <= i.Hi {
				return i.Value != table.Nothing
			}
		}
		return false
	}
	sources := l.program.Spread(s.sources[d])
	found := make(map[uint16]*Match)
	note := func(n uint16) *Match {
		if found[n] == nil {
			r, _, err := l.program.Rule(n)
			if err != nil {
				panic(fmt.Sprintf("engine: %v", err)) // numbers come from the same program
			}
			found[n] = &Match{Number: n, Rule: r, Sources: sources[n-1]}
		}
		return found[n]
	}
	for _, n := range who {
		if covers(n, ports, unknown) {
			note(n).ByIdentity = true
		}
	}
	for _, n := range l.program.Everywhere() {
		if covers(n, nil, false) {
			note(n).ByIdentity = true
		}
	}
	for _, n := range where {
		if covers(n, placePorts, false) {
			note(n).ByAddress = true
		}
	}
	for _, m := range found {
		x.Matches = append(x.Matches, *m)
	}
	slices.SortFunc(x.Matches, func(a, b Match) int { return int(a.Number) - int(b.Number) })
	x.Verdict.Rule = l.decidingRule(x.Verdict.Rule, func(n uint16) bool { return found[n] != nil })
	return x, nil
}

// decidingRule returns the first matching rule behind a rule number of the table. The number of a joint rule means
// all its members. In a coarse table, a number means a run of rules with the same effect.
func (l *live) decidingRule(number uint16, matches func(uint16) bool) uint16 {
	if number == 0 {
		return 0
	}
	first, last := number, number
	if l.coarse {
		first = l.program.Alike(number)
		last = l.program.Run(first)
	}
	for n := first; n <= last; n++ {
		for _, m := range l.program.Members(n) {
			if matches(m) {
				return m
			}
		}
	}
	return number
}
