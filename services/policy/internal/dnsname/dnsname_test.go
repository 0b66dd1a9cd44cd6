// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package dnsname

import (
	"regexp"
	"strings"
	"testing"
)

func TestPatternsRefuseOtherCharacters(t *testing.T) {
	for _, s := range []string{"a b", "a[b", "é.com", "a/b", "a:b"} {
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
	for _, pair := range [][2]string{{"A.b", "a.B."}, {"*", "**"}, {"**.X.y", "**.x.y."}} {
		a, _ := Parse(pair[0])
		b, _ := Parse(pair[1])
		if a.String() != b.String() {
			t.Errorf("%q is %s, %q is %s", pair[0], a, pair[1], b)
		}
	}
}

// FuzzMatches compares a pattern with the equivalent regular expression.
func FuzzMatches(f *testing.F) {
	f.Add("*.example.com", "a.example.com")
	f.Add("**.example.com", "a.b.example.com.")
	f.Add("a*b*.c", "axbx.c")
	f.Add("**", ".")
	f.Add("x.**.y", "x..y")
	f.Fuzz(func(t *testing.T, pattern, name string) {
		p, err := Parse(pattern)
		if err != nil || len(pattern) > 60 || len(name) > 100 {
			return
		}
		if strings.IndexFunc(name, func(r rune) bool { return r > 127 }) >= 0 {
			return // names are ASCII by the time they are compared
		}
		const char = `[-a-z0-9_]`
		text := Canonical(pattern)
		var expr string
		switch rest, deep := strings.CutPrefix(text, "**."); {
		case text == "*." || text == "**.":
			expr = `^((` + char + `+\.)+|\.)$`
		case deep:
			expr = `^(` + char + `+\.)+` + strings.ReplaceAll(regexp.QuoteMeta(rest), `\*`, char+`*`) + `$`
		default:
			expr = `^` + strings.ReplaceAll(regexp.QuoteMeta(text), `\*`, char+`*`) + `$`
		}
		want := regexp.MustCompile(expr).MatchString(Canonical(name))
		if got := p.Matches(name); got != want {
			t.Errorf("%q matches %q: %t, the expression %s: %t", pattern, name, got, expr, want)
		}
	})
}

// FuzzPattern compares patterns with regular expressions of the same meaning.
func FuzzPattern(f *testing.F) {
	for _, s := range [][2]string{
		{"*.example.com", "a.example.com"},
		{"**.example.com", "a.b.example.com."},
		{"*", "."},
		{"a*b*.c", "aXbY.c"},
		{"**.*.x", "a.b.x"},
		{"***.a", "b.a"},
		{"a.**", "a.b"},
		{"*a*a*a*a*b", "aaaaaaaaaaaaaaaa"},
		{"A.B.", "a.b"},
	} {
		f.Add(s[0], s[1])
	}
	f.Fuzz(func(t *testing.T, pattern, name string) {
		if len(pattern) > 100 || len(name) > 300 {
			return
		}
		p, err := Parse(pattern)
		if err != nil {
			return
		}
		if again, err := Parse(p.String()); err != nil || again.String() != p.String() {
			t.Fatalf("%q is %s, and that %s, %v", pattern, p, again, err)
		}
		const char, word = "[-_0-9A-Za-z]", "[-_0-9A-Za-z]+"
		text := p.String()
		expr := "\\A(?:" + word + "(?:\\." + word + ")*)?\\.\\z"
		if text != "*" {
			expr = "\\A"
			if rest, ok := strings.CutPrefix(text, "**."); ok {
				expr, text = "\\A"+word+"(?:\\."+word+")*\\.", rest
			}
			for _, c := range text {
				if c == '*' {
					expr += char + "*"
				} else {
					expr += regexp.QuoteMeta(string(c))
				}
			}
			expr += "\\z"
		}
		if got, want := p.Matches(name), regexp.MustCompile(expr).MatchString(Canonical(name)); got != want {
			t.Fatalf("%q matches %q: %t, want %t by %s", pattern, name, got, want, expr)
		}
	})
}
