// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package selector

import (
	"runtime"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/label"
)

var labels = label.NewSet(
	label.Kubernetes("app", "web"),
	label.Label{Source: "cni", Key: "app", Value: "other"},
	label.Kubernetes("empty", ""),
	label.Reserved("host"),
	label.Label{Source: label.SourceGenerated, Key: "hidden", Value: "x"},
)

func TestRequirements(t *testing.T) {
	for _, tc := range []struct {
		r    Requirement
		want bool
	}{
		{Requirement{Source: "k8s", Key: "app", Op: In, Values: []string{"web"}}, true},
		{Requirement{Source: "k8s", Key: "app", Op: In, Values: []string{"other"}}, false},
		{Requirement{Key: "app", Op: In, Values: []string{"other"}}, true},
		{Requirement{Key: "app", Op: NotIn, Values: []string{"other"}}, false},
		{Requirement{Source: "k8s", Key: "app", Op: NotIn, Values: []string{"other"}}, true},
		{Requirement{Key: "absent", Op: NotIn, Values: []string{"x"}}, true},
		{Requirement{Key: "absent", Op: In, Values: []string{""}}, false},
		{Requirement{Key: "empty", Op: In, Values: []string{""}}, true},
		{Requirement{Key: "empty", Op: Exists}, true},
		{Requirement{Key: "absent", Op: DoesNotExist}, true},
		{Requirement{Source: "reserved", Key: "host", Op: Exists}, true},
		{Requirement{Source: "k8s", Key: "host", Op: Exists}, false},
		{Requirement{Key: "hidden", Op: Exists}, false},
		{Requirement{Key: "hidden", Op: NotIn, Values: []string{"x"}}, true},
	} {
		if got := tc.r.Matches(labels); got != tc.want {
			t.Errorf("%s: %t", tc.r.text(), got)
		}
		if got := New(tc.r).Matches(labels); got != tc.want {
			t.Errorf("selector %s: %t", tc.r.text(), got)
		}
	}
}

func TestEqualSelectorsHaveEqualTexts(t *testing.T) {
	a := Requirement{Key: "a", Op: In, Values: []string{"x", "y"}}
	b := Requirement{Source: "k8s", Key: "b", Op: Exists}
	same := Requirement{Key: "a", Op: In, Values: []string{"y", "x", "y"}}
	if New(a, b).String() != New(b, same, a).String() {
		t.Errorf("%q and %q", New(a, b), New(b, same, a))
	}
	for _, other := range []Selector{New(), New(a), New(b), New(a, Requirement{Key: "b", Op: Exists}), New(Requirement{Key: "a", Op: In, Values: []string{"x y"}}, b)} {
		if other.String() == New(a, b).String() {
			t.Errorf("%q", other)
		}
	}
	if !New().Matches(label.NewSet()) || New(a).Matches(label.NewSet()) {
		t.Error("the empty selector does not match everything")
	}
}

// TestImpliedSelectorsMatchMore compares Implies with its definition, for every label set over two keys and two
// sources.
func TestImpliedSelectorsMatchMore(t *testing.T) {
	values := [][]string{{"x"}, {"y"}, {"x", "y"}}
	var reqs []Requirement
	for _, key := range []string{"a", "b"} {
		for _, source := range []string{"", "k8s", "cni"} {
			for _, v := range values {
				reqs = append(reqs, Requirement{Source: source, Key: key, Op: In, Values: v},
					Requirement{Source: source, Key: key, Op: NotIn, Values: v})
			}
			reqs = append(reqs, Requirement{Source: source, Key: key, Op: Exists},
				Requirement{Source: source, Key: key, Op: DoesNotExist})
		}
	}
	var sets []label.Set
	for i := range 4 * 4 * 4 {
		var ls []label.Label
		for k, place := range []label.Label{{Source: "k8s", Key: "a"}, {Source: "cni", Key: "a"}, {Source: "k8s", Key: "b"}} {
			if v := i >> (2 * k) & 3; v > 0 {
				place.Value = string("-xyz"[v])
				ls = append(ls, place)
			}
		}
		sets = append(sets, label.NewSet(ls...))
	}
	implied := 0
	for _, a := range reqs {
		for _, b := range reqs {
			if !New(a).Implies(New(b)) {
				continue
			}
			implied++
			for _, ls := range sets {
				if New(a).Matches(ls) && !New(b).Matches(ls) {
					t.Fatalf("%s implies %s, but only the first matches %v", a.text(), b.text(), ls)
				}
			}
		}
	}
	if implied < len(reqs) {
		t.Errorf("%d pairs are implied, but each of %d requirements implies itself", implied, len(reqs))
	}
	web := New(Requirement{Source: "k8s", Key: "a", Op: In, Values: []string{"x"}},
		Requirement{Key: "b", Op: NotIn, Values: []string{"x", "y"}})
	for _, wider := range []Selector{
		{},
		web, New(Requirement{Key: "a", Op: Exists}), New(Requirement{Key: "a", Op: In, Values: []string{"x", "z"}}),
		New(Requirement{Source: "k8s", Key: "b", Op: NotIn, Values: []string{"y"}}),
	} {
		if !web.Implies(wider) {
			t.Errorf("%s does not imply %s", web, wider)
		}
	}
	for _, narrower := range []Selector{
		New(Requirement{Source: "cni", Key: "a", Op: Exists}), New(Requirement{Key: "b", Op: DoesNotExist}),
		New(Requirement{Key: "c", Op: DoesNotExist}),
		New(Requirement{Source: "k8s", Key: "a", Op: In, Values: []string{"y"}}),
	} {
		if web.Implies(narrower) {
			t.Errorf("%s implies %s", web, narrower)
		}
	}
}

func TestParseOp(t *testing.T) {
	for _, o := range []Op{In, NotIn, Exists, DoesNotExist} {
		if got, ok := ParseOp(o.String()); !ok || got != o {
			t.Errorf("%s: %v %t", o, got, ok)
		}
	}
	if _, ok := ParseOp("in"); ok {
		t.Error("ParseOp ignores case")
	}
}

func TestEqualSelectorsAreOne(t *testing.T) {
	t.Parallel()
	a := New(Requirement{Key: "x", Op: Exists}, Requirement{Source: "k8s", Key: "y", Op: In, Values: []string{"2", "1"}})
	b := New(Requirement{Source: "k8s", Key: "y", Op: In, Values: []string{"1", "2", "1"}}, Requirement{Key: "x", Op: Exists}, Requirement{Key: "x", Op: Exists})
	if a != b || a.String() != b.String() {
		t.Errorf("%s and %s differ", a, b)
	}
	if New() != (Selector{}) {
		t.Error("the selector that matches everything is not the zero Selector")
	}
	if c := New(Requirement{Key: "x", Op: Exists}); c == a {
		t.Errorf("%s equals %s", c, a)
	}
}

// TestContentOfSelectorsIsForgottenWithTheLastOne: the content of a selector is removed with its last user.
func TestContentOfSelectorsIsForgottenWithTheLastOne(t *testing.T) {
	has := func(text string) bool { _, ok := interned.Load(text); return ok }
	s := New(Requirement{Key: "only-here", Op: Exists})
	text := strings.Clone(s.String())
	if !has(text) {
		t.Fatal("not interned")
	}
	runtime.GC()
	if again := New(Requirement{Key: "only-here", Op: Exists}); again != s {
		t.Fatal("two selectors of one text")
	}
	for range 1000 { // the cleanup runs some time after the collection
		runtime.GC()
		if !has(text) {
			return
		}
		runtime.Gosched()
	}
	t.Error("still there")
}

// TestGeneratedLabelsAreInvisible: selectors cannot match labels that the identity service adds for its own use.
func TestGeneratedLabelsAreInvisible(t *testing.T) {
	t.Parallel()
	only := label.NewSet(label.Label{Source: label.SourceGenerated, Key: "g", Value: "v"})
	for _, source := range []string{"", label.SourceGenerated, label.SourceKubernetes} {
		for op, want := range map[Op]bool{In: false, NotIn: true, Exists: false, DoesNotExist: true} {
			r := Requirement{Source: source, Key: "g", Op: op}
			if op == In || op == NotIn {
				r.Values = []string{"v"}
			}
			if got := New(r).Matches(only); got != want {
				t.Errorf("%s: %t", r.text(), got)
			}
		}
	}
}

func TestContradictionsAreFound(t *testing.T) {
	k := func(key string, op Op, values ...string) Requirement {
		return Requirement{Source: "k8s", Key: key, Op: op, Values: values}
	}
	for _, c := range []struct {
		reqs []Requirement
		want bool
	}{
		{nil, false},
		{[]Requirement{k("a", In, "1"), k("a", In, "2")}, true},
		{[]Requirement{k("a", In, "1", "3"), k("a", In, "2", "3")}, false},
		{[]Requirement{k("a", In, "1", "3"), k("a", In, "2", "3"), k("a", NotIn, "3")}, true},
		{[]Requirement{k("a", In, "1"), k("b", In, "2")}, false},
		{[]Requirement{k("a", In, "1"), {Source: "cni", Key: "a", Op: In, Values: []string{"2"}}}, false},
		{[]Requirement{k("a", In, "1"), {Key: "a", Op: In, Values: []string{"2"}}}, false}, // of two sources
		{[]Requirement{k("a", In, "1"), k("a", DoesNotExist)}, true},
		{[]Requirement{k("a", Exists), k("a", DoesNotExist)}, true},
		{[]Requirement{k("a", NotIn, "1"), k("a", DoesNotExist)}, false},
		{[]Requirement{k("a", NotIn, "1"), k("a", NotIn, "2")}, false},
	} {
		if got := New(c.reqs...).Contradiction(); (got != "") != c.want {
			t.Errorf("%v: %q, want a contradiction: %t", New(c.reqs...), got, c.want)
		}
	}
}
