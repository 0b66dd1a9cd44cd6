// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pods

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
)

func TestReusedIDBelongsToItsNewPod(t *testing.T) {
	var left []uint16
	p := New(shares.Settings{TenantLabel: "t"}, func(endpoint uint16) { left = append(left, endpoint) })
	a, b := workload.Owner{ContainerID: "a", Interface: "eth0"}, workload.Owner{ContainerID: "b", Interface: "eth0"}
	now := time.Now()
	expect := func(what string, tenant string, want ...uint16) {
		t.Helper()
		if got := p.Get(5).Client.Tenant; got != tenant || !slices.Equal(left, want) {
			t.Errorf("%s: tenant %q, left %v; want %q, %v", what, got, left, tenant, want)
		}
		left = nil
	}
	expect("at first", Unknown.Tenant)
	p.Upsert(a, Endpoint{ID: 5, Namespace: "shop", Created: now})
	first := p.Get(5)
	expect("added", "namespace shop")
	p.Upsert(a, Endpoint{ID: 5, Namespace: "shop", Created: now})
	if p.Get(5) != first || first.Gone() {
		t.Error("an unchanged endpoint was replaced")
	}
	expect("repeated", "namespace shop")
	p.Upsert(b, Endpoint{ID: 5, Namespace: "bank", Created: now}) // before a is deleted
	expect("reused", "namespace bank", 5)
	if !first.Gone() {
		t.Error("the former pod is not gone")
	}
	p.Delete(a)
	expect("the former deleted", "namespace bank")
	p.Upsert(b, Endpoint{ID: 5, Namespace: "bank", Created: now.Add(time.Second)})
	expect("created again", "namespace bank", 5)
	p.Upsert(b, Endpoint{ID: 6, Namespace: "bank", Created: now})
	expect("moved", Unknown.Tenant, 5)
	p.Upsert(a, Endpoint{ID: 5, Namespace: "", Created: now})
	expect("without a pod", "system")
	p.Keep(map[workload.Owner]struct{}{b: {}})
	expect("not listed", Unknown.Tenant, 5)
	p.Upsert(b, Endpoint{ID: MaxEndpoint + 1, Namespace: "bank", Created: now})
	expect("an ID that is too high", Unknown.Tenant, 6)
	if p.Len() != 0 || p.Get(MaxEndpoint+1) != p.Get(65535) {
		t.Errorf("%d pods", p.Len())
	}
}

// TestTenantsLabelDecidesWhoShares: namespaces with the same value of the tenant label are one tenant. Learned
// addresses still apply only to the pod's own namespace.
func TestTenantsLabelDecidesWhoShares(t *testing.T) {
	p := New(shares.Settings{SystemNamespaces: []string{"tools"}}, func(uint16) {})
	for id, e := range map[uint32]struct{ namespace, value, tenant string }{
		1: {"shop", "acme", "tenant acme"}, 2: {"bank", "acme", "tenant acme"}, 3: {"shop", "", "namespace shop"},
		4: {"tools", "acme", "system"}, 5: {"", "", "system"},
	} {
		p.Upsert(workload.Owner{ContainerID: e.namespace + e.value},
			Endpoint{ID: id, Namespace: e.namespace, Tenant: e.value})
		if a := p.Get(uint16(id)).Client; a.Tenant != e.tenant || a.Namespace != e.namespace { //nolint:gosec // as it is
			t.Errorf("%+v: asker %+v", e, a)
		}
	}
}

func TestWaitEndsWhenThePodIsKnown(t *testing.T) {
	p := New(shares.Settings{}, func(uint16) {})
	if p.Knows(p.Get(5)) {
		t.Error("a pod is known that was not reported")
	}
	go p.Upsert(workload.Owner{ContainerID: "a"}, Endpoint{ID: 5, Namespace: "shop"})
	if pod, ok := p.Wait(t.Context(), 5); !ok || pod.Client.Namespace != "shop" || !p.Knows(pod) {
		t.Errorf("got %v, %t", pod, ok)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, ok := p.Wait(ctx, 6); ok {
		t.Error("another pod is known")
	}
}
