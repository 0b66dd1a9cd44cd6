// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package vip

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/frontend"
)

// TestAddressHasAKeyWhileItIsOfServicesAlone changes claims, and adopts a key that a previous process wrote.
func TestAddressHasAKeyWhileItIsOfServicesAlone(t *testing.T) {
	var s Addresses
	a, b := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00::1")
	settle := func(what string, insert, remove []netip.Addr) {
		t.Helper()
		in, out := s.Changed()
		if !slices.Equal(in, insert) || !slices.Equal(out, remove) {
			t.Errorf("%s: insert %v, remove %v, want %v, %v", what, in, out, insert, remove)
		}
		for _, addr := range in {
			s.Written(addr)
		}
		for _, addr := range out {
			s.Removed(addr)
		}
	}
	made := func(kind frontend.Kind, inside *frontend.List) *frontend.Frontend {
		return &frontend.Frontend{Key: frontend.Key{Addr: a, Port: 80, Protocol: frontend.TCP}, Kind: kind, Inside: inside}
	}
	for kind, want := range map[frontend.Kind]Claim{
		frontend.ClusterIP: Exclusive, frontend.LoadBalancer: Shared,
		frontend.ExternalIP: Nothing, frontend.HostPort: Nothing,
	} {
		if got := Of(made(kind, nil)); got != want {
			t.Errorf("kind %d claims %d, want %d", kind, got, want)
		}
	}
	balanced := made(frontend.LoadBalancer, &frontend.List{})
	if Of(balanced) != Exclusive || !s.NeedsKey(balanced) {
		t.Error("the address of a load balancer takes no key")
	}
	s.Claim(a, Nothing, Exclusive)
	if s.NeedsKey(balanced) {
		t.Error("a second frontend takes another key")
	}
	s.Claim(a, Nothing, Exclusive)
	settle("two claims", []netip.Addr{a}, nil)
	s.Claim(a, Exclusive, Nothing)
	settle("one has gone", nil, nil)
	s.Claim(a, Nothing, Shared)
	settle("it is a proxy's", nil, []netip.Addr{a})
	if s.NeedsKey(balanced) {
		t.Error("the address of a proxy takes a key")
	}
	s.Claim(a, Shared, Nothing)
	settle("it is not", []netip.Addr{a}, nil)
	s.Claim(a, Exclusive, Nothing)
	settle("none is left", nil, []netip.Addr{a})

	s.Adopt(a)
	s.Adopt(b)
	settle("adopted", nil, nil)
	s.Claim(a, Nothing, Exclusive)
	settle("one is claimed", nil, nil)
	s.Disown()
	settle("all are known", nil, []netip.Addr{b})
	s.Claim(a, Exclusive, Nothing)
	settle("the end", nil, []netip.Addr{a})
	s.Each(func(addr netip.Addr) { t.Errorf("%v is still known", addr) })
}
