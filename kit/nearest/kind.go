// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nearest

import (
	"slices"
	"strings"
)

// Kind is a kind of objects of the Kubernetes API.
type Kind struct {
	Group  string // of the API; empty for the core group
	Name   string
	Plural string // the name of the resource
}

// maxSlips is the largest distance at which a kind or an API group counts as misspelled. It is small, because other
// projects have similar kinds, such as NetworkPolicy of projectcalico.org.
const maxSlips = 2

// IsGroup reports whether an API version has the group of a kind among known, possibly misspelled, or no group, such as
// v1.
func IsGroup(apiVersion string, known []Kind) bool {
	group, _, ok := strings.Cut(strings.ToLower(apiVersion), "/")
	return !ok || slices.ContainsFunc(known, func(k Kind) bool { return distanceOf(group, k.Group) <= maxSlips })
}

// KindOf returns the kind among known that an API version and a kind probably mean: either may be misspelled, the kind
// may be a plural, and the group may belong to another kind among known. It returns false for kinds of other projects.
func KindOf(apiVersion, kind string, known []Kind) (Kind, bool) {
	if !IsGroup(apiVersion, known) {
		return Kind{}, false
	}
	kind = strings.ToLower(kind)
	best, distance := Kind{}, maxSlips+1
	for _, k := range known {
		for _, name := range []string{k.Name, k.Plural} {
			if d := distanceOf(kind, strings.ToLower(name)); d < distance {
				best, distance = k, d
			}
		}
	}
	return best, distance <= maxSlips
}
