// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package vip finds the VIPs: addresses that only Services use. These are cluster IPs, and
// addresses of load balancers for which the datapath forwards packets from inside to
// backends. A packet to a port of a VIP without a frontend would leave by the node's routes
// and return from its gateway. The frontend maps therefore have a key for the address
// itself, by which the programs know it. External addresses have no such key, because other
// machines may have them too.
package vip

import (
	"net/netip"

	"github.com/sluice-net/sluice/model/frontend"
)

// Claim is what a frontend says about its address.
type Claim uint8

// The claims.
const (
	Nothing   Claim = iota
	Exclusive       // only Services use the address
	Shared          // others answer at the address too
)

// Of is what a frontend says.
func Of(f *frontend.Frontend) Claim {
	switch {
	case f.Kind == frontend.ClusterIP:
		return Exclusive
	case f.Kind != frontend.LoadBalancer:
		return Nothing
	case f.Inside == nil: // what the node's own send there is for the load balancer
		return Shared
	}
	return Exclusive
}

// address is what the frontends of one address say.
type address struct {
	exclusive, shared int  // frontends that claim so
	written           bool // the map has the key
}

// count adds frontends that claim so.
func (a *address) count(c Claim, n int) {
	switch c {
	case Nothing:
	case Exclusive:
		a.exclusive += n
	case Shared:
		a.shared += n
	}
}

func (a *address) wanted() bool { return a.exclusive > 0 && a.shared == 0 }

// Addresses are those about which frontends say something. The zero value has none. It is
// not safe for concurrent use.
type Addresses struct {
	known   map[netip.Addr]*address
	changed map[netip.Addr]struct{}
	// adopted: some keys are of an earlier process, and no frontend has claimed them yet.
	adopted bool
}

func (s *Addresses) at(addr netip.Addr) *address {
	a := s.known[addr]
	if a == nil {
		if s.known == nil {
			s.known = map[netip.Addr]*address{}
		}
		a = &address{}
		s.known[addr] = a
	}
	return a
}

func (s *Addresses) change(addr netip.Addr) {
	if s.changed == nil {
		s.changed = map[netip.Addr]struct{}{}
	}
	s.changed[addr] = struct{}{}
}

// NeedsKey says whether a frontend's claim takes a key more.
func (s *Addresses) NeedsKey(f *frontend.Frontend) bool {
	a := s.known[f.Key.Addr]
	return Of(f) == Exclusive && (a == nil || !a.written && !a.wanted() && a.shared == 0)
}

// Claim has a frontend say something else about its address than before.
func (s *Addresses) Claim(addr netip.Addr, before, now Claim) {
	if before == now {
		return
	}
	a := s.at(addr)
	a.count(before, -1)
	a.count(now, 1)
	s.change(addr)
}

// Adopt takes over the key of an address that an earlier process has written.
func (s *Addresses) Adopt(addr netip.Addr) {
	s.at(addr).written = true
	s.adopted = true
}

// Disown has Changed name the keys that were adopted and that no frontend claims: all
// frontends are known.
func (s *Addresses) Disown() {
	if !s.adopted {
		return
	}
	s.adopted = false
	for addr := range s.known {
		s.change(addr)
	}
}

// Changed returns the addresses whose keys are to be inserted and deleted, and forgets
// that they have changed.
func (s *Addresses) Changed() (insert, remove []netip.Addr) {
	for addr := range s.changed {
		switch a := s.known[addr]; {
		case a.wanted() && !a.written:
			insert = append(insert, addr)
		case !a.wanted() && a.written:
			remove = append(remove, addr)
		case *a == (address{}):
			delete(s.known, addr)
		}
	}
	s.changed = nil
	return insert, remove
}

// Written says that the map has the key of an address.
func (s *Addresses) Written(addr netip.Addr) { s.at(addr).written = true }

// Has reports whether the map has the key of an address.
func (s *Addresses) Has(addr netip.Addr) bool {
	a := s.known[addr]
	return a != nil && a.written
}

// Removed says that it has not.
func (s *Addresses) Removed(addr netip.Addr) {
	a := s.at(addr)
	a.written = false
	if *a == (address{}) {
		delete(s.known, addr)
	}
}

// Each calls f for every address that should have a key.
func (s *Addresses) Each(f func(netip.Addr)) {
	for addr, a := range s.known {
		if a.written || a.wanted() {
			f(addr)
		}
	}
}
