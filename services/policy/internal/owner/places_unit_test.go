// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/services/policy/internal/decode"
	"github.com/sluice-net/sluice/services/policy/internal/excludedlabels"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/record"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// desk has all objects that places needs, without an owner.
type desk struct {
	t   *testing.T
	now time.Time
	*forms
	*policySet
	*places
}

func newDesk(t *testing.T, policies int) *desk {
	t.Helper()
	d := &desk{t: t, now: time.Unix(100_000, 0), policySet: newPolicySet()}
	c := &Config{MaxPolicies: policies, MaxManifestBytes: 1 << 20, Tenants: withoutTenants(), Now: func() time.Time { return d.now }}
	d.forms = newForms(rule.Options{}, c.Now, excludedlabels.Default())
	d.places = newPlaces(c, d.forms, d.policySet)
	return d
}

// make returns policy n of a namespace; lower numbers are older.
func (d *desk) make(source, namespace string, n int) *Policy {
	d.t.Helper()
	docs, err := decode.Options{}.Decode([]byte(text(namespace, fmt.Sprint("p", n), 80)))
	if err != nil {
		d.t.Fatal(err)
	}
	docs[0].Created, docs[0].UID = time.Unix(int64(n), 0), fmt.Sprint(n)
	return d.policy(docs[0], source, docs[0].Object.Key.String())
}

// change makes a change in the same way as the owner does for a change that is stored.
func (d *desk) change(e edit) {
	d.t.Helper()
	p, err := d.plan(e)
	if err != nil {
		d.t.Fatal(err)
	}
	d.replace(p.puts, p.gone)
	d.stored(p.puts, p.gone)
	d.delivered(p.puts, p.gone)
	d.refold(&p)
}

func (d *desk) plan(e edit) (plan, error) {
	p := plan{
		puts: slices.Clone(e.puts), gone: slices.Clone(e.gone),
		fold: make(map[policy.Key]struct{}), unfold: make(map[policy.Key]struct{}),
	}
	return p, d.divide(&e, &p, true, true)
}

// deliverAgain delivers the policies whose text was not kept.
func (d *desk) deliverAgain(namespace string, policies int) {
	d.t.Helper()
	var e edit
	for n := range policies {
		p := d.make(managed.SourceKubernetes, namespace, n+1)
		if _, again := d.again[p.Key]; again {
			e.puts = append(e.puts, p)
		}
	}
	if _, asked := d.kindsAgain()["NetworkPolicy"]; asked != (len(e.puts) > 0) {
		d.t.Fatalf("the source got the requests %v for %d policies", asked, len(e.puts))
	}
	d.change(e)
	if len(d.again) > 0 {
		d.t.Fatalf("%d policies were delivered again but are still requested", len(d.again))
	}
}

// admitted counts the policies that are enforced as written, and the policies that isolate.
func (d *desk) admitted() (admitted, isolate int) {
	for _, p := range d.all {
		switch {
		case p.Key.Kind == policy.KindNamespaceIsolation:
		case p.Exceeds == "":
			admitted++
		default:
			isolate++
		}
	}
	return admitted, isolate
}

func TestOldestPoliciesHaveThePlacesAfterALevel(t *testing.T) {
	const limit = 10
	d := newDesk(t, limit)
	var e edit
	for n := 2 * limit; n > 0; n-- {
		e.puts = append(e.puts, d.make(managed.SourceKubernetes, "shop", n))
	}
	e.levels = true
	d.change(e)
	d.now = d.now.Add(time.Hour)
	d.change(edit{levels: true})
	d.deliverAgain("shop", 2*limit)
	// A single tenant may use most of the capacity; the rest is reserved for the next tenant.
	admitted, isolate := d.admitted()
	if admitted < limit/2 || admitted > limit || isolate+len(d.folded) != 2*limit-admitted {
		t.Fatalf("%d admitted, %d isolate, %d folded, of %d with capacity for %d", admitted, isolate, len(d.folded), 2*limit,
			limit)
	}
	for n := 1; n <= 2*limit; n++ {
		if k := d.make(managed.SourceKubernetes, "shop", n).Key; d.ledger.Admitted(k) != (n <= admitted) {
			t.Errorf("%s is admitted: %v; %d are admitted, oldest first", k, d.ledger.Admitted(k), admitted)
		}
	}
	// When there is capacity for one more policy, the oldest policy that was not admitted gets it.
	d.now = d.now.Add(time.Hour)
	d.change(edit{gone: []policy.Key{d.make(managed.SourceKubernetes, "shop", 1).Key}, levels: true})
	if k := d.make(managed.SourceKubernetes, "shop", admitted+1).Key; !d.ledger.Admitted(k) {
		t.Errorf("%s is the oldest refused policy, and there is capacity", k)
	}
}

func TestPlanThatIsTakenBackLeavesThePlaces(t *testing.T) {
	d := newDesk(t, 4)
	d.change(edit{puts: []*Policy{d.make(managed.SourceKubernetes, "shop", 1)}, levels: true})
	before := d.ledger.Usage()
	p, err := d.plan(edit{
		puts: []*Policy{d.make(managed.SourceKubernetes, "shop", 2), d.make(managed.SourceKubernetes, "shop", 3)},
		gone: []policy.Key{d.make(managed.SourceKubernetes, "shop", 1).Key},
	})
	if err != nil {
		t.Fatal(err)
	}
	if d.ledger.Admitted(d.make(managed.SourceKubernetes, "shop", 1).Key) {
		t.Error("the plan removes a policy that stays admitted")
	}
	d.takeBack(p.places)
	if got := d.ledger.Usage(); fmt.Sprint(got) != fmt.Sprint(before) {
		t.Errorf("after the plan was undone: %+v, want %+v", got, before)
	}
}

func TestCallWithoutAPlaceIsRefused(t *testing.T) {
	d := newDesk(t, 2)
	d.change(edit{levels: true})
	var e edit
	for n := range 5 {
		e.puts = append(e.puts, d.make(managed.SourceGRPC, "shop", n+1))
	}
	e.answers = true
	p, err := d.plan(e)
	if !errors.Is(err, failure.ErrLimit) {
		t.Fatalf("five policies with capacity for two: %v, want ErrLimit", err)
	}
	d.takeBack(p.places)
	e.answers = false // as for a file, whose refused policies isolate
	d.change(e)
	if _, isolate := d.admitted(); isolate == 0 || len(d.folded) > 0 {
		t.Errorf("%d policies isolate and %d are folded; want isolated ones only, because only policies of an API server fold",
			isolate, len(d.folded))
	}
}

func TestNamespaceStandsForFoldedPoliciesWhileThereIsOne(t *testing.T) {
	const limit = 4
	d := newDesk(t, limit)
	var e edit
	for n := range 6 * limit {
		e.puts = append(e.puts, d.make(managed.SourceKubernetes, "shop", n+1))
	}
	e.levels = true
	d.change(e)
	d.now = d.now.Add(time.Hour)
	d.change(edit{levels: true})
	isolation := namespaceIsolation("shop")
	if len(d.folded) == 0 || d.foldedIn["shop"] != len(d.folded) || d.all[isolation] == nil {
		t.Fatalf("%d folded, %d in the namespace, isolation %v", len(d.folded), d.foldedIn["shop"], d.all[isolation])
	}
	for k := range d.folded {
		if d.all[k] != nil {
			t.Errorf("%s is folded but kept", k)
		}
	}
	var rest edit
	for n := range 6 * limit {
		k := d.make(managed.SourceKubernetes, "shop", n+1).Key
		if _, folded := d.folded[k]; folded {
			rest.unfolded = append(rest.unfolded, k)
		}
	}
	d.change(rest)
	if len(d.folded)+len(d.foldedIn) > 0 || d.all[isolation] != nil {
		t.Errorf("%d folded in %d namespaces, isolation %v; want none", len(d.folded), len(d.foldedIn), d.all[isolation])
	}
}

func TestReplacedPoliciesCanBePutBack(t *testing.T) {
	d := newDesk(t, 10)
	stays, old, gone := d.make(managed.SourceFile, "shop", 1), d.make(managed.SourceFile, "shop", 2), d.make(managed.SourceFile, "shop", 3)
	d.replace([]*Policy{stays, old, gone}, nil)
	next, fresh := d.make(managed.SourceFile, "shop", 2), d.make(managed.SourceFile, "shop", 4)
	undo := d.replace([]*Policy{next, fresh}, []policy.Key{gone.Key})
	if d.all[old.Key] != next || d.all[fresh.Key] != fresh || d.all[gone.Key] != nil || d.all[stays.Key] != stays {
		t.Fatalf("after the change: %v", d.all)
	}
	undo()
	if len(d.all) != 3 || d.all[old.Key] != old || d.all[gone.Key] != gone || d.all[stays.Key] != stays {
		t.Errorf("after undoing the change: %v", d.all)
	}
}

// TestClosedFormStandsInUntilAChangeIsStored: the closed form of a policy isolates until the change is stored. The
// closed form is created once for each new version of the policy.
func TestClosedFormStandsInUntilAChangeIsStored(t *testing.T) {
	d := newDesk(t, 10)
	p := d.make(managed.SourceFile, "shop", 1)
	d.replace([]*Policy{p}, nil)
	next := d.make(managed.SourceFile, "shop", 1)
	next.Manifest = []byte("another")
	form, is := d.close(p.Key, next)
	if !is || d.enforced(p.Key).Specs == nil || len(form.Specs) != len(p.object.Specs)+len(next.object.Specs) {
		t.Fatalf("closed %v: %+v", is, form)
	}
	if _, again := d.close(p.Key, next); again {
		t.Error("it is closed twice for one form")
	}
	if _, again := d.close(p.Key, nil); !again {
		t.Error("its removal is a different change, but is not closed")
	}
	d.stored([]*Policy{next}, nil)
	if got := d.enforced(p.Key); got != p.object {
		t.Errorf("after a change is stored the engine has %+v", got)
	}
}

// TestFieldsOfALaterVersionIsolate: a stored field that this version does not know may narrow a rule, so the policy
// isolates unless the caller accepted that the field is dropped.
func TestFieldsOfALaterVersionIsolate(t *testing.T) {
	d := newDesk(t, 10)
	novel := []byte(text("shop", "db", 80) + "    novel: {only: some}\n")
	two := []byte(text("shop", "db", 80) + "    novel: {only: some}\n    typo: 1\n")
	unknown := func(manifest []byte) []string {
		docs, err := decode.Options{AllowUnknown: true}.Decode(manifest)
		if err != nil {
			t.Fatal(err)
		}
		return docs[0].Object.Unknown
	}
	typo := unknown([]byte(text("shop", "db", 80) + "    typo: 1\n"))
	for what, c := range map[string]struct {
		source   string
		manifest []byte
		known    bool
		dropped  []string
		isolates bool
	}{
		"of a call":                         {managed.SourceGRPC, novel, true, nil, true},
		"of a call of an earlier version":   {managed.SourceGRPC, novel, false, nil, false},
		"of a call that allowed it":         {managed.SourceGRPC, two, false, unknown(two), false},
		"of a call that allowed another":    {managed.SourceGRPC, two, false, typo, true},
		"of a file":                         {managed.SourceFile, novel, false, nil, true},
		"of an API server":                  {managed.SourceKubernetes, novel, false, nil, true},
		"all fields of a call are known":    {managed.SourceGRPC, []byte(text("shop", "db", 80)), true, nil, false},
		"all fields of a file are known":    {managed.SourceFile, []byte(text("shop", "db", 80)), false, nil, false},
		"all fields of an object are known": {managed.SourceKubernetes, []byte(text("shop", "db", 80)), false, nil, false},
	} {
		r := record.Policy{
			Key: record.Key{Kind: "NetworkPolicy", Namespace: "shop", Name: "db"}, Source: c.source,
			Manifest: c.manifest, Place: record.Place{Known: c.known, Dropped: c.dropped},
		}
		p := d.decode(r)
		if isolates := p.inForce() && p.object.Isolates != ""; isolates != c.isolates || isolates != (p.Broken != "") {
			t.Errorf("%s: %+v, broken %q, want isolation %t", what, p.object, p.Broken, c.isolates)
		}
		if again := policyRecord(p).Place.Known; again != (c.known && c.source == managed.SourceGRPC) {
			t.Errorf("%s: written again as known %t", what, again)
		}
		if again := policyRecord(p).Place.Dropped; c.isolates && !slices.Equal(again, c.dropped) {
			t.Errorf("%s: written again with %q, want %q", what, again, c.dropped)
		}
	}
	for _, allowed := range []bool{false, true} {
		manifest := text("shop", "db", 80)
		if allowed {
			manifest = string(novel)
		}
		docs, err := decode.Options{AllowUnknown: true}.Decode([]byte(manifest))
		if err != nil {
			t.Fatal(err)
		}
		p := d.policy(docs[0], managed.SourceGRPC, "")
		if place := policyRecord(p).Place; place.Known == allowed || (len(place.Dropped) > 0) != allowed {
			t.Errorf("a call that allowed unknown fields, %t, is written as known %t", allowed, place.Known)
		}
	}
}

// TestPoliciesOfAnEarlierVersionAreMarkedAtTheStart: at its first start, a version stores for each policy that came
// from a call which of its fields the version does not know. If an earlier version is started afterwards, it can tell
// these fields from fields that only the later version knows. It isolates the pods of policies with the latter.
func TestPoliciesOfAnEarlierVersionAreMarkedAtTheStart(t *testing.T) {
	dir := t.TempDir()
	type place = record.Place
	run := func(change record.Change) map[string]place {
		t.Helper()
		out := make(map[string]place)
		j, _, _, err := record.Open(dir, record.Contents{
			Name:       func(string) error { return nil },
			Policy:     func(p record.Policy) error { out[p.Key.Name] = p.Place; return nil },
			Identity:   func(record.Identity) error { return nil },
			Subscriber: func(record.Subscriber) error { return nil },
			DNSName:    func(record.Name) error { return nil },
		})
		if err == nil && len(change.Puts) > 0 {
			err = j.Commit(t.Context(), change)
		}
		if err := errors.Join(err, j.Close()); err != nil {
			t.Fatal(err)
		}
		return out
	}
	var change record.Change
	for name, more := range map[string]string{"plain": "", "typo": "    typo: 1\n"} {
		change.Puts = append(change.Puts, record.Policy{
			Key:    record.Key{Kind: "NetworkPolicy", Namespace: "shop", Name: name},
			Source: managed.SourceGRPC, Manifest: []byte(text("shop", name, 80) + more), Revision: 1,
		})
	}
	change.Revision = 1
	run(change)
	for range 2 {
		_, stop := runWith(t, dir, nil)
		stop()
		got := run(record.Change{})
		if len(got) != 2 || !got["plain"].Known || got["typo"].Known || len(got["typo"].Dropped) != 1 {
			t.Errorf("%+v", got)
		}
	}
}
