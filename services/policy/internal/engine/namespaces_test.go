// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// TestNamesAreForTheNamespaceThatAsked: a policy selects the same name for pods of all namespaces. Addresses that a
// pod has learned apply only to its own namespace. Addresses that were added by hand apply to all namespaces.
func TestNamesAreForTheNamespaceThatAsked(t *testing.T) {
	const a, b, none = identity.MinCluster, identity.MinCluster + 1, identity.MinCluster + 2
	docs, err := manifest.Parse([]byte("apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\n" +
		"metadata: {name: names}\nspec: {endpointSelector: {}, egress: [{toFQDNs: [{matchPattern: '*.example'}]}]}"))
	if err != nil {
		t.Fatal(err)
	}
	names, err := policy.Decode(docs[0], rule.Options{})
	if err != nil {
		t.Fatal(err)
	}
	without, err := peer.New(none, label.NewSet(label.Kubernetes("app", "tool")))
	if err != nil {
		t.Fatal(err)
	}
	world, err := peer.New(identity.WorldIPv4, label.NewSet(label.Reserved(identity.NameWorldIPv4)))
	if err != nil {
		t.Fatal(err)
	}
	e := New(Config{})
	apply(t, e, Change{
		AddIdentities: []peer.Identity{labelled(t, a, "a"), labelled(t, b, "b"), without, world},
		AddSubjects:   []identity.Numeric{a, b, none}, UpsertPolicies: []policy.Object{names},
	})
	addr := netip.MustParseAddr("192.0.2.7")
	allowed := func(e *Engine) (list []identity.Numeric) {
		for _, n := range []identity.Numeric{a, b, none} {
			v, err := e.Lookup(n, policytable.Egress, identity.WorldIPv4, addr, port.At(port.TCP, 443))
			if err != nil {
				t.Fatal(err)
			}
			if v.Action == policytable.Allow {
				list = append(list, n)
			}
		}
		return list
	}
	for _, c := range []struct {
		key  dnsname.Learned
		want []identity.Numeric
	}{
		{dnsname.ForNamespace("x.example", "a"), []identity.Numeric{a}},
		{dnsname.ForNamespace("x.example", "b"), []identity.Numeric{b}},
		{dnsname.ForNamespace("x.example", ""), []identity.Numeric{none}},
		{dnsname.ForNamespace("x.example", "other"), nil},
		{dnsname.ForAll("x.example"), []identity.Numeric{a, b, none}},
	} {
		learnt := []Name{{c.key, []netip.Addr{addr}}}
		apply(t, e, Change{Learn: learnt})
		if got := allowed(e); !slices.Equal(got, c.want) {
			t.Errorf("%q opens %s for %v, want %v", c.key, addr, got, c.want)
		}
		fork, err := e.Draft().Fork(nil, a, b, none) // tables that are compiled after the name was learned
		if err != nil {
			t.Fatal(err)
		}
		if got := allowed(fork); !slices.Equal(got, c.want) {
			t.Errorf("%q, compiled anew, opens %s for %v, want %v", c.key, addr, got, c.want)
		}
		apply(t, e, Change{Forget: learnt})
		if got := allowed(e); len(got) > 0 {
			t.Errorf("%q was forgotten, and %s is open for %v", c.key, addr, got)
		}
	}
	if !e.SelectsName(a, "x.example.") || e.SelectsName(a, "x.test.") || e.SelectsName(99, "x.example.") {
		t.Error("the names of a subject are not the ones of its policies")
	}
}
