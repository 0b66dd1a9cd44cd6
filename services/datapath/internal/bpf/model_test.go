// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package bpf

import (
	"os"
	"regexp"
	"strconv"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
)

// TestModelNumbersEqualThoseOfThePrograms: package identity has the same numbers as the enumerations of the programs,
// which are generated as constants in this package.
func TestModelNumbersEqualThoseOfThePrograms(t *testing.T) {
	for kind, want := range map[identity.Kind]MapsSlKind{
		identity.KindInCluster:     MapsSlKindSL_KIND_IN_CLUSTER,
		identity.KindWorld4:        MapsSlKindSL_KIND_WORLD4,
		identity.KindWorld6:        MapsSlKindSL_KIND_WORLD6,
		identity.KindHost:          MapsSlKindSL_KIND_HOST,
		identity.KindRemoteNode:    MapsSlKindSL_KIND_REMOTE_NODE,
		identity.KindKubeAPIServer: MapsSlKindSL_KIND_KUBE_APISERVER,
		identity.KindUnknown:       MapsSlKindSL_KIND_UNKNOWN,
		identity.KindOther:         MapsSlKindSL_KIND_OTHER,
		identity.Kinds:             MapsSlKindSL_KINDS,
	} {
		if MapsSlKind(kind) != want {
			t.Errorf("kind %s is %d in the model and %d in the programs", kind, kind, want)
		}
	}
	for scope, want := range map[identity.PeerScope]MapsSlScope{
		identity.PeerScopeCluster: MapsSlScopeSL_SCOPE_CLUSTER,
		identity.PeerScopeNode:    MapsSlScopeSL_SCOPE_NODE,
		identity.PeerScopeOutside: MapsSlScopeSL_SCOPE_OUTSIDE,
		identity.PeerScopes:       MapsSlScopeSL_SCOPES,
	} {
		if MapsSlScope(scope) != want {
			t.Errorf("peer scope %s is %d in the model and %d in the programs", scope, scope, want)
		}
	}
}

// TestModelRangesEqualThoseOfTheHeaders: macros are not in the type information of the objects, so this test reads the
// headers.
func TestModelRangesEqualThoseOfTheHeaders(t *testing.T) {
	for _, c := range []struct {
		header, name string
		want         identity.Numeric
	}{
		{"abi.h", "SL_ID_HOST", identity.Host},
		{"abi.h", "SL_ID_REMOTE_NODE", identity.RemoteNode},
		{"abi.h", "SL_ID_KUBE_APISERVER", identity.KubeAPIServer},
		{"abi.h", "SL_NODE_LOCAL", identity.MinNodeLocal},
		{"verdict.h", "SL_CLUSTER_WIDE", identity.MaxCluster + 1},
		{"abi.h", "SL_MAX_IDENTITIES", identity.MaxCluster + 1 + identity.Numeric(identity.NodeLocalSize)},
	} {
		if got := macro(t, c.header, c.name); got != c.want {
			t.Errorf("%s in %s is %d, in the model %d", c.name, c.header, got, c.want)
		}
	}
}

// macro reads a #define that is a number or a sum of two numbers.
func macro(t *testing.T, header, name string) identity.Numeric {
	t.Helper()
	text, err := os.ReadFile("../../../../bpf/include/sluice/" + header)
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^#define ` + name + `\s+\(?(\w+)(?:\s*\+\s*(\w+)\))?`).FindSubmatch(text)
	if m == nil {
		t.Fatalf("%s does not define %s", header, name)
	}
	var sum uint64
	for _, term := range m[1:] {
		if len(term) == 0 {
			continue
		}
		n, err := strconv.ParseUint(string(term), 0, 32)
		if err != nil {
			t.Fatalf("%s: %s: %v", header, name, err)
		}
		sum += n
	}
	return identity.Numeric(sum)
}
