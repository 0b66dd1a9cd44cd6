// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package stream

import "slices"

// StateID names a policy state: made with the state directory, kept for its life.
type StateID [16]byte

// PolicyState is the policy state that a barrier's revision counts in. It is not
// changed once it is in a barrier.
type PolicyState struct {
	ID      StateID
	Sources []string // that have policies; sorted
	// Complete are the sources that have said everything in this run; sorted.
	Complete []string
	// Confirmed: an operator has said that the policies are what shall be enforced.
	Confirmed bool
}

// Equal says whether two states say the same.
func (s *PolicyState) Equal(o *PolicyState) bool {
	return s == o || s != nil && o != nil && s.ID == o.ID && s.Confirmed == o.Confirmed &&
		slices.Equal(s.Sources, o.Sources) && slices.Equal(s.Complete, o.Complete)
}

// Names of what a state may wait for besides sources of policies.
const (
	// Identities: without them the tables know no peer, and no confirmation helps.
	Identities = "identity"
	// Unknown stands for sources that are not known.
	Unknown = "unknown sources"
)

// Incomplete is what has not said everything, of the identities and of the
// sources that had policies in a state that was enforced before.
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
