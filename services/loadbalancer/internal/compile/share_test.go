// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package compile

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// someService is a random service of any type with some ports and addresses.
func someService(r *rand.Rand) *service.Service {
	s := &service.Service{
		Name: service.Name{Namespace: "shop", Name: "web"}, Type: service.Type(r.IntN(3)),
		IPv4: r.IntN(4) > 0, IPv6: r.IntN(2) == 0,
	}
	if r.IntN(5) > 0 {
		s.ClusterIPs = append(s.ClusterIPs, netip.MustParseAddr("10.96.0.1"))
	}
	if r.IntN(2) == 0 {
		s.ClusterIPs = append(s.ClusterIPs, netip.MustParseAddr("fd00::1"))
	}
	for i := range r.IntN(3) {
		s.ExternalIPs = append(s.ExternalIPs, netip.MustParseAddr(fmt.Sprint("198.51.100.", i+1)))
	}
	for i := range r.IntN(3) {
		s.Ingress = append(s.Ingress, service.Ingress{
			Addr: netip.MustParseAddr(fmt.Sprint("203.0.113.", i+1)), Proxy: r.IntN(3) == 0,
		})
	}
	for i := range r.IntN(6) {
		p := service.Port{Name: fmt.Sprint("p", i), Protocol: service.TCP, Port: uint16(80 + i)}
		if r.IntN(2) == 0 {
			p.NodePort = uint16(30_000 + i)
		}
		s.Ports = append(s.Ports, p)
	}
	return s
}

// usedBy counts the units of the limit of frontends that frontends use, by a simple and slow method.
func usedBy(fs []*frontend.Frontend, elements bool) int {
	fronts, keys := 0, map[bool]int{}
	alone := make(map[netip.Addr]bool)
	for _, f := range fs {
		if f.ExceedsShare && f.Kind == frontend.NodePort {
			continue // reserved separately
		}
		switch {
		case !elements:
			fronts++
			continue
		case f.Kind == frontend.ClusterIP, f.Inside == nil:
			fronts++
		default:
			fronts += 2
		}
		keys[f.Key.Addr.Is6()]++
		if f.Inside != nil && (f.Kind == frontend.ClusterIP || f.Kind == frontend.LoadBalancer) {
			alone[f.Key.Addr] = true
		}
	}
	for a := range alone {
		keys[a.Is6()]++
	}
	return max(fronts, keys[false], keys[true])
}

// TestServicesUseNoMoreThanTheirShare: for any share, the frontends of a service use no more units than the share.
// With a share that covers all requested units, the service has all frontends. A larger share never gives fewer
// frontends.
func TestServicesUseNoMoreThanTheirShare(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for range 2000 {
		s := someService(r)
		n := &Node{Name: "n1", ExternalIPs: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}}
		n.CountElements = r.IntN(2) == 0
		all := n.Of(View{Service: s}, nil)
		needs := n.Needs(s)
		if got := usedBy(all, n.CountElements); got != needs.All || n.Count(s) != len(all) {
			t.Fatalf("%+v: it needs %+v, but uses %d for %d of %d", s, needs, got, len(all), n.Count(s))
		}
		within := 0
		for share := range needs.All + 2 {
			fs := n.Within(View{Service: s}, &share, nil)
			if got := usedBy(fs, n.CountElements); got > share {
				t.Fatalf("%+v: of a share of %d it uses %d:\n%v", s, share, got, fs)
			}
			has, refuses := 0, make(map[netip.Addr]bool)
			nodePorts := 0
			for _, f := range fs {
				if !f.ExceedsShare {
					has++
				} else if f.Inside == nil || len(f.Inside.Backends) > 0 || f.Inside.Drop || f.Outside != nil ||
					f.Kind == frontend.ExternalIP || f.Kind == frontend.LoadBalancer &&
					slices.Contains(s.Ingress, service.Ingress{Addr: f.Key.Addr, Proxy: true}) {
					t.Fatalf("%+v: %s does not refuse connections", s, f)
				}
				if !f.Key.Node {
					refuses[f.Key.Addr] = true
				} else {
					nodePorts++
				}
			}
			if has < within {
				t.Fatalf("%+v: with a share of %d it has %d frontends, with less it had %d", s, share, has, within)
			}
			within = has
			if share >= needs.Addresses && len(s.Ports) > 0 {
				for _, a := range s.ClusterIPs {
					if !refuses[a] {
						t.Fatalf("%+v: with a share of %d the address %s has no frontend", s, share, a)
					}
				}
			}
			if want := nodePorts * 2; want != needs.NodePorts && n.CountElements ||
				nodePorts != needs.NodePorts && !n.CountElements {
				t.Fatalf("%+v: with a share of %d it has %d node ports, want %d", s, share, nodePorts, needs.NodePorts)
			}
			keys := n.KeysWithin(s, &share)
			if len(keys) != len(fs) {
				t.Fatalf("%+v: %d keys of %d frontends", s, len(keys), len(fs))
			}
		}
		if within != len(all) {
			t.Fatalf("%+v: with all that it needs it has %d frontends of %d", s, within, len(all))
		}
	}
}

// TestCutKeepsTheFirstBackends: a reduced slice keeps exactly its first backends.
func TestCutKeepsTheFirstBackends(t *testing.T) {
	s := &service.Service{Ports: []service.Port{{Name: "a", Protocol: service.TCP}, {Name: "b", Protocol: service.UDP}}}
	x := &service.Slice{Ports: []service.SlicePort{
		{Name: "a", Protocol: service.TCP, Port: 1},
		{Name: "other", Protocol: service.TCP, Port: 2},
		{Name: "b", Protocol: service.UDP, Port: 3},
		{Name: "b", Protocol: service.TCP, Port: 4},
	}}
	for i := range 4 {
		about := service.About{State: service.Ready}
		if i == 1 {
			about.State = 0 // it neither serves nor terminates
		}
		x.Endpoints = append(x.Endpoints, service.NewEndpoint(netip.MustParseAddr(fmt.Sprint("10.0.0.", i)), about))
	}
	ports := PortsOf(s)
	if got := ports.Count(x); got != 6 {
		t.Errorf("%d backends, want 6", got)
	}
	for n := range 8 {
		got := 0
		for _, part := range ports.Cut(x, n) {
			got += ports.Count(part)
		}
		if got != min(n, 6) {
			t.Errorf("of %d backends %d are left", n, got)
		}
	}
}
