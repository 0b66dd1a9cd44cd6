// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"

	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/test/scenario"
)

func TestAPreparedChangeCompilesNothing(t *testing.T) {
	s := shapes[0].Shape
	e := loaded(t, s)
	all := `{apiVersion: cilium.io/v2, kind: CiliumClusterwideNetworkPolicy, metadata: {name: all},
spec: {endpointSelector: {}, ingress: [{fromEndpoints: [{matchLabels: {app: app-02}}], toPorts: [{ports: [{port: "PORT", protocol: TCP}]}]}]}}`
	for _, port := range []string{"80", "81"} {
		change := Change{UpsertPolicies: []policy.Object{decodeOne(t, strings.ReplaceAll(all, "PORT", port))}}
		before := e.Size()
		p := e.Prepare(change)
		for p.Mark(1) { //nolint:revive // until all are marked
		}
		if got := p.Subjects(); got != before.Subjects {
			t.Fatalf("%d subjects are affected, want %d", got, before.Subjects)
		}
		steps := 1
		for ; p.Step(8); steps++ { //nolint:revive // until all are compiled
		}
		if want := (before.Subjects + 7) / 8; steps != want {
			t.Errorf("%d steps, want %d", steps, want)
		}
		from, to := apply(t, e, change)
		if to.Tables != from.Tables || to.Binds-from.Binds < before.Subjects {
			t.Errorf("the prepared change compiled %d tables and bound %d directions, want 0 and at least %d", to.Tables-from.Tables, to.Binds-from.Binds, before.Subjects)
		}
		for p.Release(8) { //nolint:revive // until all are released
		}
		after := New(e.config)
		if err := after.Apply(e.Draft().change); err != nil {
			t.Fatal(err)
		}
		if err := after.Apply(Change{AddSubjects: e.Draft().subjects}); err != nil {
			t.Fatal(err)
		}
		if got, want := e.Size(), after.Size(); got.Tables != want.Tables || got.Selectors != want.Selectors || got.IdentityClasses != want.IdentityClasses {
			t.Errorf("after all was released: %+v, from scratch %+v", got, want)
		}
	}
}

// own copies a step for a second reader, because a reader may modify the definition of a table.
func own(ev policytable.Step) policytable.Step {
	d, ok := ev.(policytable.DefineTable)
	if !ok {
		return ev
	}
	d.Content.Classes, d.Content.Prefixes = slices.Clone(d.Content.Classes), maps.Clone(d.Content.Prefixes)
	return d
}

// TestAPreparationChangesNoVerdictAndLeavesNothing: a Preparation changes no verdict and leaves nothing in the
// engine, whatever changes happen between its steps, and whether or not the prepared change is applied.
func TestAPreparationChangesNoVerdictAndLeavesNothing(t *testing.T) {
	t.Parallel()
	w := seeded(t, 51)
	for run := range runs(t, 40) {
		r := newReplica()
		var late *replica // a subscriber that starts while prepared tables exist
		config := drawConfig(w)
		told := config
		told.Events = func(ev policytable.Step) {
			if late != nil {
				late.apply(own(ev))
			}
			r.apply(ev)
		}
		s := w.Draw()
		e := fresh(t, told, s)
		for step := range 12 {
			what := fmt.Sprintf("run %d step %d", run, step)
			next := s.Clone()
			for range 1 + w.IntN(4) {
				w.Mutate(next)
			}
			planned := diff(s, next)
			p := e.Prepare(planned)
			for p.Mark(1) { //nolint:revive // until all are marked
			}
			for p.Step(1 + w.IntN(2)) {
				checkAgreement(t, w, config, s, e, 10)
				if !w.Chance(50) {
					continue
				}
				other := s.Clone()
				w.Mutate(other)
				if err := e.Apply(diff(s, other)); err != nil {
					t.Fatal(err)
				}
				s = other
			}
			late = newReplica()
			e.Snapshot(late.apply)
			if w.Chance(80) {
				if err := e.Apply(diff(s, next)); err != nil {
					t.Fatal(err)
				}
				s = next
			}
			for p.Release(1) {
				checkAgreement(t, w, config, s, e, 10)
			}
			sameAsFresh(t, config, s, e, what)
			sameAnswers(t, w, e, r, s, what)
			sameAnswers(t, w, e, late, s, what+", late reader")
		}
		if err := e.Apply(diff(s, scenario.NewState())); err != nil {
			t.Fatal(err)
		}
		if size := e.Size(); size != (Size{}) || len(r.tables)+len(r.classes) != 0 {
			t.Fatalf("left: %+v, %d tables and %d classes of the reader", size, len(r.tables), len(r.classes))
		}
	}
}

func TestSubjectsOfAMomentAreSelectedAsTheEngineSelects(t *testing.T) {
	e := loaded(t, shapes[0].Shape)
	at, found := e.Subjects(), 0
	for key, o := range e.objects {
		var want []identity.Numeric
		for n, s := range e.subjects {
			if slices.ContainsFunc(o.Specs, func(spec rule.Spec) bool { return e.selects(&spec, s) }) {
				want = append(want, n)
			}
		}
		slices.Sort(want)
		if got := at.Selected(o); !slices.Equal(got, want) {
			t.Errorf("%s selects %v, want %v", key, got, want)
		}
		found += len(want)
	}
	if found == 0 {
		t.Error("no policy selects anything: the test covers nothing")
	}
	var gone []identity.Numeric
	for n := range e.subjects {
		gone = append(gone, n)
	}
	if err := e.Apply(Change{RemoveSubjects: gone}); err != nil {
		t.Fatal(err)
	}
	after := 0
	for _, o := range e.objects {
		after += len(at.Selected(o))
	}
	if after != found {
		t.Errorf("after removing the subjects from the engine, %d are selected, want %d from the snapshot", after, found)
	}
}

func TestAPreparedChangeOfGroupsCompilesNothing(t *testing.T) {
	for name, peer := range map[string]func(i int) string{
		"by name":  func(i int) string { return fmt.Sprintf("{cidrGroupRef: g%d}", i%100) },
		"by label": func(i int) string { return fmt.Sprintf("{cidrGroupSelector: {matchLabels: {team: t%d}}}", i%10) },
		"by other labels": func(int) string {
			return "{cidrGroupSelector: {matchExpressions: [{key: team, operator: NotIn, values: [t7]}]}}"
		},
	} {
		e := New(Config{Cluster: "default", AllowHost: true})
		c := groupSubjects(t, 60, peer)
		for i := range 100 {
			c.UpsertPolicies = append(c.UpsertPolicies, addressGroup(t, i, 5))
		}
		_, before := apply(t, e, c)
		for what, change := range map[string]Change{
			"other prefixes":   {UpsertPolicies: []policy.Object{addressGroup(t, 7, 9), addressGroup(t, 8, 9)}},
			"a group goes":     {DeletePolicies: []policy.Key{addressGroup(t, 17, 5).Key}},
			"a group is added": {UpsertPolicies: []policy.Object{labelledGroup(t, 200, 5, "{team: t3}")}},
			"another comes":    {UpsertPolicies: []policy.Object{addressGroup(t, 201, 5)}, DeletePolicies: []policy.Key{addressGroup(t, 9, 5).Key}},
			"a policy as well": {UpsertPolicies: append(groupSubjects(t, 3, func(int) string { return "{cidrGroupRef: g3}" }).UpsertPolicies, addressGroup(t, 4, 30))},
		} {
			p := e.Prepare(change)
			for p.Mark(20) { //nolint:revive // until all are marked
			}
			concerned := p.Subjects()
			for p.Step(8) { //nolint:revive // until all are compiled
			}
			from, to := apply(t, e, change)
			if to.Tables != from.Tables || to.Binds-from.Binds > 2*concerned {
				t.Errorf("%s, %s: the prepared change compiled %d tables and bound %d directions of %d subjects", name, what, to.Tables-from.Tables, to.Binds-from.Binds, concerned)
			}
			for p.Release(8) { //nolint:revive // until all are released
			}
		}
		if tables := e.Counters().Tables - before.Tables; tables < 3 {
			t.Errorf("%s: %d tables were compiled: the test covers nothing", name, tables)
		}
	}
}
