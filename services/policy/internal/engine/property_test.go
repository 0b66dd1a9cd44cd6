// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/table"
	"github.com/sluice-net/sluice/services/policy/internal/test/scenario"
)

// disagreement compares the tables with the naive evaluation. It also checks that the number in the verdict belongs
// to the deciding rule.
func disagreement(e *Engine, n *naive, q scenario.Question) string {
	want := n.evaluate(q)
	got, err := e.Lookup(q.Subject, q.Direction, q.Peer, q.Addr, q.Point)
	if err != nil {
		return err.Error()
	}
	if got.Action != want.action || got.Proxy != want.proxy || (got.Rule != 0) != (want.rule != nil) {
		return fmt.Sprintf("the table gives %+v, the rules %s %s by %+v", got, want.action, want.proxy, want.rule)
	}
	if want.action == policytable.Redirect {
		why, _ := disunion(e, want, q, got.Rule)
		return why
	}
	if want.rule != nil {
		b, _ := e.Bound(q.Subject, q.Direction)
		if !slices.Contains(b.Sources[got.Rule-1], want.rule.Source) {
			return fmt.Sprintf("rule %d is %v, not %v", got.Rule, b.Sources[got.Rule-1], want.rule.Source)
		}
	}
	return ""
}

// disunion compares the rule set of a redirect rule with the union of the rules that match. exact reports whether the
// set must be the whole union. It may be a part of the union if neither the identity side nor the address side of the
// table has all members.
func disunion(e *Engine, want answer, q scenario.Question, number uint16) (why string, exact bool) {
	l := e.subjects[q.Subject].bound[q.Direction]
	set := l.program.Set(number)
	all, byIdentity, byAddress := false, true, true
	var content []*layer7.Rules
	sources := make(map[policytable.Source]bool)
	for _, m := range want.members {
		byIdentity, byAddress = byIdentity && m.byIdentity, byAddress && m.byAddress
		sources[m.Source] = true
		if m.Action == policytable.Allow {
			all = true
		} else {
			content = append(content, m.Layer7)
		}
	}
	exact = byIdentity || byAddress
	joins := false
	union := layer7.Union(want.proxy, all, content...)
	if exact && set.Digest() != union.Digest() {
		return fmt.Sprintf("rule %d allows %t %q, the rules allow %t %q",
			number, set.All, set.Content(), union.All, union.Content()), exact
	}
	if set.All && !union.All {
		return fmt.Sprintf("rule %d allows everything, the rules allow %q", number, union.Content()), exact
	}
	for _, src := range e.boundSources(q)[number-1] {
		joins = joins || sources[src]
		if !l.coarse && !sources[src] {
			return fmt.Sprintf("rule %d joins %v, which does not match", number, src), exact
		}
	}
	if !joins {
		return fmt.Sprintf("rule %d is %v, none of which matches", number, e.boundSources(q)[number-1]), exact
	}
	if n := l.table.Rules[number-1].RuleSet; n == 0 || n != e.sets.Number(set.Digest()) {
		return fmt.Sprintf("rule %d has the number %d", number, n), exact
	}
	return "", exact
}

// boundSources returns the source locations of the rules of the table that answers a query.
func (e *Engine) boundSources(q scenario.Question) [][]policytable.Source {
	b, _ := e.Bound(q.Subject, q.Direction)
	return b.Sources
}

// TestRulesOfSeveralPoliciesAreTheUnion: if several policies redirect the same peers and port, a proxy allows each
// request that at least one of the policies allows.
func TestRulesOfSeveralPoliciesAreTheUnion(t *testing.T) {
	t.Parallel()
	w := seeded(t, 52)
	joint, exact, open := 0, 0, 0
	for range runs(t, 400) {
		s := w.Draw()
		for i := range 4 {
			o := w.Policy(fmt.Sprint("more", i))
			s.Objects[o.Key] = o
		}
		e, n := fresh(t, configs[1], s), &naive{configs[1], s}
		for range 300 {
			q, ok := w.Question(s)
			if !ok {
				break
			}
			want := n.evaluate(q)
			if want.action != policytable.Redirect || len(want.members) < 2 {
				continue
			}
			got, err := e.Lookup(q.Subject, q.Direction, q.Peer, q.Addr, q.Point)
			if err != nil {
				t.Fatal(err)
			}
			why, whole := disunion(e, want, q, got.Rule)
			if why != "" {
				t.Fatalf("%+v: %s\n%s", q, why, s)
			}
			joint++
			if whole {
				exact++
			}
			if e.subjects[q.Subject].bound[q.Direction].program.Set(got.Rule).All {
				open++
			}
		}
	}
	t.Logf("%d connections match several rules, %d unions are exact, %d allow everything", joint, exact, open)
	if joint < 100 || exact*10 < joint*8 || open == 0 {
		t.Error("too few connections to compare")
	}
}

// shrink removes parts of the state as long as the disagreement remains.
func shrink(t *testing.T, config Config, s *scenario.State, q scenario.Question) (*scenario.State, string) {
	t.Helper()
	fails := func(s *scenario.State) string {
		e := New(config)
		if err := e.Apply(diff(scenario.NewState(), s)); err != nil {
			return ""
		}
		return disagreement(e, &naive{config, s}, q)
	}
	why := fails(s)
	for again := true; again; {
		again = false
		try := func(c *scenario.State) {
			if w := fails(c); w != "" {
				s, why, again = c, w, true
			}
		}
		for _, k := range scenario.SortedObjects(s.Objects) {
			c := s.Clone()
			delete(c.Objects, k)
			try(c)
		}
		for _, k := range scenario.SortedObjects(s.Objects) {
			for i, spec := range s.Objects[k].Specs {
				for j := range spec.Rules {
					c := s.Clone()
					o := c.Objects[k]
					o.Specs = slices.Clone(o.Specs)
					o.Specs[i].Rules = slices.Delete(slices.Clone(spec.Rules), j, j+1)
					c.Objects[k] = o
					try(c)
					if again {
						break
					}
				}
				if again {
					break
				}
			}
			if again {
				break
			}
		}
		for _, n := range scenario.SortedKeys(s.Identities) {
			if n != q.Subject {
				c := s.Clone()
				delete(c.Identities, n)
				delete(c.Subjects, n)
				maps.DeleteFunc(c.Located, func(_ netip.Addr, m identity.Numeric) bool { return m == n })
				try(c)
			}
		}
		for _, n := range scenario.SortedKeys(s.Names) {
			c := s.Clone()
			delete(c.Names, n)
			try(c)
		}
	}
	return s, why
}

var configs = []Config{
	{Cluster: scenario.Cluster, AllowHost: true},
	{Cluster: scenario.Cluster},
	{Cluster: scenario.Cluster, AllowHost: true, Enforcement: EnforceAlways},
	{Cluster: scenario.Cluster, Enforcement: EnforceNever},
}

func drawConfig(w *scenario.World) Config {
	if w.Chance(70) {
		return configs[0]
	}
	return scenario.Pick(w, configs...)
}

func checkAgreement(t *testing.T, w *scenario.World, config Config, s *scenario.State, e *Engine, questions int) {
	t.Helper()
	n := &naive{config, s}
	for range questions {
		q, ok := w.Question(s)
		if !ok {
			return
		}
		if why := disagreement(e, n, q); why != "" {
			small, again := shrink(t, config, s, q)
			t.Fatalf("%+v, config %+v: %s\nshrunk: %s\n%s", q, config, why, again, small)
		}
	}
}

func TestTablesAgreeWithTheRulesReadDirectly(t *testing.T) {
	t.Parallel()
	const questions = 400
	states := runs(t, 2500) // the same states in each run; make test-random generates more
	w := seeded(t, 1)
	asked := 0
	for range states {
		config := drawConfig(w)
		s := w.Draw()
		checkAgreement(t, w, config, s, fresh(t, config, s), questions)
		if len(s.Subjects) > 0 {
			asked += questions
		}
	}
	t.Logf("%d states, %d questions", states, asked)
}

// TestExplainListsEveryRuleThatMatches: the explanation lists exactly the rules that match in a sequential evaluation,
// and the deciding rule is the first rule that can decide.
func TestExplainListsEveryRuleThatMatches(t *testing.T) {
	t.Parallel()
	w := seeded(t, 51)
	for range runs(t, 300) {
		config := drawConfig(w)
		s := w.Draw()
		e := fresh(t, config, s)
		n := &naive{config, s}
		for range 100 {
			q, ok := w.Question(s)
			if !ok {
				break
			}
			x, err := e.Explain(q.Subject, q.Direction, q.Peer, q.Addr, q.Point)
			if err != nil {
				t.Fatal(err)
			}
			var got, want []string
			for _, m := range x.Matches {
				for _, src := range m.Sources {
					got = append(got, src.String())
				}
			}
			subject := s.Identities[q.Subject]
			for _, r := range n.rules(subject, q.Direction) {
				if n.matches(r, subject, q) {
					want = append(want, r.Source.String())
				}
			}
			if !x.Enforced {
				want = nil
			}
			slices.Sort(got)
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Fatalf("%+v: explained by %v, matching %v\n%s", q, got, want, s)
			}
			if x.Verdict.Rule == 0 {
				continue
			}
			passed := make(map[policytable.Tier]bool)
			for _, m := range x.Matches {
				if m.Rule.Action == policytable.Pass {
					passed[m.Rule.Tier] = true
					continue
				}
				if m.Number < x.Verdict.Rule && m.Rule.Tier == e.tierOf(q, x.Verdict.Rule) && !passed[m.Rule.Tier] {
					t.Fatalf("%+v: rule %d decides, but %d matches", q, x.Verdict.Rule, m.Number)
				}
			}
		}
	}
}

// tierOf returns the tier of the deciding rule of a query.
func (e *Engine) tierOf(q scenario.Question, number uint16) policytable.Tier {
	b, _ := e.Bound(q.Subject, q.Direction)
	return b.Table.Rules[number-1].Tier
}

// canonical describes the result for every peer and address, without numbers that depend on the order of events.
func canonical(e *Engine, s *scenario.State) map[string]string {
	out := make(map[string]string)
	for n := range s.Subjects {
		for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
			b, ok := e.Bound(n, d)
			key := fmt.Sprintf("%d %s", n, d)
			if !ok || b.Table == nil {
				out[key] = fmt.Sprint("bound ", ok)
				continue
			}
			t := b.Table
			// A table in use may still have joint rules that no peer needs any more, which shifts rule numbers. So
			// name the rules by their sources.
			source := func(n uint16, none uint16) any {
				if n == none {
					return nil
				}
				return b.Sources[n-1]
			}
			intervals := func(c policytable.Class) string {
				var out []any
				for _, i := range t.Intervals(c) {
					out = append(out, i.Hi, source(i.Value.Admin(), table.NoAdmin), source(i.Value.Rest(), table.NoRest))
				}
				return fmt.Sprint(out...)
			}
			out[key] = fmt.Sprint(t.Flags, b.Hash)
			for m := range s.Identities {
				w := e.Entry(m)
				class, row := t.Peers[w.IdentityClass]
				if !row {
					class = t.Default[w.Kind]
				}
				out[fmt.Sprintf("%s peer %d", key, m)] = fmt.Sprint(w.Known, w.Kind, w.Scope, row, intervals(class))
			}
			for k := range identity.Kinds {
				out[fmt.Sprintf("%s kind %s", key, k)] = intervals(t.Default[k])
			}
			describe := func(c [identity.PeerScopes]policytable.Class) string {
				return intervals(c[0]) + intervals(c[1]) + intervals(c[2])
			}
			out[key+" elsewhere"] = describe(t.Address)
			t.Prefixes.All(func(p netip.Prefix, c [identity.PeerScopes]policytable.Class) { out[key+" "+p.String()] = describe(c) })
		}
	}
	return out
}

func sameAsFresh(t *testing.T, config Config, s *scenario.State, e *Engine, what string) {
	t.Helper()
	f := fresh(t, config, s)
	got, want := canonical(e, s), canonical(f, s)
	if !maps.Equal(got, want) {
		for k := range want {
			if got[k] != want[k] {
				t.Errorf("%s: %s\n got %s\nwant %s", what, k, got[k], want[k])
			}
		}
		for k := range got {
			if _, ok := want[k]; !ok {
				t.Errorf("%s: extra %s %s", what, k, got[k])
			}
		}
		t.Fatalf("state:\n%s", s)
	}
	gs, ws := e.Size(), f.Size()
	// Classes that no peer uses stay in a live table until it is replaced, because packets in flight may still refer
	// to them. The same applies to joint rules.
	for _, p := range []*Size{&gs, &ws} {
		p.Classes, p.Nodes, p.Intervals, p.Rules = 0, 0, 0, 0
	}
	if gs != ws {
		t.Fatalf("%s: sizes %+v, from scratch %+v\n%s", what, gs, ws, s)
	}
}

// TestIncrementalEqualsFromScratchAfterEachOfManyChanges proves INV-63.
func TestIncrementalEqualsFromScratchAfterEachOfManyChanges(t *testing.T) {
	t.Parallel()
	n := runs(t, 40)
	w := seeded(t, 3)
	for run := range n {
		config := drawConfig(w)
		s := w.Draw()
		e := fresh(t, config, s)
		for step := range 40 {
			next := s.Clone()
			for range 1 + w.IntN(3) {
				w.Mutate(next)
			}
			if err := e.Apply(diff(s, next)); err != nil {
				t.Fatalf("run %d step %d: %v", run, step, err)
			}
			s = next
			sameAsFresh(t, config, s, e, fmt.Sprintf("run %d step %d", run, step))
			checkAgreement(t, w, config, s, e, 30)
		}
	}
}

func TestEveryStateIsReachedFromEveryOther(t *testing.T) {
	t.Parallel()
	w := seeded(t, 5)
	states := []*scenario.State{scenario.NewState()}
	for range 14 {
		states = append(states, w.Draw())
	}
	for i, a := range states {
		for j, b := range states {
			e := fresh(t, configs[0], a)
			if err := e.Apply(diff(a, b)); err != nil {
				t.Fatal(err)
			}
			sameAsFresh(t, configs[0], b, e, fmt.Sprintf("%d to %d", i, j))
		}
	}
}

func TestNothingIsLeftAfterEverythingWasRemoved(t *testing.T) {
	t.Parallel()
	w := seeded(t, 7)
	for range 100 {
		s := w.Draw()
		e := fresh(t, configs[0], s)
		if err := e.Apply(diff(s, scenario.NewState())); err != nil {
			t.Fatal(err)
		}
		if size := e.Size(); size != (Size{}) {
			t.Fatalf("left: %+v", size)
		}
		if n := len(e.selectors.byLabel) + len(e.selectors.residual) + len(e.byLabel) + len(e.byNumber) + len(e.byNamespace) + len(e.clusterwide); n != 0 {
			t.Fatalf("%d index entries left", n)
		}
		for k := range e.wide {
			if len(e.wide[k]) != 0 {
				t.Fatalf("%d wide tables of kind %v left", len(e.wide[k]), k)
			}
		}
	}
}

func describePrefixes(t *table.Table) string {
	all := make(map[netip.Prefix][identity.PeerScopes]policytable.Class)
	t.Prefixes.All(func(p netip.Prefix, v [identity.PeerScopes]policytable.Class) { all[p] = v })
	return fmt.Sprint(all) // in the order of the keys
}

func TestInputOrderDoesNotChangeTables(t *testing.T) {
	t.Parallel()
	w := seeded(t, 9)
	for range 100 {
		s := w.Draw()
		a := fresh(t, configs[0], s)
		c := diff(scenario.NewState(), s)
		w.Shuffle(len(c.UpsertPolicies), func(i, j int) {
			c.UpsertPolicies[i], c.UpsertPolicies[j] = c.UpsertPolicies[j], c.UpsertPolicies[i]
		})
		w.Shuffle(len(c.AddIdentities), func(i, j int) {
			c.AddIdentities[i], c.AddIdentities[j] = c.AddIdentities[j], c.AddIdentities[i]
		})
		b := New(configs[0])
		if err := b.Apply(c); err != nil {
			t.Fatal(err)
		}
		for n := range s.Subjects {
			for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
				x, _ := a.Bound(n, d)
				y, _ := b.Bound(n, d)
				if x.Hash != y.Hash {
					t.Fatalf("subject %d %s: %x and %x\n%s", n, d, x.Hash, y.Hash, s)
				}
				if x.Table == nil {
					continue
				}
				// The content must be equal, too, so that a reader that has kept a table finds it unchanged after a
				// restart of the service.
				if !slices.Equal(x.Table.Nodes, y.Table.Nodes) || !slices.Equal(x.Table.Classes, y.Table.Classes) || x.Table.Header != y.Table.Header {
					t.Fatalf("subject %d %s: the same table is written in two ways\n%s", n, d, s)
				}
				for m := range s.Identities {
					if x.Table.ClassOf(a.Entry(m)) != y.Table.ClassOf(b.Entry(m)) {
						t.Fatalf("subject %d %s: identity %d has two classes\n%s", n, d, m, s)
					}
				}
				if describePrefixes(x.Table) != describePrefixes(y.Table) {
					t.Fatalf("subject %d %s: two sets of prefixes\n%s", n, d, s)
				}
			}
		}
	}
}

func TestIntervalsAreMinimalAndTotal(t *testing.T) {
	t.Parallel()
	w := seeded(t, 11)
	for range 100 {
		e := fresh(t, configs[0], w.Draw())
		for _, l := range e.tables {
			for c := range l.table.Classes {
				list := l.table.Intervals(policytable.Class(c))
				if list[len(list)-1].Hi != 1<<32-1 {
					t.Fatalf("list ends at %x", list[len(list)-1].Hi)
				}
				for i := 1; i < len(list); i++ {
					if list[i].Hi <= list[i-1].Hi || list[i].Value == list[i-1].Value {
						t.Fatalf("intervals %v and %v", list[i-1], list[i])
					}
				}
			}
		}
	}
}

// TestRowsAndPrefixesAreMinimal: a table has no row and no prefix that could be removed without changing verdicts.
func TestRowsAndPrefixesAreMinimal(t *testing.T) {
	t.Parallel()
	w := seeded(t, 12)
	rows, blocks := 0, 0
	for range runs(t, 100) {
		s := w.Draw()
		e := fresh(t, configs[0], s)
		for range 3 { // the table stays minimal after changes
			for _, l := range e.tables {
				for n, class := range l.table.Peers {
					rows++
					if class == l.table.Default[e.byNumber[n].kind] {
						t.Fatalf("the row of class %d equals the default\n%s", n, s)
					}
				}
				l.table.Prefixes.All(func(p netip.Prefix, c [identity.PeerScopes]policytable.Class) {
					blocks++
					outer := l.table.Address
					for bits := p.Bits() - 1; bits >= 0; bits-- {
						around, _ := p.Addr().Prefix(bits)
						if v, ok := l.table.Prefixes.Exact(around); ok {
							outer = v
							break
						}
					}
					if c == outer {
						t.Fatalf("prefix %s equals the enclosing prefix\n%s", p, s)
					}
				})
			}
			next := s.Clone()
			w.Mutate(next)
			w.Mutate(next)
			if err := e.Apply(diff(s, next)); err != nil {
				t.Fatal(err)
			}
			s = next
		}
	}
	if rows == 0 || blocks == 0 {
		t.Fatalf("%d rows, %d prefixes", rows, blocks)
	}
}

func TestADenyNeverAllowsMore(t *testing.T) {
	t.Parallel()
	w := seeded(t, 13)
	for range 200 {
		s := w.Draw()
		for k, o := range s.Objects { // a Pass rule could take precedence over the deny
			for i := range o.Specs {
				o.Specs[i].Rules = slices.DeleteFunc(o.Specs[i].Rules, func(r *rule.Rule) bool { return r.Action == policytable.Pass })
			}
			s.Objects[k] = o
		}
		more := s.Clone()
		o := w.Policy("extra")
		for i := range o.Specs {
			for j, r := range o.Specs[i].Rules {
				d := *r
				d.Action, d.Proxy = policytable.Deny, policytable.NoProxy
				o.Specs[i].Rules[j] = d.Seal()
			}
		}
		more.Objects[policy.Key{Kind: "extra"}] = o
		before, after := fresh(t, configs[1], s), fresh(t, configs[1], more)
		for range 300 {
			q, ok := w.Question(s)
			if !ok {
				break
			}
			x, _ := before.Lookup(q.Subject, q.Direction, q.Peer, q.Addr, q.Point)
			y, _ := after.Lookup(q.Subject, q.Direction, q.Peer, q.Addr, q.Point)
			if x.Action == policytable.Deny && y.Action != policytable.Deny {
				t.Fatalf("%+v: %+v before, %+v after the deny\n%s", q, x, y, more)
			}
		}
	}
}

func TestAPolicyOfOneSubjectLeavesTheTablesOfOthers(t *testing.T) {
	t.Parallel()
	w := seeded(t, 15)
	for range 200 {
		s := w.Draw()
		e := fresh(t, configs[0], s)
		tables := make(map[string]*table.Table)
		for n := range s.Subjects {
			for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
				b, _ := e.Bound(n, d)
				tables[fmt.Sprint(n, d)] = b.Table
			}
		}
		o := w.Policy("new")
		compiled := e.Counters().Tables
		if err := e.Apply(Change{UpsertPolicies: []policy.Object{o}}); err != nil {
			t.Fatal(err)
		}
		concerned := 0
		for n := range s.Subjects {
			hit := slices.ContainsFunc(o.Specs, func(spec rule.Spec) bool { return e.selects(&spec, e.subjects[n]) })
			if hit {
				concerned++
				continue
			}
			for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
				b, _ := e.Bound(n, d)
				if b.Table != tables[fmt.Sprint(n, d)] {
					t.Fatalf("subject %d %s got another table by a policy that does not select it", n, d)
				}
			}
		}
		if n := e.Counters().Tables - compiled; n > 2*concerned {
			t.Fatalf("%d tables compiled for %d subjects", n, concerned)
		}
	}
}

func TestAnUnknownPeerIsDeniedWhatAnyKnownPeerIsDeniedBySelectors(t *testing.T) {
	t.Parallel()
	w := seeded(t, 17)
	for range 300 {
		s := w.Draw()
		for k, o := range s.Objects { // only rules with selectors: addresses have other classes anyway
			if k.Kind != "Normal" {
				delete(s.Objects, k)
				continue
			}
			for i := range o.Specs {
				o.Specs[i].Rules = slices.DeleteFunc(o.Specs[i].Rules, func(r *rule.Rule) bool {
					return r.Peers.Any || len(r.Peers.Networks)+len(r.Peers.Groups)+len(r.Peers.Names) > 0
				})
			}
			s.Objects[k] = o
		}
		e := fresh(t, configs[1], s)
		for range 100 {
			q, ok := w.Question(s)
			if !ok {
				break
			}
			known, _ := e.Lookup(q.Subject, q.Direction, q.Peer, q.Addr, q.Point)
			unknown, _ := e.Lookup(q.Subject, q.Direction, scenario.Nobody, q.Addr, q.Point)
			if known.Action == policytable.Deny && unknown.Action != policytable.Deny {
				t.Fatalf("%+v: known %+v, unknown %+v\n%s", q, known, unknown, s)
			}
			if unknown.Action == policytable.Deny && unknown.Reason != table.ByUnknownIdentity {
				t.Fatalf("%+v: unknown peer denied for reason %d", q, unknown.Reason)
			}
		}
	}
}
