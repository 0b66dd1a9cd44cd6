// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package peer

import (
	"errors"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
)

func TestKindAndScopeComeFromTheLabels(t *testing.T) {
	pod := label.Kubernetes(label.KeyNamespace, "a")
	for _, tc := range []struct {
		number identity.Numeric
		labels []label.Label
		kind   identity.Kind
		scope  identity.PeerScope
	}{
		{300, []label.Label{pod}, identity.KindInCluster, identity.PeerScopeCluster},
		{identity.Host, []label.Label{label.Reserved(identity.NameHost)}, identity.KindHost, identity.PeerScopeNode},
		{identity.MinNodeLocal, []label.Label{label.Reserved(identity.NameHost), label.Reserved(identity.NameKubeAPIServer)}, identity.KindHost, identity.PeerScopeNode},
		{identity.RemoteNode, []label.Label{label.Reserved(identity.NameRemoteNode)}, identity.KindRemoteNode, identity.PeerScopeNode},
		{identity.KubeAPIServer, []label.Label{label.Reserved(identity.NameRemoteNode), label.Reserved(identity.NameKubeAPIServer)}, identity.KindRemoteNode, identity.PeerScopeNode},
		{identity.MinNodeLocal, []label.Label{label.Reserved(identity.NameWorldIPv4), label.Reserved(identity.NameKubeAPIServer)}, identity.KindKubeAPIServer, identity.PeerScopeOutside},
		{identity.World, []label.Label{label.Reserved(identity.NameWorld)}, identity.KindWorld4, identity.PeerScopeOutside},
		{identity.WorldIPv6, []label.Label{label.Reserved(identity.NameWorldIPv6)}, identity.KindWorld6, identity.PeerScopeOutside},
		{identity.Health, []label.Label{label.Reserved(identity.NameHealth)}, identity.KindOther, identity.PeerScopeCluster},
		{identity.Init, []label.Label{label.Reserved(identity.NameInit)}, identity.KindOther, identity.PeerScopeCluster},
		{identity.UnknownInCluster, nil, identity.KindUnknown, identity.PeerScopeCluster},
	} {
		id, err := New(tc.number, label.NewSet(tc.labels...))
		if err != nil || id.Kind != tc.kind || id.Scope != tc.scope {
			t.Errorf("%d %v: kind %s scope %d (%v), want %s %d", tc.number, tc.labels, id.Kind, id.Scope, err, tc.kind, tc.scope)
		}
	}
	if _, err := New(0, label.NewSet(pod)); err == nil {
		t.Error("number 0 is accepted")
	}
}

func TestNamedPortsComeFromTheHiddenLabel(t *testing.T) {
	value := label.Label{Source: label.SourceGenerated, Key: workload.KeyNamedPorts, Value: "web.TCP.80_dns.UDP.53"}
	id, err := New(300, label.NewSet(value, label.Kubernetes(label.KeyNamespace, "shop")))
	if err != nil {
		t.Fatal(err)
	}
	want := []workload.NamedPort{{Name: "dns", Protocol: workload.UDP, Port: 53}, {Name: "web", Protocol: workload.TCP, Port: 80}}
	if !slices.Equal(id.Ports, want) {
		t.Errorf("%v from %s", id.Ports, value)
	}
	value.Value = "web.TCP"
	if _, err := New(300, label.NewSet(value)); !errors.Is(err, workload.ErrNamedPort) {
		t.Errorf("%s gives %v", value, err)
	}
}
