// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package identity

import "testing"

func TestScopesCoverExactlyTheirRanges(t *testing.T) {
	for n, want := range map[Numeric]Scope{
		0: ScopeInvalid, 1: ScopeReserved, 255: ScopeReserved, 256: ScopeCluster, 65_535: ScopeCluster,
		65_536: ScopeInvalid, 0xFEFFFF: ScopeInvalid, 0xFF0000: ScopeNodeLocal, 0xFF0FFF: ScopeNodeLocal,
		0xFF1000: ScopeInvalid, 0xFFFFFF: ScopeInvalid, 0x1000000: ScopeInvalid,
	} {
		if got := n.Scope(); got != want {
			t.Errorf("%#x: scope %s, want %s", uint32(n), got, want)
		}
	}
	if ClusterSize != 65_280 || NodeLocalSize != 4096 {
		t.Errorf("the ranges have %d and %d numbers, want 65280 and 4096", ClusterSize, NodeLocalSize)
	}
}

func TestNodesAreReservedOnesAndLabelSetsOfThisNode(t *testing.T) {
	for n, want := range map[Numeric]bool{
		0: false, Host: false, RemoteNode: true, KubeAPIServer: true, Ingress: false, UnknownInCluster: false,
		MinCluster: false, MaxCluster: false, MinNodeLocal - 1: false, MinNodeLocal: true, MaxNodeLocal: true,
		MaxNodeLocal + 1: false, Max: false,
	} {
		if got := n.OfNode(); got != want {
			t.Errorf("%#x: OfNode is %t, want %t", uint32(n), got, want)
		}
	}
}

func TestKindsAndPeerScopesHaveNames(t *testing.T) {
	for k := range Kinds + 1 {
		if got := k.String(); got == "" || (k == Kinds) != (got == "Kind(8)") {
			t.Errorf("kind %d is called %q", uint8(k), got)
		}
	}
	for s := range PeerScopes + 1 {
		if got := s.String(); got == "" || (s == PeerScopes) != (got == "PeerScope(3)") {
			t.Errorf("peer scope %d is called %q", uint8(s), got)
		}
	}
}
