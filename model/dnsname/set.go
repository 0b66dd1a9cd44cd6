// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package dnsname

import "strings"

// Set matches names with many patterns. Only costly patterns are compared one by one. It is immutable, and safe for
// concurrent use. Its zero value matches no name.
type Set struct {
	every  bool
	names  map[string]bool // literal names
	single map[string]bool // what follows "*."
	deep   map[string]bool // what follows "**."
	others []Pattern
}

// NewSet returns the set of the patterns.
func NewSet(patterns []Pattern) *Set {
	s := &Set{names: map[string]bool{}, single: map[string]bool{}, deep: map[string]bool{}}
	seen := make(map[Pattern]bool)
	for _, p := range patterns {
		below, single := strings.CutPrefix(p.text, "*.")
		switch {
		case p.any:
			s.every = true
		case p.Costly():
			if !seen[p] {
				seen[p] = true
				s.others = append(s.others, p)
			}
		case p.deep:
			s.deep[p.text] = true
		case single:
			s.single[below] = true
		default:
			s.names[p.text] = true
		}
	}
	return s
}

// Every reports whether one of the patterns consists of stars.
func (s *Set) Every() bool { return s.every }

// Matches reports whether one of the patterns matches a name.
func (s *Set) Matches(name string) bool {
	name = Canonical(name)
	if s.names[name] || s.every && ordinary(name) || s.matchesBelow(name) {
		return true
	}
	for _, p := range s.others {
		if p.matches(name) {
			return true
		}
	}
	return false
}

// matchesBelow reports whether a name in single is the canonical name without its first label, or a name in deep is
// the canonical name without one or more labels.
func (s *Set) matchesBelow(name string) bool {
	if len(s.single)+len(s.deep) == 0 {
		return false
	}
	start := 0
	for i := range len(name) {
		if name[i] != '.' {
			if !nameByte(name[i]) {
				return false
			}
			continue
		}
		rest := name[i+1:]
		if start == 0 && s.single[rest] {
			return true
		}
		if i == start {
			return false // an empty label
		}
		if s.deep[rest] {
			return true
		}
		start = i + 1
	}
	return false
}
