// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetable

import "github.com/sluice-net/sluice/model/identity"

// ClusterWide is the number of indices of sl_id for reserved and cluster-wide identities; node-local identities
// follow.
const ClusterWide = int(identity.MaxCluster) + 1

// IdentityPlace returns the index of an identity in sl_id; false if it has none.
func IdentityPlace(id identity.Numeric) (int, bool) {
	switch id.Scope() {
	case identity.ScopeReserved, identity.ScopeCluster:
		return int(id), true
	case identity.ScopeNodeLocal:
		return int(id-identity.MinNodeLocal) + ClusterWide, true
	}
	return 0, false
}

// IdentityAt returns the identity at an index of sl_id.
func IdentityAt(place int) identity.Numeric {
	if place < ClusterWide {
		return identity.Numeric(place)
	}
	return identity.Numeric(place-ClusterWide) + identity.MinNodeLocal
}
