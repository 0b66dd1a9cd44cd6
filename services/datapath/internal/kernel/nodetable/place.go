// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetable

import "github.com/sluice-net/sluice/model/identity"

// ClusterWide is how many places of sl_id the reserved and cluster-wide numbers have;
// those that mean something on this node only follow them.
const ClusterWide = int(identity.MaxCluster) + 1

// IdentityPlace is the place of an identity's entry in sl_id, false if it can have none.
func IdentityPlace(id identity.Numeric) (int, bool) {
	switch id.Scope() {
	case identity.ScopeReserved, identity.ScopeCluster:
		return int(id), true
	case identity.ScopeNodeLocal:
		return int(id-identity.MinNodeLocal) + ClusterWide, true
	}
	return 0, false
}

// IdentityAt is the identity whose entry has a place in sl_id.
func IdentityAt(place int) identity.Numeric {
	if place < ClusterWide {
		return identity.Numeric(place)
	}
	return identity.Numeric(place-ClusterWide) + identity.MinNodeLocal
}
