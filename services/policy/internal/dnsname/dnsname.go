// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package dnsname implements patterns for DNS names.
//
// A pattern is a literal name or has wildcards: "*" matches any number of characters within one label, including
// none. "**." at the start matches one or more labels. A lone "*" or "**" matches every name. Names are compared in
// lower case and with one final dot. "*" also covers the characters '-' and '_'.
package dnsname

import (
	"fmt"
	"strings"
)

// Pattern is a parsed matchName or matchPattern.
type Pattern struct {
	text string // lower case, with final dot; "*" for every name
	any  bool
	deep bool // "**.": one or more labels before text
}

// Name returns a pattern that matches exactly one name.
func Name(name string) (Pattern, error) {
	for i := range len(name) {
		if !nameByte(name[i]) && name[i] != '.' {
			return Pattern{}, fmt.Errorf("%q has a character that is not a letter, a digit, '.', '-' or '_'", name)
		}
	}
	return Pattern{text: Canonical(name)}, nil
}

// Parse returns a pattern with wildcards.
func Parse(pattern string) (Pattern, error) {
	for i := range len(pattern) {
		if !nameByte(pattern[i]) && pattern[i] != '.' && pattern[i] != '*' {
			return Pattern{}, fmt.Errorf("%q has a character that is not a letter, a digit, '.', '-', '_' or '*'", pattern)
		}
	}
	trimmed := strings.TrimSpace(strings.ToLower(pattern))
	if trimmed == "*" || trimmed == "**" || trimmed == "*." || trimmed == "**." {
		return Pattern{text: "*", any: true}, nil
	}
	p := Pattern{text: Canonical(trimmed)}
	if rest, ok := strings.CutPrefix(p.text, "**."); ok {
		p.deep, p.text = true, rest
	}
	return p, nil
}

// Canonical returns the name in lower case with exactly one final dot.
func Canonical(name string) string {
	name = strings.ToLower(name)
	if strings.HasSuffix(name, ".") {
		return name
	}
	return name + "."
}

// String returns the canonical text: equal patterns have equal texts.
func (p Pattern) String() string {
	if p.deep {
		return "**." + p.text
	}
	return p.text
}

// Matches reports whether the pattern covers a name.
func (p Pattern) Matches(name string) bool {
	name = Canonical(name)
	if p.any {
		if name == "." {
			return true
		}
		return labels(strings.TrimSuffix(name, "."))
	}
	if !p.deep {
		return glob(p.text, name)
	}
	for i := 0; i < len(name); i++ {
		if name[i] == '.' && i > 0 && labels(name[:i]) && glob(p.text, name[i+1:]) {
			return true
		}
	}
	return false
}

// labels reports whether s is one or more non-empty labels joined by dots.
func labels(s string) bool {
	for part := range strings.SplitSeq(s, ".") {
		if part == "" {
			return false
		}
		for i := range len(part) {
			if !nameByte(part[i]) {
				return false
			}
		}
	}
	return true
}

func nameByte(c byte) bool {
	return c == '-' || c == '_' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}

// glob matches a name against a pattern in which '*' is any number of name characters. Its time is proportional to the
// product of the two lengths. It does not recurse.
func glob(pattern, name string) bool {
	pi, ni := 0, 0
	star, mark := -1, 0
	for ni < len(name) {
		switch {
		case pi < len(pattern) && pattern[pi] == '*':
			star, mark = pi, ni
			pi++
		case pi < len(pattern) && pattern[pi] == name[ni]:
			pi++
			ni++
		case star >= 0 && nameByte(name[mark]):
			mark++
			pi, ni = star+1, mark
		default:
			return false
		}
	}
	for pi < len(pattern) && pattern[pi] == '*' {
		pi++
	}
	return pi == len(pattern)
}
