// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"maps"
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
	// The same files again, with one removed and one changed.
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
	// Its policies are removed when the source has listed the others, and not before.
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
