// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package source defines the properties of the sources of policies. They determine who may change a policy, in which
// order policies are admitted to the limits, and how a policy is treated that cannot be decoded or exceeds a limit.
//
// To add a source of policies, add one row here. The package does no I/O and does not depend on policies.
package source

import (
	"slices"

	"github.com/sluice-net/sluice/kit/desired/managed"
)

// Identity is the source of identities, which has no policies. The names of the sources of policies are in package
// managed.
const Identity = "identity"

// Source is a source and its properties. For a source that this version does not know, only Name is set; no new
// policies can come from it.
type Source struct {
	Name string
	// Policies is set if the source delivers policies. Limits are divided once all such sources are complete.
	Policies bool
	// Calls is set if calls deliver the policies of the source. Each manager completes separately, and there is no
	// list of all policies. Calls may change and delete these policies, but not the policies of another configured
	// source.
	Calls bool
	// Files is set if the policies of the source are documents of files. A document that cannot be applied isolates
	// the pods that it selects. An operator may accept that a file is missing.
	Files bool
	// Shared is set if the source has the same objects on every node. They are admitted to the limits before the
	// policies of other sources.
	Shared bool
	// Stamped is set if the objects of the source have a creation time and a UID, by which they are ordered. Policies
	// of other sources are ordered by their first acceptance on this node.
	Stamped bool
	// Accepted is set if another program has already stored the objects, so that they can no longer be rejected
	// because of their content. An object that cannot be decoded isolates the pods that it selects.
	Accepted bool
	// Redelivers is set if the source delivers an object again on request. Therefore the text of a large object that
	// exceeds a share is not kept.
	Redelivers bool
	// Folds is set if users who are not administrators write the objects of a namespace. Objects that are not
	// admitted may then be folded: dropped, with the whole namespace isolated instead.
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
