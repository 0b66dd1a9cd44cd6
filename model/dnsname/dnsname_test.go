// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package dnsname

import (
	"regexp"
	"strings"
	"testing"
)

func TestPatternsRefuseOtherCharacters(t *testing.T) {
	for _, s := range []string{"a b", " *", "a[b", "é.com", "a/b", "a:b", "a\\.b", "a\n"} {
		if _, err := Parse(s); err == nil {
			t.Errorf("pattern %q", s)
		}
		if _, err := Name(s); err == nil {
			t.Errorf("name %q", s)
		}
	}
	if _, err := Name("*.b"); err == nil {
		t.Error("a name has no wildcards")
	}
}

func TestEqualPatternsHaveEqualTexts(t *testing.T) {
	for _, list := range [][]string{
		{"A.b", "a.B."},
		{"*", "**", "***", "*.", "**.", "***."},
		{"**.X.y", "**.x.y.", "***.x.y"},
		{"x.*.y", "x.**.y", "x.****.y."},
		{"a*b", "a***b."},
		{"**.*.x", "**.**.x"},
	} {
		first, _ := Parse(list[0])
		for _, s := range list[1:] {
			if p, err := Parse(s); err != nil || p != first || p.String() != first.String() {
				t.Errorf("%q is %s, %v; %q is %s", s, p, err, list[0], first)
			}
		}
	}
}

func TestPatternsMatchLikeCilium(t *testing.T) {
	for _, c := range []struct {
		pattern string
		yes, no []string
	}{
		{"cilium.io.", []string{"cilium.io", "CILIUM.io."}, []string{"", "a.cilium.io", "ci.io", "xcilium.io", "cilium.iox"}},
		{"*.cilium.io", []string{"sub.cilium.io"}, []string{"", "cilium.io", "a.b.cilium.io", "a.ci.io"}},
		{"*cilium.io", []string{"cilium.io", "subcilium.io", "sub-cilium.io"}, []string{"www.cilium.io", "blog.cilium.io"}},
		{"sub*.cilium.io", []string{"sub.cilium.io", "subdomain.cilium.io"}, []string{"www.cilium.io", "cilium.io"}},
		{"*.ci*.io", []string{"a.cilium.io", "a.ci.io", "a.ciliumandmore.io"}, []string{"", "cilium.io"}},
		{"*.ci**.io", []string{"a.cilium.io", "a.ci.io"}, []string{"cilium.io", "a.ci.x.io"}},
		{"test.**.cilium.io", []string{"test.a.cilium.io"}, []string{"test.a.b.cilium.io", "test.cilium.io"}},
		{"**.cilium.io", []string{"test.cilium.io", "test.app.cilium.io"}, []string{"", "cilium.io", "a.ci.io"}},
		{"***.cilium.io", []string{"test.cilium.io", "test.app.cilium.io"}, []string{"", "cilium.io", "xcilium.io"}},
		{"**.*.cilium.io", []string{"_a._tcp.cilium.io", "_a._b._tcp.cilium.io"}, []string{"cilium.io", "foo.cilium.io"}},
		{"**.ci*.io", []string{"foo.bar.cilium.io", "a.cilium.io", "a.ci.io"}, []string{"cilium.io", "test.calium.io"}},
		{"**cilium.io", []string{"cilium.io", "xcilium.io"}, []string{"a.cilium.io"}},
		{"*.*.cilium.io", []string{"_foobar._tcp.cilium.io"}, []string{"", "a.cilium.io", "a.b.c.cilium.io"}},
		{"*", []string{"", ".", "io", "a.b.svc.cluster.local", "_a._tcp.io"}, []string{".io", "..", "a..io", "ä.io"}},
		{"***.", []string{"", ".", "io", "a.io"}, []string{".io", "a..io"}},
		{".", []string{"", "."}, []string{".io", "io"}},
		{"k.example", []string{"K.example"}, []string{"\u212a.example"}}, // the Kelvin sign
	} {
		p, err := Parse(c.pattern)
		if err != nil {
			t.Errorf("pattern %q: %v", c.pattern, err)
			continue
		}
		for want, names := range map[bool][]string{true: c.yes, false: c.no} {
			for _, name := range names {
				if p.Matches(name) != want {
					t.Errorf("%q matches %q: %t", c.pattern, name, !want)
				}
			}
		}
	}
}

func TestNoNameMatchesTheZeroPattern(t *testing.T) {
	for _, name := range []string{"", ".", "a"} {
		if (Pattern{}).Matches(name) || NewSet([]Pattern{{}}).Matches(name) || (&Set{}).Matches(name) {
			t.Errorf("name %q", name)
		}
	}
}

func TestNamesMatchThemselves(t *testing.T) {
	p, err := Name("Www.Example.com")
	if err != nil || !p.Matches("www.example.COM.") || p.Matches("example.com") || p.Matches("a.www.example.com") {
		t.Errorf("%s, %v", p, err)
	}
}

// expression returns the regular expression that Cilium makes of a pattern.
func expression(pattern string) string {
	const char = "[-a-zA-Z0-9_]"
	if regexp.MustCompile(`^[*]+[.]?$`).MatchString(pattern) {
		return `^(` + char + `+[.])+$|^[.]$`
	}
	e := strings.ToLower(pattern)
	if !strings.HasSuffix(e, ".") {
		e += "."
	}
	e = strings.ReplaceAll(e, ".", "[.]")
	e = regexp.MustCompile(`^[*]{2,}\[\.\]`).ReplaceAllLiteralString(e, "("+char+"+([.]"+char+"+){0,})[.]")
	return "^" + regexp.MustCompile("[*]+").ReplaceAllLiteralString(e, char+"*") + "$"
}

// FuzzPattern compares patterns and sets with regular expressions of the same meaning.
func FuzzPattern(f *testing.F) {
	for _, s := range [][2]string{
		{"*.example.com", "a.example.com"},
		{"**.example.com", "a.b.example.com."},
		{"***.example.com", "a.b.example.com."},
		{"*", "."},
		{"a*b*.c", "aXbY.c"},
		{"a***b.c", "aXb.c"},
		{"**.*.x", "a.b.x"},
		{"**..x", "a..x"},
		{"*.", "x"},
		{"a.**", "a.b"},
		{"*.a", ".a"},
		{"x.**.y", "x..y"},
		{"*a*a*a*a*b", "aaaaaaaaaaaaaaaa"},
		{"A.B.", "a.b"},
		{"k", "\u212a"},
	} {
		f.Add(s[0], s[1])
	}
	f.Fuzz(func(t *testing.T, pattern, name string) {
		if len(pattern) > 100 || len(name) > 300 {
			return
		}
		p, err := Parse(pattern)
		if ok := regexp.MustCompile(`\A[-a-zA-Z0-9_.*]*\z`).MatchString(pattern); ok != (err == nil) {
			t.Fatalf("%q: %v", pattern, err)
		}
		if err != nil {
			return
		}
		if again, err := Parse(p.String()); err != nil || again != p {
			t.Fatalf("%q is %s, and that %s, %v", pattern, p, again, err)
		}
		expr := expression(pattern)
		want := regexp.MustCompile(expr).MatchString(Canonical(name))
		if got := p.Matches(name); got != want {
			t.Errorf("%q matches %q: %t, want %t by %s", pattern, name, got, want, expr)
		}
		other, _ := Parse("**.other.example")
		if got := NewSet([]Pattern{p, p, other}).Matches(name); got != (want || other.Matches(name)) {
			t.Errorf("a set with %q matches %q: %t", pattern, name, got)
		}
	})
}

func BenchmarkSet(b *testing.B) {
	var patterns []Pattern
	for i := range 3000 {
		n := strings.Repeat("x", i%50) + string(rune('a'+i%26)) + ".example.com"
		for _, prefix := range []string{"", "*.", "**."} {
			p, _ := Parse(prefix + n)
			patterns = append(patterns, p)
		}
	}
	s := NewSet(patterns)
	for b.Loop() {
		s.Matches("www.some.name.of.a.server.example.org.")
	}
}

// TestCostlyPatternsAreThoseThatASetComparesOneByOne also checks that a long name is compared in one pass.
func TestCostlyPatternsAreThoseThatASetComparesOneByOne(t *testing.T) {
	for text, want := range map[string]bool{
		"*": false, "a.b": false, "*.a.b": false, "**.a.b": false, "a*.b": true, "*a.b": true, "a.*.b": true, "*.*.b": true,
		"**.*.b": true, "**.a*": true,
	} {
		p, err := Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		if p.Costly() != want || len(NewSet([]Pattern{p}).others) == 1 != want {
			t.Errorf("%s: costly %t, want %t", text, p.Costly(), want)
		}
	}
	deep, _ := Parse("**.a*.b")
	for name, want := range map[string]bool{
		"x.a.b": true, "x.y.z.ab.b": true, "a.b": false, "x..a.b": false, ".a.b": false, "x!.a.b": false, "x.b.b": false,
	} {
		if deep.Matches(name) != want {
			t.Errorf("%s matches %s: want %t", deep, name, want)
		}
	}
}
