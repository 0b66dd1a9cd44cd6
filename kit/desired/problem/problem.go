// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package problem keeps the current problems of a desired-state service for its status and its log. Each problem
// belongs to a part of the service.
package problem

import (
	"iter"
	"maps"
	"slices"
)

// Storage is the part of a service that writes its state to the disk.
const Storage = "storage"

// Set holds the current problem of each part. It is not safe for concurrent use: only the loop that owns the service's
// state uses it.
type Set struct {
	report   func(part string, err error)
	problems map[string]error
}

// New returns an empty Set. It calls report once for each new problem, and again when the text of
// the problem changes.
func New(report func(part string, err error)) *Set {
	return &Set{report: report, problems: make(map[string]error)}
}

// Note replaces the problem of a part; nil clears it.
func (s *Set) Note(part string, err error) {
	before := s.problems[part]
	if err == nil {
		delete(s.problems, part)
		return
	}
	s.problems[part] = err
	if before == nil || before.Error() != err.Error() {
		s.report(part, err)
	}
}

// Of returns the problem of a part, or nil.
func (s *Set) Of(part string) error { return s.problems[part] }

// All yields the problems, sorted by part.
func (s *Set) All() iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		for _, part := range slices.Sorted(maps.Keys(s.problems)) {
			if !yield(part, s.problems[part]) {
				return
			}
		}
	}
}
