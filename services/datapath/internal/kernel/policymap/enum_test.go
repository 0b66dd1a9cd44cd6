// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/policytable"
)

// TestPolicyTableEnumsAreThoseOfThePrograms compares the pure package's numbers
// with the ones that the programs were compiled with.
func TestPolicyTableEnumsAreThoseOfThePrograms(t *testing.T) {
	for name, pair := range map[string][2]uint32{
		"Action Deny":        {uint32(policytable.ActionDeny), uint32(bpf.MapsSlActionSL_ACTION_DENY)},
		"Action Redirect":    {uint32(policytable.ActionRedirect), uint32(bpf.MapsSlActionSL_ACTION_REDIRECT)},
		"Action Allow":       {uint32(policytable.ActionAllow), uint32(bpf.MapsSlActionSL_ACTION_ALLOW)},
		"Action Pass":        {uint32(policytable.ActionPass), uint32(bpf.MapsSlActionSL_ACTION_PASS)},
		"Kind InCluster":     {uint32(policytable.KindInCluster), uint32(bpf.MapsSlKindSL_KIND_IN_CLUSTER)},
		"Kind WorldIPv4":     {uint32(policytable.KindWorldIPv4), uint32(bpf.MapsSlKindSL_KIND_WORLD4)},
		"Kind WorldIPv6":     {uint32(policytable.KindWorldIPv6), uint32(bpf.MapsSlKindSL_KIND_WORLD6)},
		"Kind Host":          {uint32(policytable.KindHost), uint32(bpf.MapsSlKindSL_KIND_HOST)},
		"Kind RemoteNode":    {uint32(policytable.KindRemoteNode), uint32(bpf.MapsSlKindSL_KIND_REMOTE_NODE)},
		"Kind KubeAPIServer": {uint32(policytable.KindKubeAPIServer), uint32(bpf.MapsSlKindSL_KIND_KUBE_APISERVER)},
		"Kind Unknown":       {uint32(policytable.KindUnknown), uint32(bpf.MapsSlKindSL_KIND_UNKNOWN)},
		"Kind Other":         {uint32(policytable.KindOther), uint32(bpf.MapsSlKindSL_KIND_OTHER)},
		"Scope Cluster":      {uint32(policytable.ScopeCluster), uint32(bpf.MapsSlScopeSL_SCOPE_CLUSTER)},
		"Scope Node":         {uint32(policytable.ScopeNode), uint32(bpf.MapsSlScopeSL_SCOPE_NODE)},
		"Scope Outside":      {uint32(policytable.ScopeOutside), uint32(bpf.MapsSlScopeSL_SCOPE_OUTSIDE)},
		"Kinds":              {policytable.Kinds, uint32(bpf.MapsSlKindSL_KINDS)},
		"Scopes":             {policytable.Scopes, uint32(bpf.MapsSlScopeSL_SCOPES)},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s is %d in Go and %d in the programs", name, pair[0], pair[1])
		}
	}
}
