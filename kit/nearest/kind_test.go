// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nearest

import "testing"

func TestMisspelledKindIsTheNearestKind(t *testing.T) {
	known := []Kind{
		{"networking.k8s.io", "NetworkPolicy", "networkpolicies"},
		{"cilium.io", "CiliumNetworkPolicy", "ciliumnetworkpolicies"},
		{"", "Service", "services"},
	}
	for _, c := range []struct{ version, kind, want string }{
		{"networking.k8s.io/v1", "NetworkPolicy", "NetworkPolicy"},
		{"networking.k8s.io/v1", "NetworkPolcy", "NetworkPolicy"},
		{"networking.k8s.io/v1", "NetworkPolicies", "NetworkPolicy"},
		{"networking.k8.io/v1", "networkpolicy", "NetworkPolicy"},
		{"Networking.k8s.io/v1", "NetworkPolicys", "NetworkPolicy"},
		{"v1", "NetworkPolicy", "NetworkPolicy"},
		{"", "NetworkPolicy", "NetworkPolicy"},
		{"cilium.io/v2", "NetworkPolicy", "NetworkPolicy"},
		{"cilium.io/v2", "CiliumNetworkPolcy", "CiliumNetworkPolicy"},
		{"v1", "Servcie", "Service"},
		{"cilium.io/v2", "CiliumEgressGatewayPolicy", ""},
		{"projectcalico.org/v3", "NetworkPolicy", ""},
		{"serving.knative.dev/v1", "Service", ""},
		{"policy/v1", "PodDisruptionBudget", ""},
		{"v1", "Secret", ""},
		{"v1", "ServiceAccount", ""},
		{"v1", "Namespace", ""},
	} {
		k, ok := KindOf(c.version, c.kind, known)
		if ok != (c.want != "") || ok && k.Name != c.want {
			t.Errorf("%s %s: %q, %t; want %q", c.version, c.kind, k.Name, ok, c.want)
		}
	}
}
