// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// large returns services of a namespace, each with a slice of n endpoints.
func large(namespace string, network byte, services, n int) (out []manifest.Object) {
	address := func(first byte, number int) netip.Addr {
		return netip.AddrFrom4([4]byte{first, network + byte(number>>16), byte(number >> 8), byte(number)})
	}
	for i := range services {
		name := service.Name{Namespace: namespace, Name: fmt.Sprint("s", i)}
		s := &service.Service{
			Name: name, Created: int64(1 + i), IPv4: true, ClusterIPs: []netip.Addr{address(11, i)},
			Ports: []service.Port{{Name: "a", Protocol: service.TCP, Port: 80}},
		}
		x := &service.Slice{
			Name: name, Created: int64(1 + i), Service: name.Name,
			Ports: []service.SlicePort{{Name: "a", Protocol: service.TCP, Port: 8080}},
		}
		for e := range n {
			x.Endpoints = append(x.Endpoints, service.NewEndpoint(address(10, i*n+e), service.About{State: service.Ready}))
		}
		out = append(out, manifest.Object{Key: service.ObjectKey{Kind: service.KindService, Name: name}, Service: s},
			manifest.Object{Key: service.ObjectKey{Kind: service.KindSlice, Name: name}, Slice: x})
	}
	return out
}

// TestTenantHas250000BackendsBesideTheReserve: with the default limit and the capacity of the datapath's maps, a
// single tenant can have 5,000 services of 50 backends. The tenant "system" still has its reserve of backends.
func TestTenantHas250000BackendsBesideTheReserve(t *testing.T) {
	const services, each, ofSystem = 5000, 50, 25_000
	o := start(t, loadConfig(), t.TempDir(), managed.SourceKubernetes)
	reported := frontend.Capacity{Frontends: 55_295, Backends: 280_165, Members: 560_332, BackendsPerList: 65_535}
	s, err := o.Subscribers().Subscribe(t.Context(), Subscription{Name: "datapath", Enforces: true, Capacity: &reported})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	give := func(objects []manifest.Object) {
		t.Helper()
		c := watch.Changes[service.ObjectKey, Given]{Upserts: make(map[service.ObjectKey]Given)}
		for _, x := range objects {
			c.Upserts[x.Key] = Given{Object: x}
		}
		if err := o.Objects(managed.SourceKubernetes).Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	objects := large("shop", 0, services, each)
	give(objects)
	all := make(map[service.ObjectKey]struct{})
	for _, x := range objects {
		all[x.Key] = struct{}{}
	}
	if err := o.Objects(managed.SourceKubernetes).Complete(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	level := func() {
		t.Helper()
		if err := o.computeLevels(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	backends := func() (asked, used int) {
		t.Helper()
		all, err := o.Reader().Usage(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, u := range all {
			if u.Limit.Name == LimitBackends {
				return u.Asked, u.Used
			}
		}
		t.Fatal("no limit of backends")
		return 0, 0
	}
	level()
	if asked, used := backends(); asked != services*each || used != asked {
		t.Errorf("the tenant asks for %d backends and has %d, want all of %d", asked, used, services*each)
	}
	give(large("kube-system", 128, ofSystem/each, each))
	if asked, used := backends(); asked != services*each+ofSystem || used != asked {
		t.Errorf("with the system's backends: %d asked and %d used, want all of %d", asked, used, services*each+ofSystem)
	}
	give(large("late", 160, 200, each))
	level()
	if asked, used := backends(); used >= asked || used < services*each {
		t.Errorf("with a tenant for which there is no space: %d asked and %d used", asked, used)
	}
}
