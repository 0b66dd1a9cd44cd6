// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package source defines the properties of the sources of policies: who may change a policy, how it shares the
// limits, and what happens to a policy that cannot be decoded or exceeds a limit.
//
// A new source of policies is one row here. The package does no I/O and does not depend on policies.
package source

import (
	"slices"

	"github.com/sluice-net/sluice/kit/desired/managed"
)

// Identity is the source of identities, which has no policies. Package managed has the names of the sources of
// policies.
const Identity = "identity"

// Source is a source and its properties. For a source that this version does not know, only Name is set: its policies
// are stored, but never delivered again.
type Source struct {
	Name string
	// Policies is set if the source delivers policies. Limits are divided once all such sources are complete.
	Policies bool
	// Calls is set if calls deliver its policies. Each of their managers completes separately, they have no common
	// listing, and calls change and delete them. Calls must not change the policies of another configured source.
	Calls bool
	// Files is set if its policies are documents of files. A document that cannot be applied isolates the pods that
	// it selects, and an operator may accept that a file is missing.
	Files bool
	// Shared is set if every node has the same objects. They are admitted to the limits before policies that only
	// this node has.
	Shared bool
	// Stamped is set if its objects have a creation time and a UID, which order them. Policies of other sources are
	// ordered by their first acceptance on this node.
	Stamped bool
	// Accepted is set if its objects were stored elsewhere before, so that no object can be rejected because of its
	// content: an object that cannot be decoded isolates.
	Accepted bool
	// Redelivers is set if the source delivers an object again on request. The text of a large object that exceeds a
	// share is then not kept.
	Redelivers bool
	// Folds is set if users without administrator rights write its objects in a namespace. The isolation of the
	// namespace may replace objects that are not admitted.
	Folds bool
}

var rows = []Source{
	{Name: Identity},
	{Name: managed.SourceGRPC, Policies: true, Calls: true},
	{Name: managed.SourceFile, Policies: true, Files: true},
	{
		Name: managed.SourceKubernetes, Policies: true,
		Shared: true, Stamped: true, Accepted: true, Redelivers: true, Folds: true,
	},
}

// Of returns the source with a name.
func Of(name string) Source {
	for _, s := range rows {
		if s.Name == name {
			return s
		}
	}
	return Source{Name: name}
}

// All returns the sources that this version knows.
func All() []Source { return slices.Clone(rows) }
