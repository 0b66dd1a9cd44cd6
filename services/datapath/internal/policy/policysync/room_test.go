// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/subscription"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

// TestRefusedTableClosesItsDirectionUntilThereIsRoom: the new table may deny what the former one
// allows. The other direction gets its new table.
//
// INV-54
func TestRefusedTableClosesItsDirectionUntilThereIsRoom(t *testing.T) {
	states := testStates()
	for i, from := range states[1:] {
		for j, to := range states {
			k := scene()
			a, s := start(t, k), newService(1)
			if _, err := a.load(s.snapshot(from)); err != nil {
				t.Fatal(err)
			}
			qs := questions(k)
			both := maps.Clone(from.identities)
			maps.Copy(both, to.identities)
			if _, err := a.apply(t.Context(), s.change(state{both, from.policies})); err != nil {
				t.Fatal(err)
			}
			before, epochs := k.answers(qs), k.epochs()
			k.maxTables = len(k.tables)
			closed := map[uint32][2]bool{}
			anyClosed := false
			for subject, list := range to.policies {
				var c [2]bool
				for d, p := range list.sides() {
					_, there := s.tables[p.text()]
					c[d] = p.enforce && !there
				}
				closed[subject] = c
				anyClosed = anyClosed || c[0] || c[1]
			}
			want := state{both, to.policies}.answers(k, qs)
			for n, q := range qs {
				if closed[k.endpoints[q.slot].Identity][q.d] {
					want[n] = false
				}
			}
			oldOrNew(t, k, qs, before, want)
			nacks, err := a.apply(t.Context(), s.change(state{both, to.policies}))
			if err != nil {
				t.Fatalf("%d to %d: %v", i, j, err)
			}
			same(t, fmt.Sprintf("%d to %d: without capacity", i, j), qs, k.answers(qs), want)
			evaluatedAgain(t, k, qs, before, want, epochs)
			for subject, c := range closed {
				said := slices.ContainsFunc(nacks, func(n policystream.Nack) bool { return n.Subject == subject })
				if said != (c[0] || c[1]) {
					t.Errorf("%d to %d: nacks %+v for subject %d, refused %v", i, j, nacks, subject, c)
				}
				err := a.Await(t.Context(), subject)
				if refused := errors.Is(err, nodetable.ErrNoCapacity); refused != (c[0] || c[1]) {
					t.Errorf("%d to %d: another endpoint of %d: %v", i, j, subject, err)
				}
			}
			// The verdicts of an identity that is added meanwhile change only in complete tables.
			after := maps.Clone(both)
			after[306] = 5
			want = state{after, to.policies}.answers(k, qs)
			for n, q := range qs {
				if closed[k.endpoints[q.slot].Identity][q.d] {
					want[n] = false
				}
			}
			oldOrNew(t, k, qs, k.answers(qs), want)
			if _, err := a.apply(t.Context(), s.change(state{after, to.policies})); err != nil {
				t.Fatalf("%d to %d: %v", i, j, err)
			}
			k.after = nil
			if !anyClosed {
				continue
			}
			if st := a.Status(); len(st.Refusals) == 0 || !strings.Contains(st.Refusals[0], "needed") || st.Revision == s.seq {
				t.Errorf("%d to %d: status %+v", i, j, st)
			}
			for _, n := range nacks {
				if !strings.Contains(n.Reason, "map tables: 1 needed, 0 free") {
					t.Errorf("%d to %d: reason %q has no numbers", i, j, n.Reason)
				}
			}
			k.maxTables = 100
			if err := a.again(t.Context()); !errors.Is(err, subscription.ErrAnew) {
				t.Fatalf("%d to %d: with capacity again: %v", i, j, err)
			}
			want = state{after, to.policies}.answers(k, qs)
			same(t, "with capacity", qs, k.answers(qs), want)
			if _, err := a.load(newService(5).snapshot(state{after, to.policies})); err != nil {
				t.Fatal(err)
			}
			nothingLeft(t, k, state{after, to.policies})
			if st := a.Status(); len(st.Refusals) != 0 {
				t.Errorf("%d to %d: still refused: %q", i, j, st.Refusals)
			}
		}
	}
}

// TestPrefixWithoutRoomClosesWhatItWouldDeny: without the prefix of a deny rule, a table would
// allow its addresses, so the direction is isolated. Without the prefix of an allow rule, a table
// denies them, and stays in use.
func TestPrefixWithoutRoomClosesWhatItWouldDeny(t *testing.T) {
	ten, block := netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.0.0.0/24")
	other := netip.MustParsePrefix("192.0.2.0/24")
	allow, deny := policytable.Allow, policytable.Deny
	for _, v := range []struct {
		name   string
		has    map[netip.Prefix]policytable.Action
		denies bool
	}{
		{"a denial", map[netip.Prefix]policytable.Action{ten: allow, other: deny}, true},
		{"an allowance", map[netip.Prefix]policytable.Action{ten: deny, other: allow}, false},
	} {
		t.Run(v.name, func(t *testing.T) {
			k := scene()
			a, s := start(t, k), newService(1)
			p := testPolicy{enforce: true, prefixes: v.has}
			if _, err := a.load(s.snapshot(state{
				map[uint32]props{300: 1, 301: 2}, map[uint32]testPolicies{300: {p, testPolicy{}}, 301: {}},
			})); err != nil {
				t.Fatal(err)
			}
			qs := questions(k)
			before := k.answers(qs)
			var id policytable.ID
			for id = range a.model.tables {
			}
			classes := a.model.tables[id].content.Prefixes[other] // prefix block gets the verdict of the other one
			k.maxPrefixes = len(a.model.tables[id].content.Prefixes)
			step := func() policytable.Message {
				s.seq++
				return policytable.Message{Incarnation: s.run, Seq: s.seq, Steps: []policytable.Step{
					policytable.SetPrefix{Table: id, Prefix: block, Classes: classes}, policytable.Barrier{PolicyRevision: s.seq},
				}}
			}
			nacks, err := a.apply(t.Context(), step())
			if err != nil {
				t.Fatal(err)
			}
			closed := 0
			for i, got := range k.answers(qs) {
				if q := qs[i]; q.d == policytable.Egress && k.endpoints[q.slot].Identity == 300 && before[i] && !got {
					closed++
				} else if got && !before[i] {
					t.Fatalf("%+v is allowed", q)
				}
			}
			if (len(nacks) > 0) != v.denies || (closed > 0) != v.denies {
				t.Errorf("nacks %+v, %d more questions are denied", nacks, closed)
			}
			k.maxPrefixes = 100
			if err := a.again(t.Context()); v.denies && !errors.Is(err, subscription.ErrAnew) {
				t.Errorf("with capacity: %v", err)
			}
			if len(k.tables) != 1 {
				t.Fatalf("%d tables", len(k.tables))
			}
			for _, c := range k.tables {
				if len(c.Prefixes) != 3 {
					t.Errorf("prefixes %v", c.Prefixes)
				}
			}
			if b := k.endpoints[1]; b.Egress < nodetable.First {
				t.Errorf("with capacity slot 1 has table %d", b.Egress)
			}
		})
	}
}

func TestRefusalNamesThePolicyWithTheLargestShare(t *testing.T) {
	states := testStates()
	k := scene()
	a, s := start(t, k), newService(1)
	if _, err := a.load(s.snapshot(states[0])); err != nil {
		t.Fatal(err)
	}
	k.maxTables = 0
	nacks, err := a.apply(t.Context(), s.change(states[6]))
	if err != nil || len(nacks) < 2 || !strings.Contains(nacks[1].Reason, "most of its 40 rules are from Test policy of 300: 40") {
		t.Errorf("nacks %+v, %v", nacks, err)
	}
}

// complete reports for the directions of each subject whether its table has all rows and prefixes.
func (k *fakeKernel) complete(a *Applier) map[uint32][2]bool {
	out := map[uint32][2]bool{}
	for subject, list := range a.model.binds {
		var c [2]bool
		for d, b := range list {
			c[d] = b.table == nil || b.table.kernel != nil && len(b.table.missing) == 0 && b.table.part == nil
		}
		out[subject] = c
	}
	return out
}

// limited fails if a direction with a complete table has other than the expected verdicts, or an
// incomplete one allows more. It returns the number of incomplete directions.
func limited(t *testing.T, what string, k *fakeKernel, a *Applier, qs []question, want []bool) (lacking int) {
	t.Helper()
	complete := k.complete(a)
	for i, got := range k.answers(qs) {
		q := qs[i]
		whole := complete[k.endpoints[q.slot].Identity][q.d]
		if got && !want[i] || got != want[i] && whole {
			t.Fatalf("%s: %+v is %v, want %v; its table is complete: %v", what, q, got, want[i], whole)
		}
	}
	for _, c := range complete {
		for _, whole := range c {
			if !whole {
				lacking++
			}
		}
	}
	return lacking
}

// TestRowWithoutRoomConcernsTheTableThatLacksIt proves INV-53: identity 306 has no row in the tables of 300, and a row
// in the tables of 301.
func TestRowWithoutRoomConcernsTheTableThatLacksIt(t *testing.T) {
	rule := func(bit uint8, action policytable.Action) testRule { return testRule{bit, false, action, 0, lastTop} }
	allow, deny := policytable.Allow, policytable.Deny
	first := state{map[uint32]props{300: 1, 301: 2, 302: 0}, map[uint32]testPolicies{
		300: {
			testPolicy{enforce: true, rules: []testRule{rule(0, allow), rule(1, allow), rule(2, allow)}},
			testPolicy{enforce: true, rules: []testRule{rule(0, deny), rule(1, deny), rule(2, deny), rule(8, allow)}},
		},
		301: {
			testPolicy{enforce: true, rules: []testRule{rule(2, allow)}},
			testPolicy{enforce: true, rules: []testRule{rule(2, deny), rule(8, allow)}},
		},
	}}
	k := scene()
	a, s := start(t, k), newService(1)
	if _, err := a.load(s.snapshot(first)); err != nil {
		t.Fatal(err)
	}
	qs := questions(k)
	next := state{maps.Clone(first.identities), first.policies}
	next.identities[306] = 4 // of a new class
	k.maxTableRows = 2       // the tables of 300 have that many, the tables of 301 none
	want := next.answers(k, qs)
	if _, err := a.apply(t.Context(), s.change(next)); err != nil {
		t.Fatal(err)
	}
	if _, known := k.entries[306]; !known {
		t.Error("identity 306 is unknown to all tables, although the tables of 301 have its row")
	}
	if n := limited(t, "without capacity", k, a, qs, want); n != 2 {
		t.Errorf("%d directions lack a row, want the directions of 300", n)
	}
	unknown := state{first.identities, first.policies}.answers(k, qs)
	for i, got := range k.answers(qs) {
		if q := qs[i]; k.endpoints[q.slot].Identity == 300 && q.peer == 306 && got != unknown[i] {
			t.Errorf("%+v is %v, but %v for an unknown identity", q, got, unknown[i])
		}
	}
	if st := a.Status(); st.Waiting != 0 || len(st.Refusals) != 2 {
		t.Errorf("status %+v, want two tables that lack a row", st)
	}
	for range 2 { // the second time another process adopts the tables
		if err := a.again(t.Context()); err != nil {
			t.Fatal(err)
		}
		limited(t, "later", k, a, qs, want)
		writes := k.writes
		a, s = start(t, k), newService(2)
		if _, err := a.load(s.snapshot(next)); err != nil {
			t.Fatal(err)
		}
		if n := limited(t, "after a restart", k, a, qs, want); n != 2 || k.writes != writes {
			t.Errorf("after a restart %d directions lack a row, %d writes", n, k.writes-writes)
		}
	}
	k.maxTableRows = 1000
	if err := a.again(t.Context()); err != nil {
		t.Fatal(err)
	}
	same(t, "with capacity", qs, k.answers(qs), want)
	if st := a.Status(); st.Waiting != 0 || len(st.Refusals) != 0 {
		t.Errorf("status %+v, want nothing missing", st)
	}
	nothingLeft(t, k, next)
}

// TestTablesWithoutRoomForRowsAllowNoMore fills tables in random orders: after every write,
// directions with all rows have the expected verdicts, and the others allow nothing more.
func TestTablesWithoutRoomForRowsAllowNoMore(t *testing.T) {
	states := testStates()
	lacking := 0
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 4))
		from, to := states[1+r.IntN(len(states)-1)], states[1+r.IntN(len(states)-1)]
		k := scene()
		k.maxTableRows = r.IntN(5)
		a, s := start(t, k), newService(seed+1)
		if _, err := a.load(s.snapshot(from)); err != nil {
			t.Fatal(err)
		}
		qs := questions(k)
		name := fmt.Sprintf("seed %d", seed)
		lacking += limited(t, name+", begin", k, a, qs, from.answers(k, qs))
		way := path(from, to)
		for n, next := range way[1:] {
			before, after := way[n].answers(k, qs), next.answers(k, qs)
			epochs, had := k.epochs(), k.answers(qs)
			k.after = func(what string) {
				for i, got := range k.answers(qs) {
					if got && !before[i] && !after[i] {
						t.Fatalf("%s: after %q: %+v is allowed", name, what, qs[i])
					}
				}
			}
			var err error
			if r.IntN(4) == 0 {
				a, s = start(t, k), newService(seed+1000+uint64(n)) //nolint:gosec // small
				_, err = a.load(s.snapshot(next))
			} else {
				_, err = a.apply(t.Context(), s.change(next))
			}
			if err != nil {
				t.Fatal(name, err)
			}
			lacking += limited(t, fmt.Sprintf("%s, change %d", name, n), k, a, qs, after)
			evaluatedAgain(t, k, qs, had, k.answers(qs), epochs)
			if r.IntN(3) == 0 {
				k.maxTableRows = r.IntN(5)
			}
			if err := a.again(t.Context()); err != nil && !errors.Is(err, subscription.ErrAnew) {
				t.Fatal(name, err)
			}
			if a.model == nil { // something recovered: a new stream begins
				s = newService(seed + 2000 + uint64(n)) //nolint:gosec // small
				if _, err := a.load(s.snapshot(next)); err != nil {
					t.Fatal(name, err)
				}
			}
			k.after = nil
		}
		k.maxTableRows = 1000
		if err := a.again(t.Context()); err != nil && !errors.Is(err, subscription.ErrAnew) {
			t.Fatal(name, err)
		}
		if _, err := a.load(newService(seed + 3000).snapshot(to)); err != nil {
			t.Fatal(name, err)
		}
		same(t, name+", with capacity", qs, k.answers(qs), to.answers(k, qs))
		nothingLeft(t, k, to)
	}
	if lacking == 0 {
		t.Error("every table has capacity")
	}
}

// TestTableWithoutASubjectIsolatesWhenARowHasNoRoom: the service has removed subject 300, and its
// endpoints keep their tables. The identity that gets another class is known to all other tables.
func TestTableWithoutASubjectIsolatesWhenARowHasNoRoom(t *testing.T) {
	states := testStates()
	first := state{map[uint32]props{300: 1, 301: 2, 302: 3}, map[uint32]testPolicies{
		300: states[5].policies[300], 301: states[2].policies[301],
	}}
	k := scene()
	a, s := start(t, k), newService(1)
	if _, err := a.load(s.snapshot(first)); err != nil {
		t.Fatal(err)
	}
	given := []policytable.Step{policytable.RemoveSubject{Subject: 300}}
	for _, p := range first.policies[300].sides() {
		id := s.tables[p.text()]
		given = append(given, policytable.RetireTable{Table: id})
		delete(s.tables, p.text())
		delete(s.contents, id)
	}
	given = append(given, policytable.Barrier{PolicyRevision: s.seq + 1})
	if _, err := a.apply(t.Context(), s.message(given)); err != nil {
		t.Fatal(err)
	}
	if b := k.endpoints[1]; b.Egress < nodetable.First || b.Ingress < nodetable.First {
		t.Fatalf("without its subject slot 1 has %v", b)
	}
	s.state.policies = map[uint32]testPolicies{301: first.policies[301]}
	next := state{map[uint32]props{300: 1, 301: 2, 302: 3, 306: 4}, s.state.policies}
	k.maxTableRows = 0
	if _, err := a.apply(t.Context(), s.change(next)); err != nil {
		t.Fatal(err)
	}
	if _, known := k.entries[306]; !known {
		t.Error("identity 306 is unknown to all tables")
	}
	for _, n := range []uint16{1, 3} {
		if b := k.endpoints[n]; b.Egress != nodetable.Pending && b.Ingress != nodetable.Pending {
			t.Errorf("slot %d has %v, and its tables lack a row", n, b)
		}
	}
}

// TestIdentityOfAnIdentityClassWithoutANumberIsKnownWhenThereIsRoom: tables whose classes are numbered differently grow
// by the classes that they lack.
func TestIdentityOfAnIdentityClassWithoutANumberIsKnownWhenThereIsRoom(t *testing.T) {
	states := testStates()
	k := scene()
	k.maxNumbers = 1
	a, sc := play(t, k, Config{Wait: true, Retry: 10 * time.Millisecond})
	sv := newService(1)
	st := next(t, sc.subscribed)
	m := sv.snapshot(states[2])
	st.send(t, m)
	st.expect(t, fmt.Sprint("ack ", m.Seq))
	if a.Status().Waiting == 0 {
		t.Fatal("every identity is known, although there was capacity for only one identity class")
	}
	a.mu.Lock()
	k.maxNumbers = 0
	a.mu.Unlock()
	st = next(t, sc.subscribed) // the service has to send everything again
	m = sv.snapshotAgain(states[2])
	st.send(t, m)
	st.expect(t, fmt.Sprint("ack ", m.Seq))
	a.mu.Lock()
	defer a.mu.Unlock()
	qs := questions(k)
	same(t, "with capacity", qs, k.answers(qs), states[2].answers(k, qs))
}

// TestTablesThatAreTooManyToRememberIsolateTheirSubjectsAlone: the stream and other tables are not
// affected.
func TestTablesThatAreTooManyToRememberIsolateTheirSubjectsAlone(t *testing.T) {
	content := func(n uint64) policytable.Table {
		c := policytable.Table{
			Hash: [32]byte{1, byte(n), byte(n >> 8)}, Rules: make([]policytable.Rule, 16),
			Classes: make([]policytable.Ranges, 64),
		}
		for i := range c.Classes {
			for j := range uint32(256) {
				c.Classes[i] = append(c.Classes[i], policytable.PortRange{First: 2 * j, Last: 2 * j, Rest: 1})
			}
		}
		return c
	}
	k := scene()
	a := start(t, k)
	var steps []policytable.Step
	bind := func(subject identity.Numeric, table policytable.ID) {
		steps = append(steps, policytable.BindSubject{Subject: subject, Direction: policytable.Egress, Table: table},
			policytable.BindSubject{Subject: subject, Direction: policytable.Ingress, Table: table})
	}
	const tables = 2 * maxAllRanges / (64 * 256)
	for n := range uint64(tables) {
		table := policytable.ID(n + 1)
		steps = append(steps, policytable.DefineTable{Table: table, Content: content(n)})
		bind(identity.Numeric(1000+n), table) //nolint:gosec // small
	}
	bind(300, 1)
	bind(301, tables)
	steps = append(steps, policytable.SnapshotComplete{}, policytable.Barrier{PolicyRevision: 1})
	if _, err := a.load(policytable.Message{Incarnation: "a", Seq: 1, Steps: steps}); err != nil {
		t.Fatal(err)
	}
	m := a.model
	if m.taken[rememberedRanges] > maxAllRanges || m.taken[rememberedRanges] < maxAllRanges/2 {
		t.Errorf("%d ranges are remembered", m.taken[rememberedRanges])
	}
	is := func(slot uint16, enforced bool) {
		t.Helper()
		if b := k.endpoints[slot]; (b.Egress >= nodetable.First) != enforced ||
			(b.Ingress >= nodetable.First) != enforced {
			t.Errorf("slot %d has %v", slot, b)
		}
	}
	is(1, true)
	is(2, false)
	// A table that grows beyond a bound isolates its subjects, too.
	grow := policytable.GrowTable{Table: 1, Classes: content(0).Classes}
	change := func(seq uint64, steps ...policytable.Step) {
		t.Helper()
		steps = append(steps, policytable.Barrier{PolicyRevision: seq})
		if _, err := a.apply(t.Context(), policytable.Message{Incarnation: "a", Seq: seq, Steps: steps}); err != nil {
			t.Fatal(err)
		}
	}
	change(2, grow, grow, policytable.SetPeer{Table: tables, Row: policytable.Row{IdentityClass: 77, Class: 3}})
	is(1, false)
	if st := a.Status(); len(st.Refusals) != 2 || !strings.Contains(st.Refusals[0], "more than 524288 ranges") {
		t.Errorf("refusals %.300q", st.Refusals)
	}
	steps = nil
	for n := range uint64(tables) - 1 {
		steps = append(steps, policytable.RetireTable{Table: policytable.ID(n + 1)})
	}
	for n := range uint32(tables) - 1 {
		steps = append(steps, policytable.RemoveSubject{Subject: identity.Numeric(1000 + n)})
	}
	change(3, append(steps, policytable.RemoveSubject{Subject: 300})...)
	if err := a.again(t.Context()); !errors.Is(err, subscription.ErrAnew) {
		t.Errorf("with capacity: %v", err)
	}
	for _, tt := range m.tables {
		m.release(tt)
	}
	if m.taken != [remembered]int{} {
		t.Errorf("no tables are left, but the counters are %v", m.taken)
	}
}

// TestNamesOfRulesAreRememberedWithinBounds: beyond the bound, rules have no names.
func TestNamesOfRulesAreRememberedWithinBounds(t *testing.T) {
	number := func(policytable.ClassKey) (nodetable.IdentityClass, error) { return 1, nil }
	m := newModel()
	c := policytable.Table{Hash: [32]byte{1}, Classes: []policytable.Ranges{nil}}
	if err := m.take(policytable.DefineTable{Table: 1, Content: c}, 1, number); err != nil {
		t.Fatal(err)
	}
	text := strings.Repeat("x", 1<<20)
	for subject := identity.Numeric(300); subject < 300+2*maxAllNames>>20; subject++ {
		if err := m.take(policytable.BindSubject{Subject: subject, Table: 1, Rules: [][]policytable.Source{{{Kind: text}}}}, 1, number); err != nil {
			t.Fatal(err)
		}
	}
	if m.names > maxAllNames || m.names < maxAllNames/2 {
		t.Errorf("%d bytes of names", m.names)
	}
	for subject := identity.Numeric(300); subject < 300+2*maxAllNames>>20; subject++ {
		if err := m.take(policytable.RemoveSubject{Subject: subject}, 1, number); err != nil {
			t.Fatal(err)
		}
	}
	if m.names != 0 {
		t.Errorf("no subjects are left, but %d bytes of names are counted", m.names)
	}
}

func TestAdoptedTableGrowsByTheClassesThatItLacks(t *testing.T) {
	states := testStates()
	for seed := range uint64(8) {
		k := scene()
		if _, err := start(t, k).load(newService(1).snapshot(state{map[uint32]props{300: 1, 301: 2}, states[6].policies})); err != nil {
			t.Fatal(err)
		}
		ids := map[uint32]props{300: 1, 301: 2}
		a, s := start(t, k), newService(seed+2)
		if _, err := a.load(s.snapshot(state{ids, states[6].policies})); err != nil {
			t.Fatal(err)
		}
		tables := maps.Clone(k.tables)
		qs := questions(k)
		for p := range uint8(8) {
			ids = maps.Clone(ids)
			ids[302+uint32(p)] = props(p)
			now := state{ids, states[6].policies}
			if _, err := a.apply(t.Context(), s.change(now)); err != nil {
				t.Fatal(err)
			}
			same(t, "grown", qs, k.answers(qs), now.answers(k, qs))
		}
		if !maps.EqualFunc(tables, k.tables, func(*nodetable.Content, *nodetable.Content) bool { return true }) {
			t.Errorf("tables %v became %v", tables, k.tables)
		}
		// and the next process adopts the grown tables
		if _, err := start(t, k).load(newService(seed + 50).snapshot(state{ids, states[6].policies})); err != nil {
			t.Fatal(err)
		}
		if !maps.EqualFunc(tables, k.tables, func(*nodetable.Content, *nodetable.Content) bool { return true }) {
			t.Errorf("tables %v became %v after a restart", tables, k.tables)
		}
	}
}

// TestWrongStepsAreRefusedAndNameTheField proves INV-58.
func TestWrongStepsAreRefusedAndNameTheField(t *testing.T) {
	define := func(change func(*policytable.DefineTable)) policytable.Step {
		d := policytable.DefineTable{Table: 900, Content: policytable.Table{Hash: [32]byte{1}, Classes: []policytable.Ranges{everywhere(0)}}}
		change(&d)
		return d
	}
	ranges := func(list ...policytable.PortRange) func(d *policytable.DefineTable) {
		return func(d *policytable.DefineTable) { d.Content.Classes[0] = list }
	}
	var many policytable.Ranges
	for i := range uint32(nodetable.MaxRanges) {
		many = append(many, policytable.PortRange{First: 2 * i, Last: 2 * i})
		many[i].Rest = uint16(1 + i%2)
	}
	for want, st := range map[string]policytable.Step{
		"define_identity_class.identity_class":                   policytable.DefineIdentityClass{Key: policytable.ClassKey{1}},
		"define_identity_class.key":                              policytable.DefineIdentityClass{IdentityClass: 999},
		"retire_identity_class.identity_class":                   policytable.RetireIdentityClass{IdentityClass: 999},
		"set_identity.identity":                                  policytable.SetIdentity{Identity: 1 << 24, IdentityClass: 11},
		"set_identity.identity_class":                            policytable.SetIdentity{Identity: 300, IdentityClass: 999},
		"set_identity.kind":                                      policytable.SetIdentity{Identity: 300, IdentityClass: 11, Kind: 8},
		"set_identity.scope":                                     policytable.SetIdentity{Identity: 300, IdentityClass: 11, Scope: 3},
		"define_table.table":                                     define(func(d *policytable.DefineTable) { d.Table = 0 }),
		"there is a table 101":                                   define(func(d *policytable.DefineTable) { d.Table = 101 }),
		"structure_hash":                                         define(func(d *policytable.DefineTable) { d.Content.Hash = [32]byte{} }),
		"classes: there are none":                                define(func(d *policytable.DefineTable) { d.Content.Classes = nil }),
		"default_classes[2]":                                     define(func(d *policytable.DefineTable) { d.Content.DefaultClasses[2] = 1 }),
		"address_classes[1]":                                     define(func(d *policytable.DefineTable) { d.Content.AddressClasses[1] = 1 }),
		"peers[0].class":                                         define(func(d *policytable.DefineTable) { d.Peers = []policytable.Row{{IdentityClass: 11, Class: 1}} }),
		"identity_class: there is no identity class 999":         define(func(d *policytable.DefineTable) { d.Peers = []policytable.Row{{IdentityClass: 999, Class: 0}} }),
		"classes[0].ranges[0].rest: there is no rule 5":          define(ranges(policytable.PortRange{Last: 9, Rest: 5})),
		"classes[0].ranges[0].admin: there is no rule 5":         define(ranges(policytable.PortRange{Last: 9, Admin: 5})),
		"ranges[0]: begins at 0x9, after its end 0x5":            define(ranges(policytable.PortRange{First: 9, Last: 5})),
		"ranges[1]: begins at 0x5, before the previous one ends": define(ranges(policytable.PortRange{First: 1, Last: 5}, policytable.PortRange{First: 5, Last: 6})),
		"classes[0].ranges: 8192 including the gaps": define(func(d *policytable.DefineTable) {
			d.Content.Rules = make([]policytable.Rule, 2)
			d.Content.Classes[0] = many
		}),
		"rules[0]":                             define(func(d *policytable.DefineTable) { d.Content.Rules = []policytable.Rule{{Action: 9}} }),
		"grow_table.table":                     policytable.GrowTable{Table: 999},
		"ranges[0].rest: there is no rule 900": policytable.GrowTable{Table: 101, Classes: []policytable.Ranges{everywhere(900)}},
		"retire_table.table":                   policytable.RetireTable{Table: 999},
		"set_peer.table":                       policytable.SetPeer{Table: 999},
		"set_peer.row.class":                   policytable.SetPeer{Table: 101, Row: policytable.Row{IdentityClass: 11, Class: 999}},
		"set_peer.row.identity_class":          policytable.SetPeer{Table: 101, Row: policytable.Row{IdentityClass: 999, Class: 0}},
		"set_prefix.table":                     policytable.SetPrefix{Table: 999},
		"set_prefix.prefix":                    policytable.SetPrefix{Table: 101},
		"bind_subject.table":                   policytable.BindSubject{Subject: 300, Table: 999},
		"bind_subject.subject":                 policytable.BindSubject{},
		"bind_subject.direction":               policytable.BindSubject{Subject: 300, Direction: 2},
		"snapshot_complete":                    policytable.SnapshotComplete{},
	} {
		k := scene()
		a, s := start(t, k), newService(1)
		st0 := testStates()[2]
		if _, err := a.load(s.snapshot(st0)); err != nil {
			t.Fatal(err)
		}
		writes := k.writes
		_, err := a.apply(t.Context(), s.message([]policytable.Step{st}))
		if !errors.Is(err, policytable.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%T: %v, want %q", st, err, want)
		}
		if k.writes != writes {
			t.Errorf("%q: %d writes", want, k.writes-writes)
		}
		if _, err := a.load(newService(2).snapshot(st0)); err != nil || k.writes != writes {
			t.Errorf("%q: afterwards %v, %d writes", want, err, k.writes-writes)
		}
	}
}
