// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package source defines the properties of the sources of services: who may change an object, how it shares the limits,
// and what happens to an object that exceeds a limit.
//
// A new source is one row here. Package managed has the names of the sources.
package source

import "github.com/sluice-net/sluice/kit/desired/managed"

// Source is a source and its properties. For a source that this version does not know, only Name is set.
type Source struct {
	Name string
	// Calls is set if calls deliver its objects. They change and delete them, and a call that exceeds a limit is
	// refused.
	Calls bool
	// Shared is set if every node has the same objects. They are admitted to the limits before objects that only this
	// node has.
	Shared bool
	// Waits is set if its objects were stored elsewhere before. An object that exceeds a limit cannot be refused: it
	// waits for space, and refuses connections until then.
	Waits bool
	// Zone is set if the source delivers the zone of the node. The state stores it for the next run.
	Zone bool
}

var rows = []Source{
	{Name: managed.SourceGRPC, Calls: true},
	{Name: managed.SourceFile},
	{Name: managed.SourceKubernetes, Shared: true, Waits: true, Zone: true},
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
