// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package dnsname implements patterns for DNS names, with the meaning of matchName and matchPattern in Cilium 1.20.
//
// A pattern is a literal name or has wildcards. "*" matches any number of characters within one label, including none.
// Two or more stars and a dot at the start, as in "**.example.com", match one or more whole labels. Elsewhere "**" is
// the same as "*". A pattern of stars only, with or without a final dot, matches every name, including the root.
//
// Names are compared without regard to the case of ASCII letters, and with one final dot. Wildcards match letters,
// digits, '-' and '_'. The labels of a name are separated by dots, so the caller must not pass a label that contains a
// dot.
package dnsname

import (
	"fmt"
	"strings"
)

// Pattern is a parsed matchName or matchPattern. Its zero value matches no name. Patterns are comparable: those with
// equal texts are equal.
type Pattern struct {
	text string // lower case, with final dot, and with single stars; "*" for every name
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
	if pattern != "" && strings.Trim(strings.TrimSuffix(pattern, "."), "*") == "" && pattern[0] == '*' {
		return Pattern{text: "*", any: true}, nil
	}
	p := Pattern{}
	if rest := strings.TrimLeft(pattern, "*"); len(pattern)-len(rest) >= 2 && rest[0] == '.' {
		p.deep, pattern = true, rest[1:]
	}
	for strings.Contains(pattern, "**") {
		pattern = strings.ReplaceAll(pattern, "**", "*")
	}
	p.text = Canonical(pattern)
	return p, nil
}

// Canonical returns the name with its ASCII letters in lower case and with a final dot. Other characters keep their
// case: a server regards them as different, although Unicode's lower case of the Kelvin sign is k.
func Canonical(name string) string {
	for i := range len(name) {
		if 'A' <= name[i] && name[i] <= 'Z' {
			name = lower(name)
			break
		}
	}
	if strings.HasSuffix(name, ".") {
		return name
	}
	return name + "."
}

func lower(name string) string {
	b := []byte(name)
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	return string(b)
}

// String returns the canonical text: equal patterns have equal texts.
func (p Pattern) String() string {
	if p.deep {
		return "**." + p.text
	}
	return p.text
}

// Every reports whether the pattern consists of stars. A DNS rule with such a pattern allows each query, also for names
// with characters that Matches refuses.
func (p Pattern) Every() bool { return p.any }

// Matches reports whether the pattern matches a name.
func (p Pattern) Matches(name string) bool { return p.matches(Canonical(name)) }

// matches is Matches for a canonical name.
func (p Pattern) matches(name string) bool {
	if p.any {
		return ordinary(name)
	}
	if p.text == "" {
		return false
	}
	if !strings.HasSuffix(name, p.text[strings.LastIndexByte(p.text, '*')+1:]) {
		return false // most patterns end here
	}
	if !p.deep {
		return glob(p.text, name)
	}
	start := 0
	for i := range len(name) {
		if name[i] != '.' {
			if !nameByte(name[i]) {
				return false
			}
			continue
		}
		if i == start {
			return false // an empty label
		}
		if glob(p.text, name[i+1:]) {
			return true
		}
		start = i + 1
	}
	return false
}

// Costly reports whether a Set has to compare the pattern with each name, because it is neither a literal name nor
// "*.NAME", "**.NAME" or a pattern of stars.
func (p Pattern) Costly() bool {
	rest := p.text
	if !p.deep {
		rest = strings.TrimPrefix(rest, "*.")
	}
	return !p.any && strings.Contains(rest, "*")
}

// ordinary reports whether a canonical name is the root, or consists of labels that wildcards match.
func ordinary(name string) bool { return name == "." || labels(strings.TrimSuffix(name, ".")) }

// labels reports whether s is one or more non-empty labels joined by dots.
func labels(s string) bool {
	for part := range strings.SplitSeq(s, ".") {
		if part == "" || !nameBytes(part) {
			return false
		}
	}
	return true
}

func nameBytes(s string) bool {
	for i := range len(s) {
		if !nameByte(s[i]) {
			return false
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
