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

// FuzzMatches compares with a regular expression made from the same pattern.
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
			t.Errorf("%q matches %q: %t, the expression %s says %t", pattern, name, got, expr, want)
		}
	})
}
