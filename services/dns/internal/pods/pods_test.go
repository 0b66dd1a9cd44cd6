// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pods

import (
	"slices"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/workload"
)

func TestReusedIDBelongsToItsNewPod(t *testing.T) {
	var left []uint16
	p := New(func(endpoint uint16) { left = append(left, endpoint) })
	a, b := workload.Owner{ContainerID: "a", Interface: "eth0"}, workload.Owner{ContainerID: "b", Interface: "eth0"}
	now := time.Now()
	expect := func(what string, tenant string, want ...uint16) {
		t.Helper()
		if got := p.Get(5).Asker.Tenant; got != tenant || !slices.Equal(left, want) {
			t.Errorf("%s: tenant %q, left %v; want %q, %v", what, got, left, tenant, want)
		}
		left = nil
	}
	expect("at first", Unknown.Tenant)
	p.Upsert(a, Endpoint{5, "shop", now})
	first := p.Get(5)
	expect("added", "namespace shop")
	p.Upsert(a, Endpoint{5, "shop", now})
	if p.Get(5) != first || first.Gone() {
		t.Error("an unchanged endpoint was replaced")
	}
	expect("repeated", "namespace shop")
	p.Upsert(b, Endpoint{5, "bank", now}) // before a is deleted
	expect("reused", "namespace bank", 5)
	if !first.Gone() {
		t.Error("the former pod is not gone")
	}
	p.Delete(a)
	expect("the former deleted", "namespace bank")
	p.Upsert(b, Endpoint{5, "bank", now.Add(time.Second)})
	expect("created again", "namespace bank", 5)
	p.Upsert(b, Endpoint{6, "bank", now})
	expect("moved", Unknown.Tenant, 5)
	p.Upsert(a, Endpoint{5, "", now})
	expect("without a pod", "system")
	p.Keep(map[workload.Owner]struct{}{b: {}})
	expect("not listed", Unknown.Tenant, 5)
	p.Upsert(b, Endpoint{MaxEndpoint + 1, "bank", now})
	expect("an ID that is too high", Unknown.Tenant, 6)
	if p.Len() != 0 || p.Get(MaxEndpoint+1) != p.Get(65535) {
		t.Errorf("%d pods", p.Len())
	}
}
