// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package source says what follows from where a policy comes from: who may change it, how
// it shares the limits, and what becomes of a policy that is not understood or has no place.
//
// A new source of policies is one row here. It does no I/O, and knows no policy.
package source

import (
	"slices"

	"github.com/sluice-net/sluice/kit/desired/managed"
)

// Identity is the source of identities, which brings no policies. The sources of policies
// have the names of package managed.
const Identity = "identity"

// Source is a source with its properties. One that this version does not know has a name and
// no property: its policies are stored, and nothing brings them again.
type Source struct {
	Name string
	// Policies says that it brings policies. Limits are divided once all such sources are
	// complete.
	Policies bool
	// Calls says that calls bring its policies. Each of their managers completes by itself,
	// nothing lists all of them, and calls change and delete them. Calls may not touch the
	// policies of another configured source.
	Calls bool
	// Files says that its policies are documents of files. A document that cannot be applied
	// isolates what it selects, and an operator may accept that a file is missing.
	Files bool
	// Shared says that every node has the same objects. They get places in the limits before
	// policies that this node alone has.
	Shared bool
	// Stamped says that its objects have a time of creation and a UID, which order them.
	// Policies of other sources count from their first acceptance by this node.
	Stamped bool
	// Accepted says that its objects are stored elsewhere before they come here, so that no
	// object can be refused for its content: one that is not understood isolates.
	Accepted bool
	// Redelivers says that it delivers an object again on request. The text of a large
	// object that exceeds a share is not kept.
	Redelivers bool
	// Folds says that people who are no administrators write its objects in a namespace. The
	// isolation of the namespace can stand for the objects that have no place.
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

// Of returns the source of a name.
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
