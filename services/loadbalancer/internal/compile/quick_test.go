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

// TestKeysAreThoseOfTheFrontends compares the separately computed keys with the keys of the frontends.
func TestKeysAreThoseOfTheFrontends(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		s := someService(r)
		var want []frontend.Key
		for _, f := range here.plain(s, nil, nil) {
			want = append(want, f.Key)
		}
		slices.SortFunc(want, CompareKeys)
		if got := here.Keys(s); !slices.Equal(got, slices.Compact(want)) {
			t.Fatalf("%+v\nhas the keys %v, want %v", s, got, want)
		}
	}
}

// someSlices returns slices whose ports have names of a few ports of services.
func someSlices(r *rand.Rand) (out []*service.Slice) {
	for i := range r.IntN(4) {
		x := &service.Slice{Name: service.Name{Namespace: "shop", Name: fmt.Sprint("s", i)}, IPv6: r.IntN(2) == 0}
		for range r.IntN(4) {
			x.Ports = append(x.Ports, service.SlicePort{
				Name: fmt.Sprint("p", r.IntN(3)), Protocol: []service.Protocol{service.TCP, service.UDP}[r.IntN(2)],
				Port: uint16(r.IntN(3)), // 0 is not usable
			})
		}
		for range r.IntN(4) {
			a := netip.AddrFrom4([4]byte{10, 0, 0, byte(r.IntN(4))})
			switch r.IntN(6) {
			case 0:
				a = netip.AddrFrom4([4]byte{127, 0, 0, 1})
			case 1, 2:
				a = netip.MustParseAddr(fmt.Sprint("fd00::", 1+r.IntN(3)))
			}
			x.Endpoints = append(x.Endpoints, service.NewEndpoint(a, service.About{State: service.State(r.IntN(8))}))
		}
		out = append(out, x)
	}
	return out
}

// TestNotesAreThoseOfTheFrontends compares the separately computed notes with the notes about the frontends.
func TestNotesAreThoseOfTheFrontends(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	some := 0
	for range 5000 {
		v := View{Service: someService(r), Slices: someSlices(r)}
		for i := range v.Service.Ports {
			v.Service.Ports[i].Name = fmt.Sprint("p", i)
		}
		var got, want Notes
		here.Notes(v, nil, &got)
		if here.Within(v, nil, &want); !slices.Equal(got, want) {
			t.Fatalf("%+v has the notes %q, want %q", v.Service, got, want)
		}
		some += len(want)
	}
	if some == 0 {
		t.Error("no service has a note")
	}
}

// TestPortsAreFoundInSlices compares the linear search with the map that services with many ports use.
func TestPortsAreFoundInSlices(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 2000 {
		v := View{Service: &service.Service{Ports: make([]service.Port, 1)}, Slices: someSlices(r)}
		search := v.index()
		v.Service.Ports = make([]service.Port, 1+fewSearches)
		byMap := v.index()
		if search.all != nil {
			t.Fatal("one port is found by a map")
		}
		for p := range 3 {
			for _, protocol := range []service.Protocol{service.TCP, service.UDP} {
				for _, ipv6 := range []bool{false, true} {
					id := portID{fmt.Sprint("p", p), protocol, ipv6}
					var got, want []source
					search.each(id, func(s source) { got = append(got, s) })
					byMap.each(id, func(s source) { want = append(want, s) })
					if !slices.Equal(got, want) {
						t.Fatalf("%+v: %v, want %v", id, got, want)
					}
				}
			}
		}
	}
}

// TestChargeWithoutTablesCountsBackends compares the charge with a reference implementation that counts the backends of
// each port.
func TestChargeWithoutTablesCountsBackends(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for range 2000 {
		s := &service.Service{}
		for i := range 1 + r.IntN(2*fewPorts) {
			p := service.Port{Name: fmt.Sprint("p", i/2), Protocol: service.TCP, Port: uint16(1 + i)}
			if i%2 > 0 {
				p.Protocol = service.UDP
			}
			s.Ports = append(s.Ports, p)
		}
		charge, ports := ChargeOf(s), PortsOf(s)
		for _, x := range someSlices(r) {
			units := ports.Count(x)
			if units == 0 {
				continue
			}
			if got := charge.Units(x, units); got != units {
				t.Fatalf("%d backends need %d units", units, got)
			}
			part := r.IntN(units + 1)
			if got := charge.Within(x, units, part); got != part {
				t.Fatalf("%d of %d backends fit into %d units", got, units, part)
			}
			charge.Add(x, units)
		}
	}
}
