// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package flow

import (
	"slices"

	"github.com/sluice-net/sluice/model/label"
)

// Selector is a set of requirements that must all hold; an empty one selects everything. It differs from selectors of
// policies.
type Selector []Requirement

// Requirement is a requirement on the labels with a key.
type Requirement struct {
	Source string // empty: any
	Key    string
	Values map[string]bool // nil: any value
	Not    bool            // no label may match; also holds if the key is missing
}

// Matches reports whether the labels meet all requirements. If several sources have a label with the key, one matching
// label meets a positive requirement, and violates a negative one.
func (s Selector) Matches(labels []label.Label) bool {
	for _, r := range s {
		found := slices.ContainsFunc(labels, func(l label.Label) bool {
			return l.Key == r.Key && (r.Source == "" || r.Source == l.Source) && (r.Values == nil || r.Values[l.Value])
		})
		if found == r.Not {
			return false
		}
	}
	return true
}
