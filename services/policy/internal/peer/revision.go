// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package peer

// Revision is a revision of the identities in one run of the identity service. Zero means that the listing is not
// complete yet.
type Revision struct {
	Incarnation string
	Number      uint64
	Store       StoreRevision
}

// StoreRevision is a revision of the store that the nodes of a cluster share. Zero means unknown.
type StoreRevision struct {
	Cluster  uint64
	Revision int64
}
