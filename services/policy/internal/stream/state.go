// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package stream

import "slices"

// StateID identifies a policy state. It is created with the state directory and never changes.
type StateID [16]byte

// PolicyState is the policy state to which a barrier's revision belongs. It is immutable once it is in a barrier.
type PolicyState struct {
	ID      StateID
	Sources []string // sources with policies; sorted
	// Complete lists the sources that are complete in this run; sorted.
	Complete []string
	// Confirmed is set if an operator has confirmed that the current policies are to be enforced.
	Confirmed bool
}

// Equal reports whether two states are equal.
func (s *PolicyState) Equal(o *PolicyState) bool {
	return s == o || s != nil && o != nil && s.ID == o.ID && s.Confirmed == o.Confirmed &&
		slices.Equal(s.Sources, o.Sources) && slices.Equal(s.Complete, o.Complete)
}

// Names of inputs, other than sources of policies, for which a state may wait.
const (
	// Identities means the listing of identities. Without identities, tables include no peers. A confirmation
	// does not end this wait.
	Identities = "identity"
	// Unknown replaces the names of unknown sources.
	Unknown = "unknown sources"
)

// Incomplete returns the inputs that the state still waits for: the identities, and sources. had lists the sources
// whose policies the subscriber enforced before.
func (s *PolicyState) Incomplete(had []string) []string {
	out := []string{}
	need := func(source string) {
		if !slices.Contains(s.Complete, source) && !slices.Contains(out, source) {
			out = append(out, source)
		}
	}
	need(Identities)
	if !s.Confirmed {
		if len(had) == 0 {
			need(Unknown)
		}
		for _, source := range had {
			need(source)
		}
	}
	slices.Sort(out)
	return out
}
