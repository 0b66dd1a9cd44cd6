// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package decode

import "testing"

// TestDocumentOfAMisspelledKindIsolates: a document with a misspelled kind isolates its namespace. If the most
// similar kind is cluster-wide, the document isolates all pods.
func TestDocumentOfAMisspelledKindIsolates(t *testing.T) {
	for kind, namespace := range map[string]string{
		"CiliumClusterwideNetworkPolcy":    "",
		"CiliumClusterwideNetworkPolicies": "",
		"CiliumNetworkPolcy":               "shop",
		"NoPolicyAtAll":                    "none",
	} {
		f := Options{}.File("a.yaml", []byte("apiVersion: cilium.io/v2\nkind: "+kind+
			"\nmetadata: {name: a, namespace: shop}\nspec: {endpointSelector: {}, ingress: [{}]}\n"))
		if namespace == "none" {
			if len(f.Policies) != 0 || len(f.Skipped) != 1 {
				t.Errorf("%s: %d policies, skipped %q", kind, len(f.Policies), f.Skipped)
			}
			continue
		}
		if len(f.Policies) != 1 || f.Policies[0].Object.Isolates == "" || f.Policies[0].Object.Key.Namespace != namespace {
			t.Errorf("%s: %+v, unreadable %q, want one that isolates namespace %q", kind, f.Policies, f.Unreadable, namespace)
		}
	}
}
