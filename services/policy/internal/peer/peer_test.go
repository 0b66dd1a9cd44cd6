// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package peer

import (
	"reflect"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/policy/internal/port"
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

func TestNamedPortsSurviveTheLabel(t *testing.T) {
	ports := []NamedPort{{"web", port.TCP, 80}, {"dns", port.UDP, 53}, {"dns", port.TCP, 53}, {"web", port.TCP, 8080}, {"web", port.TCP, 80}}
	l, ok := NamedPortsLabel(ports)
	if !ok {
		t.Fatal("no label")
	}
	id, err := New(300, label.NewSet(l))
	if err != nil {
		t.Fatal(err)
	}
	want := []NamedPort{{"dns", port.TCP, 53}, {"dns", port.UDP, 53}, {"web", port.TCP, 80}, {"web", port.TCP, 8080}}
	if !reflect.DeepEqual(id.Ports, want) {
		t.Errorf("%v from %s", id.Ports, l)
	}
	if _, ok := NamedPortsLabel(nil); ok {
		t.Error("a pod without named ports has a label")
	}
	for _, bad := range []string{"x", "x.TCP", "x.TCP.0", "x.TCP.70000", ".TCP.80", "x.FOO.80", "x.TCP.80_"} {
		if _, err := ParseNamedPorts(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// FuzzParseNamedPorts looks for values that do not survive being written again.
func FuzzParseNamedPorts(f *testing.F) {
	for _, s := range []string{"http.TCP.80", "http.TCP.80_http.TCP.81_dns.udp.53", "a.SCTP.65535", "a.TCP.0", "_", "a..1", "a.TCP.65536", "a.TCP.+1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, value string) {
		ports, err := ParseNamedPorts(value)
		if err != nil || len(ports) == 0 {
			return
		}
		l, ok := NamedPortsLabel(ports)
		if !ok {
			t.Fatalf("%q gives no label", value)
		}
		again, err := ParseNamedPorts(l.Value)
		if err != nil {
			t.Fatalf("%q is written %q: %v", value, l.Value, err)
		}
		if m, _ := NamedPortsLabel(again); m != l {
			t.Fatalf("%q is written %q, and that %q", value, l.Value, m.Value)
		}
	})
}
