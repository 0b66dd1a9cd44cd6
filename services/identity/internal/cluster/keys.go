// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

// Point is a revision of a particular store.
type Point struct {
	Cluster  uint64 // ID of the store's cluster
	Revision int64  // 0: no point; otherwise at least 1
}

// Key is a key of the store.
type Key struct {
	Name              string
	Value             []byte
	Created, Modified int64 // revisions
}

// Removed is a key that was deleted.
type Removed struct {
	Name     string
	Revision int64 // revision of the deletion
}

// Keys is a node's local copy of the store's keys with one prefix.
type Keys struct {
	Of  string // prefix of the keys' names in the store
	At  Point  // the copy contains all changes up to this point; zero: unknown
	All []Key
	// Gone is the newest deletion that the node has received since it listed the keys. If its name is empty, none
	// is known. Its key may have another prefix.
	Gone Removed
}

// Change is a change of Keys up to a point.
type Change struct {
	At   Point
	Put  []Key
	Drop []string // names
	Gone Removed  // the newest deletion, possibly of a key that is not in Keys; an empty name means none
}
