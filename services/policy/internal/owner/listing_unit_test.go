// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/policy/internal/decode"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// documents returns a file with the given documents.
func documents(t *testing.T, texts ...string) *file {
	t.Helper()
	f := &file{}
	for _, text := range texts {
		docs, err := decode.Options{}.Decode([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		f.docs = append(f.docs, docs...)
	}
	return f
}

func listingOf(source string, files map[string]*file) *listing {
	return &listing{source: source, files: files, order: slices.Sorted(maps.Keys(files))}
}

// freshNames returns the names of the policies that a listing adds.
func (l *listing) freshNames() (out []string) {
	for _, f := range l.fresh {
		for _, p := range f.policies {
			out = append(out, p.Key.Name)
		}
	}
	return out
}

func TestListingOfFilesIsWhatThereIs(t *testing.T) {
	d, s := newDesk(t, 10), someSources(t, t.TempDir())
	c := &comparison{s, d.policySet, d.places, d.forms}
	files := map[string]*file{
		"a.yaml": documents(t, text("shop", "one", 80), text("shop", "two", 80)),
		"b.yaml": documents(t, text("shop", "three", 80)),
		"c.yaml": {err: errors.New("is no YAML")},
	}
	l := listingOf(managed.SourceFile, files)
	c.compare(l)
	if got := l.freshNames(); !slices.Equal(got, []string{"one", "two", "three"}) || len(l.gone) > 0 || l.bad["c.yaml"].err != "is no YAML" {
		t.Fatalf("the first listing adds %q, removes %v, refuses %v", got, l.gone, l.bad)
	}
	d.change(l.edit())
	// List the same files again, except that one is removed and one changed.
	delete(files, "b.yaml")
	files["a.yaml"] = documents(t, text("shop", "one", 80), text("shop", "two", 81))
	l = listingOf(managed.SourceFile, files)
	c.compare(l)
	if got := l.freshNames(); !slices.Equal(got, []string{"two"}) || len(l.gone) != 1 || l.gone[0].Name != "three" {
		t.Errorf("the second listing adds %q and removes %v", got, l.gone)
	}
	// An unreadable file keeps its policies.
	l = listingOf(managed.SourceFile, map[string]*file{"a.yaml": {err: errors.New("is no YAML")}, "b.yaml": {keep: true}})
	c.compare(l)
	if len(l.fresh)+len(l.gone) > 0 || l.bad["a.yaml"].err == "" {
		t.Errorf("with no readable file: %q added, %v removed, %v refused", l.freshNames(), l.gone, l.bad)
	}
}

func TestOnlyChangedFilesAreCompared(t *testing.T) {
	d, s := newDesk(t, 1000), someSources(t, t.TempDir())
	c := &comparison{s, d.policySet, d.places, d.forms}
	random := rand.New(rand.NewPCG(1, 2))
	some := func(number int) *file { // rarely with a policy of another file
		var texts []string
		for i := range 12 {
			if i/3 == number && random.IntN(2) == 0 || random.IntN(600) == 0 {
				texts = append(texts, text("shop", fmt.Sprint("p", i), 80+random.IntN(3)))
			}
		}
		return documents(t, texts...)
	}
	// result is the change of a listing as text.
	result := func(l *listing) string {
		var all []string
		for _, f := range l.fresh {
			for _, p := range f.policies {
				all = append(all, fmt.Sprintf("%s %s %q %s", f.origin, p.Key, p.Broken, p.Manifest))
			}
		}
		return fmt.Sprintf("%q, removed %v, refused %v", all, l.gone, l.bad)
	}
	files := map[string]*file{}
	var before *enforced
	short := 0
	for turn := range 600 {
		next := maps.Clone(files)
		number := random.IntN(4)
		switch name := fmt.Sprintf("%d.yaml", number); random.IntN(40) {
		case 0, 3:
			delete(next, name)
		case 1:
			next[name] = &file{err: errors.New("is no YAML")}
		case 2:
			next[name] = &file{keep: true}
		default:
			next[name] = some(number)
		}
		if random.IntN(20) == 0 { // another source gets a policy, or loses one
			k := policy.Key{Kind: "NetworkPolicy", Namespace: "shop", Name: fmt.Sprint("p", random.IntN(12))}
			if p := d.all[k]; p == nil {
				docs := documents(t, text("shop", k.Name, 90)).docs
				d.change(edit{puts: []*Policy{d.policy(docs[0], managed.SourceGRPC, "")}})
			} else if p.Source == managed.SourceGRPC {
				d.change(edit{gone: []policy.Key{k}})
			}
		}
		whole, fast := listingOf(managed.SourceFile, next), listingOf(managed.SourceFile, next)
		fast.before = before
		c.compare(whole)
		c.compare(fast)
		if got, want := result(fast), result(whole); got != want {
			t.Fatalf("turn %d: the comparison of changed files is %s\nof all files: %s", turn, got, want)
		}
		if probe := (&listing{source: fast.source, order: fast.order, files: next, before: before}); c.compareChanged(probe) {
			short++
		}
		d.change(fast.edit())
		before, files = fast.enforced(d.policySet), next
		// The comparison of all files must give the same result as the comparison of changed files.
		all := *fast
		all.before = nil
		if want := all.enforced(d.policySet); (before == nil) != (want == nil) {
			t.Fatalf("turn %d: all policies of the files are enforced as written: %v, want %v", turn, before != nil, want != nil)
		}
	}
	if short < 100 {
		t.Errorf("only %d of 600 listings compared only changed files", short)
	}
}

func TestSecondOfTwoPoliciesWithOneKey(t *testing.T) {
	d, s := newDesk(t, 10), someSources(t, t.TempDir())
	c := &comparison{s, d.policySet, d.places, d.forms}
	one := text("shop", "one", 80)
	l := listingOf(managed.SourceFile, map[string]*file{"a.yaml": documents(t, one), "b.yaml": documents(t, one)})
	c.compare(l)
	if len(l.fresh) != 2 || len(l.bad) > 0 {
		t.Fatalf("%d files add policies, %v are refused", len(l.fresh), l.bad)
	}
	if first, second := l.fresh[0].policies[0], l.fresh[1].policies[0]; first.Broken != "" || !strings.Contains(second.Broken, "a.yaml") {
		t.Errorf("the first is broken by %q; the second, which isolates, by %q", first.Broken, second.Broken)
	}
	d.change(l.edit())
	// An object of an API server isolates what it selects, too.
	object := documents(t, one)
	key := object.docs[0].Object.Key
	l = listingOf(managed.SourceKubernetes, map[string]*file{key.String(): object})
	l.deltas = true
	c.compare(l)
	if len(l.fresh) != 1 || len(l.bad) > 0 ||
		!strings.Contains(l.fresh[0].policies[0].Broken, "belongs to the source file") {
		t.Errorf("adds %q, refuses %v", l.freshNames(), l.bad)
	}
	// Only a complete listing removes the policies that it does not contain.
	d.replace([]*Policy{d.make(managed.SourceKubernetes, "shop", 7)}, nil)
	for _, listed := range []map[string]struct{}{nil, {}} {
		l = &listing{source: managed.SourceKubernetes, deltas: true, listed: listed}
		c.compare(l)
		if want := listed != nil; (len(l.gone) == 1) != want {
			t.Errorf("complete %v: %v removed", want, l.gone)
		}
	}
	removed := d.make(managed.SourceKubernetes, "shop", 7).Key
	l = &listing{source: managed.SourceKubernetes, deltas: true, removed: map[string]policy.Key{removed.String(): removed}}
	if c.compare(l); !slices.Equal(l.gone, []policy.Key{removed}) {
		t.Errorf("%s is removed by its source, but %v are removed", removed, l.gone)
	}
}

func TestIdentitiesThatStayTheSameAreNoChange(t *testing.T) {
	s := &identities{all: make(map[identity.Numeric]peer.Identity), cluster: "default"}
	as := func(n identity.Numeric, app string) peer.Identity {
		id, err := peer.New(n, label.NewSet(label.Label{Source: label.SourceKubernetes, Key: "app", Value: app}))
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	c, rec := s.take([]peer.Identity{as(300, "web"), as(301, "db")}, []identity.Numeric{302})
	if len(c.AddIdentities) != 2 || len(c.RemoveIdentities) > 0 || len(rec.Identities) != 2 || len(rec.GoneIdentities) > 0 {
		t.Fatalf("two new ones: %+v, %+v", c, rec)
	}
	c, rec = s.take([]peer.Identity{as(300, "web"), as(301, "cache")}, nil)
	if len(c.AddIdentities) != 1 || c.AddIdentities[0].Number != 301 || len(rec.Identities) != 1 {
		t.Errorf("one has other labels: %+v, %+v", c, rec)
	}
	if got := s.others(map[identity.Numeric]struct{}{301: {}, 400: {}}); !slices.Equal(got, []identity.Numeric{300}) {
		t.Errorf("not listed are %v", got)
	}
	c, rec = s.take(nil, []identity.Numeric{300})
	if len(c.RemoveIdentities) != 1 || len(rec.GoneIdentities) != 1 || len(s.all) != 1 {
		t.Errorf("one is removed: %+v, %+v, %v left", c, rec, s.all)
	}
}
