// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/ruleset"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
)

// labelled returns an identity in a namespace with labels.
func labelled(t *testing.T, n identity.Numeric, ns string, keys ...string) peer.Identity {
	t.Helper()
	ls := []label.Label{label.Kubernetes(label.KeyNamespace, ns)}
	for _, k := range keys {
		ls = append(ls, label.Kubernetes(k, ""))
	}
	id, err := peer.New(n, label.NewSet(ls...))
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// asks returns a policy that redirects DNS queries to the peers with a label, and allows the given names.
func asks(t *testing.T, ns, name, key string, names ...string) policy.Object {
	t.Helper()
	rules := &layer7.Rules{}
	for _, text := range names {
		p, err := dnsname.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		rules.DNS = append(rules.DNS, p)
	}
	r := &rule.Rule{
		Source:    policytable.Source{Kind: "K", Namespace: ns, Name: name},
		Direction: policytable.Egress, Tier: policytable.Normal,
		Action: policytable.Redirect, Proxy: policytable.ProxyDNS, Layer7: rules,
		Peers: rule.Peers{Selectors: []selector.Selector{exists(key)}},
		Ports: []rule.Port{{Range: port.Ports(port.UDP, 53, 53)}},
	}
	if len(names) == 0 {
		r.Action, r.Proxy, r.Layer7 = policytable.Allow, policytable.NoProxy, nil
	}
	return policy.Object{Key: policy.Key{Kind: "K", Namespace: ns, Name: name}, Specs: []rule.Spec{{
		Namespace: ns, Subject: selector.New(selector.Requirement{
			Source: label.SourceKubernetes, Key: label.KeyNamespace, Op: selector.In, Values: []string{ns},
		}),
		Selects: [2]bool{policytable.Egress: true}, DefaultDeny: [2]bool{policytable.Egress: true},
		Rules: []*rule.Rule{r.Seal()},
	}}}
}

// TestNewPeerGetsTheUnion: a change adds a peer that needs a joint rule which the table does not have. The same
// change replaces the table.
func TestNewPeerGetsTheUnion(t *testing.T) {
	const subject, both = identity.MinCluster, identity.MinCluster + 1
	e := New(Config{})
	apply(t, e, Change{
		AddIdentities: []peer.Identity{labelled(t, subject, "a")},
		AddSubjects:   []identity.Numeric{subject},
		UpsertPolicies: []policy.Object{
			asks(t, "a", "one", "x", "one.example"), asks(t, "a", "two", "y", "two.example"),
		},
	})
	addr, q := netip.MustParseAddr("10.0.0.9"), port.At(port.UDP, 53)
	content := func() (names []string, all bool) {
		v, err := e.Lookup(subject, policytable.Egress, both, addr, q)
		if err != nil || v.Action != policytable.Redirect {
			t.Fatalf("verdict %+v, %v", v, err)
		}
		set := e.subjects[subject].bound[policytable.Egress].program.Set(v.Rule)
		for _, p := range set.DNS {
			names = append(names, p.String())
		}
		b, _ := e.Bound(subject, policytable.Egress)
		if b.Table.Rules[v.Rule-1].RuleSet == 0 {
			t.Error("the set has no number")
		}
		return names, set.All
	}
	apply(t, e, Change{AddIdentities: []peer.Identity{labelled(t, both, "b", "x", "y")}})
	if names, all := content(); all || !slices.Equal(names, []string{"one.example.", "two.example."}) {
		t.Errorf("names %v, all %t", names, all)
	}
	x, err := e.Explain(subject, policytable.Egress, both, addr, q)
	if err != nil || len(x.Matches) != 2 || x.Verdict.Rule != x.Matches[0].Number {
		t.Errorf("explanation %+v, %v", x, err)
	}
	apply(t, e, Change{UpsertPolicies: []policy.Object{asks(t, "a", "three", "x")}})
	if names, all := content(); !all || len(names) != 0 {
		t.Errorf("with an allow rule: names %v, all %t", names, all)
	}
	apply(t, e, Change{DeletePolicies: []policy.Key{
		{Kind: "K", Namespace: "a", Name: "three"}, {Kind: "K", Namespace: "a", Name: "two"},
	}})
	if names, all := content(); all || !slices.Equal(names, []string{"one.example."}) {
		t.Errorf("after two policies were deleted: names %v, all %t", names, all)
	}
}

// TestOneTenantDoesNotUseUpTheRuleSets: a tenant has more rule sets than its share. Some of them get no number, but
// all rule sets of another tenant do.
func TestOneTenantDoesNotUseUpTheRuleSets(t *testing.T) {
	const size = 16
	now := time.Unix(1_795_000_000, 0)
	sets := ruleset.New(ruleset.Config{Size: size, Now: func() time.Time { return now }})
	e := New(Config{Tenant: byNamespace, RuleSets: sets})
	c := Change{}
	for i, ns := range []string{"greedy", "small"} {
		n := identity.MinCluster + identity.Numeric(i)
		c.AddIdentities = append(c.AddIdentities, labelled(t, n, ns))
		c.AddSubjects = append(c.AddSubjects, n)
	}
	for i := range 2 * size {
		o := asks(t, "greedy", fmt.Sprint(i), fmt.Sprint("k", i), fmt.Sprint("n", i, ".example"))
		c.UpsertPolicies = append(c.UpsertPolicies, o)
	}
	apply(t, e, c)
	numbers := func(n identity.Numeric) (with, without int) {
		b, _ := e.Bound(n, policytable.Egress)
		for _, r := range b.Table.Rules {
			switch {
			case r.Action != policytable.Redirect:
			case r.RuleSet != 0:
				with++
			default:
				without++
			}
		}
		return with, without
	}
	if with, without := numbers(identity.MinCluster); with == 0 || without < size {
		t.Errorf("the greedy tenant: %d sets with a number, %d without", with, without)
	}
	apply(t, e, Change{UpsertPolicies: []policy.Object{asks(t, "small", "p", "k", "n.example")}})
	for range 3 { // the number that is withdrawn from the greedy tenant becomes free after a grace period
		now = now.Add(ruleset.Grace)
		sets.Expire()
		apply(t, e, Change{})
	}
	if with, without := numbers(identity.MinCluster + 1); with != 1 || without != 0 {
		t.Errorf("the small tenant: %d sets with a number, %d without", with, without)
	}
}

// TestSharedTableIsNotClosedByATenantAboveItsShare: the first subject of a table belongs to a tenant that has used up
// its share of numbers. A later subject of the same table belongs to another tenant. The rule set gets a number,
// because the other tenant pays for it, too.
func TestSharedTableIsNotClosedByATenantAboveItsShare(t *testing.T) {
	const size = 16
	now := time.Unix(1_795_000_000, 0)
	sets := ruleset.New(ruleset.Config{Size: size, Now: func() time.Time { return now }})
	e := New(Config{Tenant: byNamespace, RuleSets: sets})
	const noisy, first, second = identity.MinCluster, identity.MinCluster + 1, identity.MinCluster + 2
	c := Change{
		AddIdentities: []peer.Identity{labelled(t, noisy, "greedy", "noisy")}, AddSubjects: []identity.Numeric{noisy},
	}
	for i := range 2 * size {
		o := asks(t, "greedy", fmt.Sprint(i), fmt.Sprint("k", i), fmt.Sprint("n", i, ".example"))
		o.Specs[0].Subject = exists("noisy")
		c.UpsertPolicies = append(c.UpsertPolicies, o)
	}
	apply(t, e, c)
	every := asks(t, "", "p", "k", "n.example")
	every.Specs[0].Subject = selector.Selector{}
	apply(t, e, Change{UpsertPolicies: []policy.Object{every}})
	for n, ns := range map[identity.Numeric]string{first: "greedy", second: "small"} {
		apply(t, e, Change{AddIdentities: []peer.Identity{labelled(t, n, ns)}})
	}
	apply(t, e, Change{AddSubjects: []identity.Numeric{first}})
	apply(t, e, Change{AddSubjects: []identity.Numeric{second}})
	for range 3 { // the numbers that are withdrawn from the greedy tenant become free after a grace period
		now = now.Add(ruleset.Grace)
		sets.Expire()
		apply(t, e, Change{})
	}
	for _, n := range []identity.Numeric{first, second} {
		b, _ := e.Bound(n, policytable.Egress)
		if r := b.Table.Rules[0]; r.Action != policytable.Redirect || r.RuleSet == 0 {
			t.Errorf("subject %d: the rule %+v, want a number", n, r)
		}
	}
}

// TestTenantPaysForNoTablesOfOthers: all tenants whose subjects use a table pay for it. A tenant stops paying when
// the last of its subjects leaves the table, or when the namespace moves to another tenant.
func TestTenantPaysForNoTablesOfOthers(t *testing.T) {
	now := time.Unix(1_795_000_000, 0)
	sets := ruleset.New(ruleset.Config{Size: 16, Now: func() time.Time { return now }})
	moved := false
	e := New(Config{RuleSets: sets, Tenant: func(ns string) (shares.Tenant, int) {
		if moved {
			ns += "-moved"
		}
		return byNamespace(ns)
	}})
	every := asks(t, "", "p", "k", "n.example")
	every.Specs[0].Subject = selector.Selector{}
	apply(t, e, Change{UpsertPolicies: []policy.Object{every}})
	const first, second = identity.MinCluster, identity.MinCluster + 1
	for i, ns := range []string{"one", "two"} {
		n := identity.MinCluster + identity.Numeric(i)
		apply(t, e, Change{AddIdentities: []peer.Identity{labelled(t, n, ns)}, AddSubjects: []identity.Numeric{n}})
	}
	number := func(n identity.Numeric) policytable.RuleSet {
		b, _ := e.Bound(n, policytable.Egress)
		for _, r := range b.Table.Rules {
			if r.Action == policytable.Redirect {
				return r.RuleSet
			}
		}
		return 0
	}
	payers := func() (out []string) {
		for _, u := range sets.Usage()[0].Tenants {
			out = append(out, u.Tenant.Name())
		}
		return out
	}
	n := number(first)
	if got := payers(); n == 0 || n != number(second) || !slices.Equal(got, []string{"one", "two"}) {
		t.Fatalf("numbers %d and %d, payers %v", n, number(second), got)
	}
	apply(t, e, Change{RemoveSubjects: []identity.Numeric{first}})
	if got := payers(); number(second) != n || !slices.Equal(got, []string{"two"}) {
		t.Errorf("without the first subject: number %d, want %d; payers %v, want two", number(second), n, got)
	}
	moved = true
	e.TenantsChanged()
	if got := payers(); number(second) != n || !slices.Equal(got, []string{"two-moved"}) {
		t.Errorf("in another tenant: number %d, want %d; payers %v, want two-moved", number(second), n, got)
	}
	apply(t, e, Change{RemoveSubjects: []identity.Numeric{second}})
	if got := payers(); !slices.Equal(got, []string{"two-moved"}) {
		t.Errorf("without subjects: payers %v, want two-moved until the number is free", got)
	}
	now = now.Add(ruleset.Grace)
	sets.Expire()
	if got := payers(); len(got) > 0 {
		t.Errorf("without subjects, after the grace: payers %v", got)
	}
}

// TestOnlyQueriesForEveryNamePassWithoutTheProxy: while the DNS proxy does not run, only queries that a rule for
// every name redirects pass; with PassWithoutDNSProxy all queries pass. The structure hash of a table depends on the
// setting, so that a datapath replaces the table when the setting has changed.
func TestOnlyQueriesForEveryNamePassWithoutTheProxy(t *testing.T) {
	const subject = identity.MinCluster
	structures := make(map[[32]byte]bool)
	for _, c := range []struct {
		names []string
		pass  bool
		want  bool
	}{
		{[]string{"a.example"}, false, false},
		{[]string{"a.example"}, true, true},
		{[]string{"a.example", "*"}, false, true},
		{[]string{"*."}, true, true},
	} {
		e := New(Config{PassWithoutDNSProxy: c.pass})
		apply(t, e, Change{
			AddIdentities: []peer.Identity{labelled(t, subject, "a")}, AddSubjects: []identity.Numeric{subject},
			UpsertPolicies: []policy.Object{asks(t, "a", "p", "x", c.names...)},
		})
		l := e.subjects[subject].bound[policytable.Egress]
		structures[l.structure()] = true
		if r := l.table.Rules[0]; r.RuleSet == 0 || r.PassesWithoutProxy != c.want {
			t.Errorf("%v, pass %t: %+v", c.names, c.pass, r)
		}
	}
	if len(structures) != 4 {
		t.Errorf("%d structures, want 4", len(structures))
	}
	sets := ruleset.New(ruleset.Config{Store: func([]ruleset.Change) error { return errors.ErrUnsupported }})
	e := New(Config{RuleSets: sets, PassWithoutDNSProxy: true})
	apply(t, e, Change{
		AddIdentities: []peer.Identity{labelled(t, subject, "a")}, AddSubjects: []identity.Numeric{subject},
		UpsertPolicies: []policy.Object{asks(t, "a", "p", "x", "*")},
	})
	if r := e.subjects[subject].bound[policytable.Egress].table.Rules[0]; r.RuleSet != 0 || r.PassesWithoutProxy {
		t.Errorf("a set without a number: %+v, want a rule by which nothing passes", r)
	}
}

// TestWithoutDNSProxyTablesNameNoSet: with WithoutDNSProxy, tables refer to no rule sets. So a DNS proxy that runs
// nevertheless cannot evaluate rules that this service reports as not enforced.
func TestWithoutDNSProxyTablesNameNoSet(t *testing.T) {
	const subject = identity.MinCluster
	for _, without := range []bool{false, true} {
		sets := ruleset.New(ruleset.Config{})
		e := New(Config{RuleSets: sets, WithoutDNSProxy: without, PassWithoutDNSProxy: true})
		apply(t, e, Change{
			AddIdentities:  []peer.Identity{labelled(t, subject, "a"), labelled(t, subject+1, "b", "x")},
			AddSubjects:    []identity.Numeric{subject},
			UpsertPolicies: []policy.Object{asks(t, "a", "p", "x", "a.example"), asks(t, "a", "q", "x", "b.example")},
		})
		l := e.subjects[subject].bound[policytable.Egress]
		if len(l.unions) == 0 || l.structure() == l.program.Hash {
			t.Errorf("without a proxy %t: %d unions, and a structure of the program alone", without, len(l.unions))
		}
		r := l.table.Rules[0]
		if r.Action != policytable.Redirect || (r.RuleSet == 0) != without || r.PassesWithoutProxy == without {
			t.Errorf("without a proxy %t: %+v", without, r)
		}
		if n := sets.Number(l.program.Set(1).Digest()); (n == 0) != without {
			t.Errorf("without a proxy %t: the set has the number %d", without, n)
		}
	}
}

// TestUnionsTakeBoundedMemory: two policies of one megabyte would need a thousand unions of one megabyte each. Only
// the unions that fit into the tenant's share are built. At other ports, the rule set of the first policy alone
// applies. Another tenant gets its union.
func TestUnionsTakeBoundedMemory(t *testing.T) {
	const limit, ports = 16 << 20, 1000
	now := time.Unix(1_795_000_000, 0)
	sets := ruleset.New(ruleset.Config{Bytes: limit, Now: func() time.Time { return now }})
	e := New(Config{Tenant: byNamespace, RuleSets: sets})
	var names []string
	for i := range 4000 {
		names = append(names, fmt.Sprintf("%s.%s.%s.n%d.example", strings.Repeat("a", 60), strings.Repeat("b", 60),
			strings.Repeat("c", 60), i))
	}
	long := asks(t, "greedy", "long", "x", names...)
	long.Specs[0].Rules[0].Ports = []rule.Port{{Range: port.Whole(port.UDP)}}
	long.Specs[0].Rules[0].Seal()
	many := asks(t, "greedy", "many", "x", "other.example")
	many.Specs[0].Rules = nil
	for i := range ports {
		r := asks(t, "greedy", "many", "x", fmt.Sprint("p", i, ".example")).Specs[0].Rules[0]
		r.Ports = []rule.Port{{Range: port.Ports(port.UDP, uint16(1000+i), uint16(1000+i))}}
		many.Specs[0].Rules = append(many.Specs[0].Rules, r.Seal())
	}
	const greedy, small, both = identity.MinCluster, identity.MinCluster + 1, identity.MinCluster + 2
	apply(t, e, Change{
		AddIdentities: []peer.Identity{
			labelled(t, greedy, "greedy"), labelled(t, small, "small"), labelled(t, both, "b", "x", "y"),
		},
		AddSubjects:    []identity.Numeric{greedy, small},
		UpsertPolicies: []policy.Object{long, many},
	})
	level := func() {
		now = now.Add(shares.LevelInterval)
		apply(t, e, Change{})
	}
	level()
	apply(t, e, Change{UpsertPolicies: []policy.Object{
		asks(t, "small", "one", "x", "one.example"), asks(t, "small", "two", "y", "two.example"),
	}})
	level()
	joint := func(n identity.Numeric) (count, size int) {
		l := e.subjects[n].bound[policytable.Egress]
		for i := range l.table.Rules {
			number := uint16(i + 1)
			if len(l.program.Members(number)) > 1 {
				count, size = count+1, size+l.program.Set(number).Size()
			}
		}
		return count, size
	}
	if count, size := joint(greedy); count < 3 || size > limit {
		t.Errorf("the greedy tenant has %d unions of %d bytes, want some within %d bytes", count, size, limit)
	}
	if count, _ := joint(small); count != 1 {
		t.Errorf("the other tenant has %d unions, want 1", count)
	}
	// At every port, the packets are redirected, with a rule set that allows no more than the union.
	l := e.subjects[greedy].bound[policytable.Egress]
	for i := range ports {
		q := port.At(port.UDP, uint16(1000+i))
		v, err := e.Lookup(greedy, policytable.Egress, both, netip.MustParseAddr("10.0.0.9"), q)
		if err != nil || v.Action != policytable.Redirect {
			t.Fatalf("port %d: %+v, %v", 1000+i, v, err)
		}
		for _, p := range l.program.Set(v.Rule).DNS {
			if own := fmt.Sprint("p", i, ".example."); p.String() != own && !strings.Contains(p.String(), ".n") {
				t.Fatalf("port %d allows %s", 1000+i, p)
			}
		}
	}
	// While the shares stay the same, the engine does not recompile tables.
	level()
	tables := e.Counters().Tables
	for range 3 {
		level()
	}
	if n := e.Counters().Tables; n != tables {
		t.Errorf("%d tables were compiled without a change", n-tables)
	}
	// The memory of removed unions can be used again.
	apply(t, e, Change{DeletePolicies: []policy.Key{long.Key, many.Key}})
	now = now.Add(ruleset.Grace)
	sets.Expire()
	for _, u := range sets.Usage()[1].Tenants {
		if u.Tenant.Name() == "greedy" {
			t.Errorf("after the policies are deleted, the tenant uses %+v", u)
		}
	}
}
