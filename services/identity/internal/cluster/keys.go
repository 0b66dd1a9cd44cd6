// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

// Point is a revision of a store.
type Point struct {
	Cluster  uint64 // id of the store's cluster
	Revision int64  // from 1; 0: no point
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
	Revision int64 // of the deletion
}

// Keys is a node's local copy of the store's keys with one prefix.
type Keys struct {
	Of  string // prefix of their names in the store
	At  Point  // everything up to there is in the copy; zero: that is not known
	All []Key
	// Gone is the newest deletion that the node received since it listed the keys; without a name none is known. Its
	// key need not have the prefix.
	Gone Removed
}

// Change is a change of Keys up to a point.
type Change struct {
	At   Point
	Put  []Key
	Drop []string // names
	Gone Removed  // the newest deletion, perhaps of a key that Keys do not have; without a name there is none
}
