// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/table"
	"github.com/sluice-net/sluice/services/policy/internal/test/scenario"
)

// replica applies steps as the datapath does.
type replica struct {
	words   map[identity.Numeric]table.Entry
	classes map[policytable.IdentityClass]policytable.ClassKey
	tables  map[policytable.ID]*table.Table
	bound   map[identity.Numeric]*[2]*policytable.ID
	broken  string
	// All numbers that were ever in use. They must not be reused, because packets in flight and slow readers may
	// still refer to them.
	usedTables  map[policytable.ID]bool
	usedClasses map[policytable.IdentityClass]bool
}

func newReplica() *replica {
	return &replica{
		words: make(map[identity.Numeric]table.Entry), classes: make(map[policytable.IdentityClass]policytable.ClassKey),
		tables: make(map[policytable.ID]*table.Table), bound: make(map[identity.Numeric]*[2]*policytable.ID),
		usedTables: make(map[policytable.ID]bool), usedClasses: make(map[policytable.IdentityClass]bool),
	}
}

func (r *replica) fail(ev policytable.Step, why string) {
	if r.broken == "" {
		r.broken = fmt.Sprintf("%T %+v: %s", ev, ev, why)
	}
}

// table builds the table that a DefineTable step describes.
func (r *replica) table(ev policytable.Step, d policytable.DefineTable) *table.Table {
	c := d.Content
	t := &table.Table{
		Header: table.Header{Default: c.DefaultClasses, Address: c.AddressClasses},
		Rules:  c.Rules, Peers: map[policytable.IdentityClass]policytable.Class{},
	}
	for flag, set := range map[table.Flags]bool{
		table.DefaultAllow: c.DefaultAllow, table.HostAllow: c.HostAllow, table.HasAddresses: c.HasAddresses,
	} {
		if set {
			t.Flags |= flag
		}
	}
	r.grow(ev, t, c.Classes)
	for _, row := range d.Peers {
		t.Peers[row.IdentityClass] = row.Class
	}
	for p, classes := range c.Prefixes {
		t.Prefixes.Set(p, classes)
	}
	return t
}

// grow adds classes to a table, each with its own list.
func (r *replica) grow(ev policytable.Step, t *table.Table, classes []policytable.Ranges) {
	for _, ranges := range classes {
		var list []table.Interval
		for x := range ranges.Total() {
			admin, rest := uint16(table.NoAdmin), uint16(table.NoRest)
			if x.Admin != 0 {
				admin = x.Admin
			}
			if x.Rest != 0 {
				rest = x.Rest
			}
			list = append(list, table.Interval{Hi: x.Last, Value: table.MakeValue(admin, rest)})
		}
		if _, err := table.NewBuilder().Class(t, list); err != nil {
			r.fail(ev, err.Error())
		}
	}
}

func (r *replica) apply(ev policytable.Step) {
	target := func(id policytable.ID) *table.Table {
		t := r.tables[id]
		if t == nil {
			r.fail(ev, "no such table")
			return &table.Table{Peers: map[policytable.IdentityClass]policytable.Class{}}
		}
		return t
	}
	switch x := ev.(type) {
	case policytable.DefineIdentityClass:
		if r.usedClasses[x.IdentityClass] || x.IdentityClass == 0 {
			r.fail(ev, "the number was used before")
		}
		for n, key := range r.classes {
			if key == x.Key {
				r.fail(ev, fmt.Sprint("class has the same key: ", n))
			}
		}
		r.usedClasses[x.IdentityClass] = true
		r.classes[x.IdentityClass] = x.Key
	case policytable.RetireIdentityClass:
		for n, w := range r.words {
			if w.IdentityClass == x.IdentityClass {
				r.fail(ev, fmt.Sprint("identity has the class: ", n))
			}
		}
		for id, t := range r.tables {
			if _, ok := t.Peers[x.IdentityClass]; ok {
				r.fail(ev, fmt.Sprint("table has a row of the class: ", id))
			}
		}
		delete(r.classes, x.IdentityClass)
	case policytable.SetIdentity:
		if x.IdentityClass == 0 {
			delete(r.words, x.Identity)
			return
		}
		if _, ok := r.classes[x.IdentityClass]; !ok {
			r.fail(ev, "no such class")
		}
		r.words[x.Identity] = table.Entry{IdentityClass: x.IdentityClass, Kind: x.Kind, Scope: x.Scope, Known: true}
	case policytable.DefineTable:
		if r.usedTables[x.Table] || x.Table == policytable.AllowAll {
			r.fail(ev, "the number was used before")
		}
		r.usedTables[x.Table] = true
		r.tables[x.Table] = r.table(ev, x)
	case policytable.GrowTable:
		t := target(x.Table)
		if len(x.Classes) == 0 {
			r.fail(ev, "nothing new")
		}
		r.grow(ev, t, x.Classes)
	case policytable.RetireTable:
		target(x.Table)
		for n, b := range r.bound {
			for _, id := range b {
				if id != nil && *id == x.Table {
					r.fail(ev, fmt.Sprint("still bound to ", n))
				}
			}
		}
		delete(r.tables, x.Table)
	case policytable.SetPeer:
		t := target(x.Table)
		if _, ok := t.Peers[x.Row.IdentityClass]; ok {
			r.fail(ev, "row exists")
		}
		if int(x.Row.Class) >= len(t.Classes) {
			r.fail(ev, "no such class in the table")
		}
		t.Peers[x.Row.IdentityClass] = x.Row.Class
	case policytable.DeletePeer:
		t := target(x.Table)
		if _, ok := t.Peers[x.IdentityClass]; !ok {
			r.fail(ev, "no such row")
		}
		delete(t.Peers, x.IdentityClass)
	case policytable.SetPrefix:
		target(x.Table).Prefixes.Set(x.Prefix, x.Classes)
	case policytable.DeletePrefix:
		t := target(x.Table)
		if _, ok := t.Prefixes.Exact(x.Prefix); !ok {
			r.fail(ev, "no such prefix")
		}
		t.Prefixes.Delete(x.Prefix)
	case policytable.BindSubject:
		if x.Table != policytable.AllowAll {
			target(x.Table)
			if len(x.Rules) != len(r.tables[x.Table].Rules) {
				r.fail(ev, "sources and rules differ in number")
			}
		}
		if r.bound[x.Subject] == nil {
			r.bound[x.Subject] = new([2]*policytable.ID)
		}
		id := x.Table
		r.bound[x.Subject][x.Direction] = &id
	case policytable.RemoveSubject:
		delete(r.bound, x.Subject)
	default:
		r.fail(ev, "unknown event")
	}
}

// lookup evaluates a query; false if the direction is not bound.
func (r *replica) lookup(q scenario.Question) (table.Verdict, bool) {
	b := r.bound[q.Subject]
	if b == nil || b[q.Direction] == nil {
		return table.Verdict{}, false
	}
	if *b[q.Direction] == policytable.AllowAll {
		return table.Verdict{Action: policytable.Allow, Reason: table.ByDefault}, true
	}
	return r.tables[*b[q.Direction]].Lookup(r.words[q.Peer], q.Addr, q.Point), true
}

func sameAnswers(t *testing.T, w *scenario.World, e *Engine, r *replica, s *scenario.State, what string) {
	t.Helper()
	if r.broken != "" {
		t.Fatalf("%s: %s", what, r.broken)
	}
	if len(r.tables) != len(e.tables) || len(r.bound) != len(e.subjects) || len(r.classes) != len(e.classes) {
		t.Fatalf("%s: replica has %d tables, %d subjects, %d classes; the engine %d, %d, %d",
			what, len(r.tables), len(r.bound), len(r.classes), len(e.tables), len(e.subjects), len(e.classes))
	}
	for range 60 {
		q, ok := w.Question(s)
		if !ok {
			return
		}
		want, err := e.Lookup(q.Subject, q.Direction, q.Peer, q.Addr, q.Point)
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := r.lookup(q); !ok || got != want {
			t.Fatalf("%s: %+v: replica gives %+v (%t), engine %+v", what, q, got, ok, want)
		}
	}
}

func TestReplayedEventsGiveTheSameTables(t *testing.T) {
	t.Parallel()
	w := seeded(t, 31)
	for run := range runs(t, 160) {
		r := newReplica()
		config := drawConfig(w)
		config.Events = r.apply
		s := scenario.NewState()
		e := New(config)
		for step := range 30 {
			next := s.Clone()
			if step == 0 {
				next = w.Draw()
			}
			for range 1 + w.IntN(3) {
				w.Mutate(next)
			}
			if err := e.Apply(diff(s, next)); err != nil {
				t.Fatal(err)
			}
			s = next
			sameAnswers(t, w, e, r, s, fmt.Sprintf("run %d step %d", run, step))
		}
		late := newReplica()
		e.Snapshot(late.apply)
		sameAnswers(t, w, e, late, s, fmt.Sprintf("run %d, snapshot", run))
		for n, key := range late.classes {
			if r.classes[n] != key {
				t.Fatalf("class %d is %x and %x", n, r.classes[n], key)
			}
		}
		if err := e.Apply(diff(s, scenario.NewState())); err != nil {
			t.Fatal(err)
		}
		if r.broken != "" || len(r.words)+len(r.tables)+len(r.bound)+len(r.classes) != 0 {
			t.Fatalf("run %d: left %+v", run, r)
		}
	}
}

func TestNoEventShowsAThirdVerdict(t *testing.T) {
	t.Parallel()
	w := seeded(t, 21)
	for run := range runs(t, 600) {
		s := w.Draw()
		next := s.Clone()
		switch run % 3 {
		case 0: // policies
			for range 2 {
				o := w.Policy(fmt.Sprint("p", w.IntN(6)))
				next.Objects[o.Key] = o
			}
		case 1: // identities
			for range 3 {
				id := scenario.Pick(w, w.IDs...)
				if s.Subjects[id.Number] {
					continue
				}
				if _, ok := next.Identities[id.Number]; ok {
					w.DropIdentity(next, id.Number)
				} else {
					w.SetIdentity(next, id)
				}
			}
			next.Located = s.Located
		case 2: // names
			next.Names = map[string][]netip.Addr{"a.example.": {scenario.Pick(w, w.All...)}, "example.": {scenario.Pick(w, w.All...)}}
		}
		r := newReplica()
		watch := func(policytable.Step) {}
		config := configs[0]
		config.Events = func(ev policytable.Step) {
			r.apply(ev)
			watch(ev)
		}
		e := New(config)
		if err := e.Apply(diff(scenario.NewState(), s)); err != nil {
			t.Fatal(err)
		}
		final := fresh(t, configs[0], next)
		var questions []scenario.Question
		var old, after []table.Verdict
		for range 80 {
			q, ok := w.Question(s)
			if !ok || !next.Subjects[q.Subject] {
				continue
			}
			x, _ := r.lookup(q)
			y, err := final.Lookup(q.Subject, q.Direction, q.Peer, q.Addr, q.Point)
			if err != nil {
				t.Fatal(err)
			}
			questions, old, after = append(questions, q), append(old, x), append(after, y)
		}
		watch = func(ev policytable.Step) {
			for i, q := range questions {
				v, ok := r.lookup(q)
				if !ok || v.Action != old[i].Action && v.Action != after[i].Action {
					t.Fatalf("run %d, at %T %+v: %+v: %+v, before %+v, after %+v\n%s", run, ev, ev, q, v, old[i], after[i], s)
				}
			}
		}
		if err := e.Apply(diff(s, next)); err != nil {
			t.Fatal(err)
		}
		watch = func(policytable.Step) {}
		for i, q := range questions {
			if v, _ := r.lookup(q); v.Action != after[i].Action {
				t.Fatalf("run %d at last: %+v: %+v, want %+v", run, q, v, after[i])
			}
		}
	}
}

// TestIdentityClassKeysDependOnlyOnTheClass: the key of a class is constant within an engine and equal in all engines.
func TestIdentityClassKeysDependOnlyOnTheClass(t *testing.T) {
	t.Parallel()
	w := seeded(t, 41)
	for range 50 {
		s := w.Draw()
		a, b := fresh(t, configs[0], s), New(configs[0])
		detour := w.Draw()
		if err := b.Apply(diff(scenario.NewState(), detour)); err != nil {
			t.Fatal(err)
		}
		if err := b.Apply(diff(detour, s)); err != nil {
			t.Fatal(err)
		}
		keys := func(e *Engine) map[identity.Numeric]policytable.ClassKey {
			out := make(map[identity.Numeric]policytable.ClassKey)
			for n, p := range e.peers {
				out[n] = p.class.stableKey()
			}
			return out
		}
		x, y := keys(a), keys(b)
		seen := make(map[policytable.ClassKey]policytable.IdentityClass)
		for n, key := range x {
			if y[n] != key {
				t.Fatalf("identity %d is in %x and %x", n, key, y[n])
			}
			if c, ok := seen[key]; ok && c != a.Entry(n).IdentityClass {
				t.Fatalf("two classes with key %x", key)
			}
			seen[key] = a.Entry(n).IdentityClass
		}
	}
}
