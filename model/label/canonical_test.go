// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package label

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func must(t testing.TB, labels ...Label) Canonical {
	t.Helper()
	set, err := Canonicalize(labels...)
	if err != nil {
		t.Fatalf("Canonicalize(%v): %v", labels, err)
	}
	return set
}

func TestEqualSetsHaveEqualTexts(t *testing.T) {
	labels := []Label{
		{"k8s", "app", "web"},
		{"k8s", "a;b=c\\", "x=y;z\\"},
		{"cni", "app", "web"},
		{"k8s", "empty", ""},
		{"k8s", "with:colon", "v:w"},
		{"k8s", "ключ", "знач"},
	}
	want := must(t, labels...)
	for range 50 {
		shuffled := slices.Clone(labels)
		rand.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		shuffled = append(shuffled, shuffled[0]) // a duplicate changes nothing
		if got := must(t, shuffled...); got.Text() != want.Text() || got.Hash() != want.Hash() {
			t.Fatalf("%v gives %q, want %q", shuffled, got, want)
		}
	}
	if want.Text() != `cni:app=web;k8s:a\;b\=c\\=x=y\;z\\;k8s:app=web;k8s:empty=;k8s:with:colon=v:w;k8s:ключ=знач;` {
		t.Errorf("text is %s", want)
	}
	parsed, err := Parse(want.Text())
	if err != nil || !slices.Equal(parsed.All(), want.All()) {
		t.Errorf("Parse(%q) = %v, %v", want, parsed.All(), err)
	}
}

// TestStoredFormsStayWhatTheyAre: both forms are stored in etcd and on the disks of nodes. A change that makes this
// test fail needs a migration.
func TestStoredFormsStayWhatTheyAre(t *testing.T) {
	for _, c := range []struct {
		labels     []Label
		text, hash string
	}{
		{
			[]Label{{"k8s", "app", "web"}},
			"k8s:app=web;",
			"d7733133299d1e288889f2837ba173f9d90e620d3019f7d357cc10f2ec3dcdd7",
		},
		{
			[]Label{
				{"k8s", "io.kubernetes.pod.namespace", "shop"},
				{"k8s", "app", "web"},
				{"cni", "team", ""},
				{"generated", "named-ports", "http.TCP.80"},
			},
			"cni:team=;generated:named-ports=http.TCP.80;k8s:app=web;k8s:io.kubernetes.pod.namespace=shop;",
			"72530e0c96bb9e720f2b1ef353e37436a84baf2ba8fb6394b683cd98c1f41f02",
		},
		{
			[]Label{{"k8s", "b", "1"}, {"cni", "z", "2"}, {"k8s", "a", "3"}},
			"cni:z=2;k8s:a=3;k8s:b=1;",
			"be04747f5f5e213e46a90970f9a384c47be0c67a2be2d55738119fb2c4bc0e23",
		},
		{
			[]Label{{"cni", `a;b=c\`, `x=y;z\`}},
			`cni:a\;b\=c\\=x=y\;z\\;`,
			"3a5bdc15f1c065c2011cf17075c75634279c7bc9c69178b752cec5d4605f3c8e",
		},
		{
			[]Label{{"generated", "no-labels", ""}},
			"generated:no-labels=;",
			"c348510ee9c624337a4401f95c4618500863c05dcc6f741791e838fb6e5e2993",
		},
	} {
		set := must(t, c.labels...)
		if hash := set.Hash(); set.Text() != c.text || hex.EncodeToString(hash[:]) != c.hash {
			t.Errorf("%v is stored as %s under %x, want %s under %s", c.labels, set, hash, c.text, c.hash)
		}
	}
}

func TestStoredLabelsOfEndpointsStayWhatTheyAre(t *testing.T) {
	b, err := json.Marshal([]Label{{"k8s", "app", "web"}, {"cni", "team", ""}})
	want := `[{"source":"k8s","key":"app","value":"web"},{"source":"cni","key":"team"}]`
	if err != nil || string(b) != want {
		t.Errorf("%s, %v, want %s", b, err, want)
	}
}

func TestDifferentSetsHaveDifferentTexts(t *testing.T) {
	sets := []Canonical{
		must(t, Label{"k8s", "a", "b;k8s:c=d"}), must(t, Label{"k8s", "a", "b"}, Label{"k8s", "c", "d"}),
		must(t, Label{"k8s", "a=b", "c"}), must(t, Label{"k8s", "a", "b=c"}),
		must(t, Label{"k8s", "a", `\`}), must(t, Label{"k8s", "a", `\\`}),
	}
	for i, a := range sets {
		for _, b := range sets[:i] {
			if a.Text() == b.Text() {
				t.Errorf("%v and %v have the text %q", a.All(), b.All(), a)
			}
		}
	}
}

func TestBadLabelsAreRefusedWithTheField(t *testing.T) {
	good := Label{"k8s", "app", "web"}
	many := make([]Label, MaxLabels+1)
	for i := range many {
		many[i] = Label{"k8s", fmt.Sprint("k", i), ""}
	}
	large := make([]Label, 100)
	for i := range large {
		large[i] = Label{"k8s", fmt.Sprint("k", i), strings.Repeat("v", MaxValue)}
	}
	for _, c := range []struct {
		name   string
		labels []Label
		field  string
	}{
		{"none", nil, "labels"},
		{"no source", []Label{good, {"", "a", "b"}}, "labels[1].source"},
		{"upper case source", []Label{{"K8s", "a", "b"}}, "labels[0].source"},
		{"source that begins with a hyphen", []Label{{"-k8s", "a", "b"}}, "labels[0].source"},
		{"source that ends with a hyphen", []Label{{"k8s-", "a", "b"}}, "labels[0].source"},
		{"long source", []Label{{strings.Repeat("a", 64), "a", "b"}}, "labels[0].source"},
		{"no key", []Label{good, {"k8s", "", "b"}}, "labels[1].key"},
		{"long key", []Label{{"k8s", strings.Repeat("k", MaxKey+1), ""}}, "labels[0].key"},
		{"newline", []Label{{"k8s", "a\nb", ""}}, "labels[0].key"},
		{"long value", []Label{{"k8s", "a", strings.Repeat("v", MaxValue+1)}}, "labels[0].value"},
		{"broken UTF-8", []Label{{"k8s", "a", "\xff"}}, "labels[0].value"},
		{"NUL", []Label{{"k8s", "a", "\x00"}}, "labels[0].value"},
		{"two values", []Label{{"k8s", "app", "b"}, {"k8s", "app", "c"}}, "labels[1].key"},
		{"too many", many, "labels"},
		{"too large", large, "labels"},
	} {
		_, err := Canonicalize(c.labels...)
		var e *Error
		if !errors.As(err, &e) || e.Field() != c.field || !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: error %v, want one about %s", c.name, err, c.field)
		}
	}
}

func TestTextThatIsNotCanonicalIsRefused(t *testing.T) {
	for _, text := range []string{
		"", "k8s", "k8s:", "k8s:a", "k8s:a=b", "a=b;", "k8s:b=;k8s:a=;", "k8s:a=;k8s:a=;",
		`k8s:a=\b;`, `k8s:a=b\=c;`, `k8s:a=b\`, "K8s:a=b;", "k8s:=b;", "k8s:a=b;;",
	} {
		if set, err := Parse(text); err == nil {
			t.Errorf("Parse(%q) = %q, want an error", text, set)
		}
	}
}

func FuzzLabelsTextRoundTrips(f *testing.F) {
	f.Add("k8s:app=web;")
	f.Add(`cni:a\=b\;=c\\;k8s:x=y=z;`)
	f.Add("k8s:a=;k8s:b=;")
	f.Fuzz(func(t *testing.T, text string) {
		set, err := Parse(text)
		if err != nil {
			return
		}
		if set.Text() != text {
			t.Fatalf("Parse(%q) has the text %q", text, set)
		}
		again, err := Canonicalize(set.All()...)
		if err != nil || again.Text() != text {
			t.Fatalf("labels of %q give %q, %v", text, again, err)
		}
	})
}

func FuzzLabelsFromAnything(f *testing.F) {
	f.Add("k8s", "app", "web", "cni", "a=b;", `c\`)
	f.Add("", "", "", "reserved", "host", "\x00")
	f.Fuzz(func(t *testing.T, s1, k1, v1, s2, k2, v2 string) {
		a, b := Label{s1, k1, v1}, Label{s2, k2, v2}
		x, errX := Canonicalize(a, b)
		y, errY := Canonicalize(b, a, b)
		if (errX == nil) != (errY == nil) || x.Text() != y.Text() {
			t.Fatalf("order matters: %q %v, %q %v", x, errX, y, errY)
		}
		if errX != nil {
			return
		}
		if !slices.IsSortedFunc(x.All(), Label.Compare) {
			t.Fatalf("%v is not sorted", x.All())
		}
		back, err := Parse(x.Text())
		if err != nil || !slices.Equal(back.All(), x.All()) {
			t.Fatalf("%q parses to %v, %v, want %v", x, back.All(), err, x.All())
		}
	})
}
