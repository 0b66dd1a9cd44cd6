// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package dnsname

import "testing"

func TestLearnedNamesAreForNamespaces(t *testing.T) {
	for key, want := range map[Learned]struct {
		namespace string
		limited   bool
		forShop   bool
		forNone   bool
	}{
		ForAll("A.example"):               {"", false, true, true},
		ForNamespace("A.example", "shop"): {"shop", true, true, false},
		ForNamespace("A.example", "data"): {"data", true, false, false},
		ForNamespace("A.example", ""):     {"", true, false, true},
	} {
		namespace, limited := key.Namespace()
		if key.Name() != "A.example" || namespace != want.namespace || limited != want.limited ||
			key.For("shop") != want.forShop || key.For("") != want.forNone {
			t.Errorf("%q: %q, %t, for shop %t, for none %t", key, namespace, limited, key.For("shop"), key.For(""))
		}
		c := key.Canonical()
		if got, _ := c.Namespace(); c.Name() != "a.example." || got != namespace || c.Canonical() != c {
			t.Errorf("%q has the canonical form %q", key, c)
		}
	}
}
