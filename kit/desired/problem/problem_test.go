// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package problem

import (
	"errors"
	"fmt"
	"slices"
	"testing"
)

// TestProblemIsReportedWhenItsTextChanges: a problem that is noted again with the same text is the
// same problem; after it was cleared, it is new.
func TestProblemIsReportedWhenItsTextChanges(t *testing.T) {
	var reported []string
	s := New(func(part string, err error) { reported = append(reported, part+": "+err.Error()) })
	full, broken := errors.New("disk full"), errors.New("disk broken")
	for _, err := range []error{nil, full, errors.New("disk full"), broken, nil, broken} {
		s.Note(Storage, err)
		if got := s.Of(Storage); !errors.Is(got, err) {
			t.Errorf("the problem is %v, want %v", got, err)
		}
	}
	s.Note("ports", full)
	want := []string{"storage: disk full", "storage: disk broken", "storage: disk broken", "ports: disk full"}
	if !slices.Equal(reported, want) {
		t.Errorf("reported %q, want %q", reported, want)
	}
	var all []string
	for part, err := range s.All() {
		all = append(all, fmt.Sprint(part, ": ", err))
	}
	if want := []string{"ports: disk full", "storage: disk broken"}; !slices.Equal(all, want) {
		t.Errorf("the problems are %q, want %q", all, want)
	}
}
