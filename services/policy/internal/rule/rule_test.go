// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rule

import (
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/policytable"
)

// levels are the criteria of Compare, most significant first. Each sets its part of a rule to an earlier or a later
// value.
var levels = []struct {
	name string
	set  func(r *Rule, later bool)
}{
	{"tier", func(r *Rule, later bool) { r.Tier = pick(later, policytable.Normal, policytable.Baseline) }},
	{"priority", func(r *Rule, later bool) { r.Priority = pick[int32](later, -1, 3) }},
	{"place in the policy", func(r *Rule, later bool) { r.Index = pick[int32](later, 2, 7) }},
	{"action", func(r *Rule, later bool) { r.Action = pick(later, policytable.Redirect, policytable.Allow) }},
	{"proxy", func(r *Rule, later bool) { r.Proxy = pick(later, policytable.ProxyDNS, policytable.ProxyTLS) }},
	{"content", func(r *Rule, later bool) { r.digest = Digest{1: pick[byte](later, 4, 5)} }},
	{"kind of the source", func(r *Rule, later bool) { r.Source.Kind = pick(later, "A", "B") }},
	{"namespace of the source", func(r *Rule, later bool) { r.Source.Namespace = pick(later, "a", "b") }},
	{"name of the source", func(r *Rule, later bool) { r.Source.Name = pick(later, "a", "b") }},
	{"path of the source", func(r *Rule, later bool) { r.Source.Path = pick(later, "spec.a", "spec.b") }},
}

func pick[T any](later bool, a, b T) T {
	if later {
		return b
	}
	return a
}

// TestTheFirstLevelThatDiffersOrdersTwoRules: the most significant level at which two rules differ decides their
// order.
func TestTheFirstLevelThatDiffersOrdersTwoRules(t *testing.T) {
	for i := range levels {
		for same := range 1 << i { // values that both rules have at the more significant levels
			first, second := new(Rule), new(Rule)
			for j, l := range levels {
				switch {
				case j < i:
					l.set(first, same>>j&1 != 0)
					l.set(second, same>>j&1 != 0)
				default:
					l.set(first, j > i)
					l.set(second, j == i)
				}
			}
			if got := Compare(first, second); got != -1 {
				t.Errorf("%s orders first, all later levels second: Compare is %d, want -1", levels[i].name, got)
			}
			if got := Compare(second, first); got != 1 {
				t.Errorf("%s orders second, all later levels first: Compare is %d, want 1", levels[i].name, got)
			}
		}
	}
	a, b := new(Rule), new(Rule)
	for _, l := range levels {
		l.set(a, true)
		l.set(b, true)
	}
	if got := Compare(a, b); got != 0 {
		t.Errorf("equal rules: Compare is %d, want 0", got)
	}
}

func TestTiersActionsAndProxiesHaveTheirOrder(t *testing.T) {
	rules := []*Rule{
		{Tier: policytable.Admin, Action: policytable.Deny},
		{Tier: policytable.Admin, Action: policytable.Redirect, Proxy: policytable.ProxyDNS},
		{Tier: policytable.Admin, Action: policytable.Redirect, Proxy: policytable.ProxyHTTP},
		{Tier: policytable.Admin, Action: policytable.Redirect, Proxy: policytable.ProxyTLS},
		{Tier: policytable.Admin, Action: policytable.Redirect, Proxy: policytable.ProxyListener},
		{Tier: policytable.Admin, Action: policytable.Allow},
		{Tier: policytable.Admin, Action: policytable.Pass},
		{Tier: policytable.Admin, Index: 1, Action: policytable.Deny},
		{Tier: policytable.Admin, Priority: 1, Action: policytable.Deny},
		{Tier: policytable.Normal, Priority: -5, Action: policytable.Deny},
		{Tier: policytable.Isolation, Action: policytable.Deny},
		{Tier: policytable.Baseline, Action: policytable.Deny},
	}
	sorted := slices.Clone(rules)
	slices.Reverse(sorted)
	slices.SortFunc(sorted, Compare)
	for i := range rules {
		if sorted[i] != rules[i] {
			t.Errorf("place %d: %s, priority %d, index %d, %s to %s", i, sorted[i].Tier, sorted[i].Priority, sorted[i].Index, sorted[i].Action, sorted[i].Proxy)
		}
	}
}
