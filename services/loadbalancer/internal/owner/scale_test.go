// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// many returns services in 400 namespaces, and their slices.
func many(services, parts int) []manifest.Object {
	var out []manifest.Object
	addr := func(net byte, n int) netip.Addr {
		return netip.AddrFrom4([4]byte{net, byte(n >> 16), byte(n >> 8), byte(n)})
	}
	name := func(n int) service.Name {
		return service.Name{Namespace: fmt.Sprint("n", n%400), Name: fmt.Sprint("s", n)}
	}
	for n := range services {
		s := &service.Service{
			Name: name(n), Created: int64(1 + n), IPv4: true, ClusterIPs: []netip.Addr{addr(10, n)},
			Ports: []service.Port{{Name: "a", Protocol: service.TCP, Port: 80}, {Name: "b", Protocol: service.TCP, Port: 81}},
		}
		out = append(out, manifest.Object{Key: service.ObjectKey{Kind: service.KindService, Name: s.Name}, Service: s})
	}
	for n := range parts {
		of := name(n % services)
		x := &service.Slice{
			Name: service.Name{Namespace: of.Namespace, Name: fmt.Sprint("e", n)}, Created: int64(1 + n), Service: of.Name,
			Ports: []service.SlicePort{{Name: "a", Protocol: service.TCP, Port: 8080}},
		}
		for e := range 2 {
			x.Endpoints = append(x.Endpoints, service.NewEndpoint(addr(11, 2*n+e), service.About{State: service.Ready}))
		}
		out = append(out, manifest.Object{Key: service.ObjectKey{Kind: service.KindSlice, Name: x.Name}, Slice: x})
	}
	return out
}

// listAll passes objects in batches, as a source does, and completes the listing.
func listAll(b *testing.B, o *running, objects []manifest.Object) {
	b.Helper()
	f := o.Objects(managed.SourceKubernetes)
	all := make(map[service.ObjectKey]struct{})
	for len(objects) > 0 {
		n := min(512, len(objects))
		c := watch.Changes[service.ObjectKey, Given]{Upserts: make(map[service.ObjectKey]Given)}
		for _, x := range objects[:n] {
			c.Upserts[x.Key] = Given{Object: x}
			all[x.Key] = struct{}{}
		}
		objects = objects[n:]
		if err := f.Apply(b.Context(), c); err != nil {
			b.Fatal(err)
		}
	}
	if err := f.Complete(b.Context(), all); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkListing measures a first listing of services and slices, a third of which exceeds the limits. The time per
// service must not grow with their number.
func BenchmarkListing(b *testing.B) {
	for _, services := range []int{10_000, 20_000, 40_000} {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			objects := many(services, services*5/2)
			for b.Loop() {
				config := testConfig(&clock{now: time.Unix(1e9, 0)})
				config.Limits = Limits{
					Services: 65_536, Slices: 131_072, BackendsPerService: 65_536,
					Frontends: services * 4 / 3, Backends: services * 10 / 3,
				}
				o := start(b, config, b.TempDir(), managed.SourceKubernetes)
				listAll(b, o, objects)
				if err := o.computeLevels(b.Context()); err != nil {
					b.Fatal(err)
				}
				o.stop()
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*services), "µs/service")
		})
	}
}

// BenchmarkLevel computes the tenants' levels for existing services and slices, after one change.
func BenchmarkLevel(b *testing.B) {
	for _, services := range []int{10_000, 20_000, 40_000} {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			config := testConfig(&clock{now: time.Unix(1e9, 0)})
			config.Limits = Limits{
				Services: 65_536, Slices: 131_072, BackendsPerService: 65_536,
				Frontends: services * 4 / 3, Backends: services * 10 / 3,
			}
			o := start(b, config, b.TempDir(), managed.SourceKubernetes)
			objects := many(services, services*5/2)
			listAll(b, o, objects)
			if err := o.computeLevels(b.Context()); err != nil {
				b.Fatal(err)
			}
			f := o.Objects(managed.SourceKubernetes)
			ports := objects[0].Service.Ports
			for n := 0; b.Loop(); n++ {
				x := *objects[0].Service
				x.Ports = ports[:1+n%2]
				given := Given{Object: manifest.Object{Key: objects[0].Key, Service: &x}}
				if err := f.Apply(b.Context(), watch.Changes[service.ObjectKey, Given]{
					Upserts: map[service.ObjectKey]Given{objects[0].Key: given},
				}); err != nil {
					b.Fatal(err)
				}
				if err := o.computeLevels(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
