// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package source defines the properties of the sources of services. They determine who may change an object, how it
// shares the limits, and how an object that exceeds a limit is treated.
//
// To add a source, add a row here. The names of the sources are in package managed.
package source

import "github.com/sluice-net/sluice/kit/desired/managed"

// Source is a source and its properties. For a source that this version does not know, only Name is set.
type Source struct {
	Name string
	// Calls is set if calls deliver its objects. Calls may change and delete these objects, and a call that exceeds
	// a limit is refused.
	Calls bool
	// Shared is set if the source has the same objects on every node. Other sources get only the part of a limit
	// that these objects leave.
	Shared bool
	// Waits is set if another program has already stored the objects, so that an object that exceeds a limit cannot
	// be rejected. Such an object waits for capacity, and until then a Service refuses connections.
	Waits bool
	// Zone is set if the source delivers the zone of the node, which is stored for the next run.
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
