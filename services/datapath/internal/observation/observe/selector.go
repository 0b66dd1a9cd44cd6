// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"slices"

	"github.com/sluice-net/sluice/model/label"
)

// Selector is a set of requirements that must all hold; without any it selects
// everything. Selectors of policies have rules of their own.
type Selector []Requirement

// Requirement asks for a label of a key.
type Requirement struct {
	Source string // empty: any
	Key    string
	Values map[string]bool // nil: whatever the value is
	Not    bool            // no label must be so; holds also where the key is missing
}

// Matches says whether the labels meet all requirements. A key that several
// sources give meets a positive requirement if one of its labels does, and a
// negative one if none of them contradicts.
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
