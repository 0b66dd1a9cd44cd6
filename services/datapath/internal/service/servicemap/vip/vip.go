// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package vip tracks virtual IPs: addresses that only Services use. These are cluster IPs, and addresses of load
// balancers for which the datapath forwards packets from inside to backends. A packet to a port of a virtual IP without
// a frontend would leave through the node's routes and return from its gateway. Therefore the frontend maps have a key
// for the address itself, which the programs check. External addresses have no such key, because other machines may
// have them.
package vip

import (
	"net/netip"

	"github.com/sluice-net/sluice/model/frontend"
)

// Claim is the statement of a frontend about the use of its address.
type Claim uint8

const (
	Nothing   Claim = iota
	Exclusive       // only Services use the address
	Shared          // other hosts use the address, too
)

// Of returns the claim of a frontend.
func Of(f *frontend.Frontend) Claim {
	switch {
	case f.Kind == frontend.ClusterIP:
		return Exclusive
	case f.Kind != frontend.LoadBalancer:
		return Nothing
	case f.Inside == nil: // packets from the node's own pods go to the load balancer
		return Shared
	}
	return Exclusive
}

// address counts the claims on one address.
type address struct {
	exclusive, shared int  // number of frontends with each claim
	written           bool // the map has the key
}

// count adds frontends with a claim.
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

// Addresses are the addresses with claims. The zero value is empty. It is not safe for concurrent use.
type Addresses struct {
	known   map[netip.Addr]*address
	changed map[netip.Addr]struct{}
	// adopted: some keys come from a previous process and are not claimed yet.
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

// NeedsKey reports whether the claim of a frontend needs an additional key.
func (s *Addresses) NeedsKey(f *frontend.Frontend) bool {
	a := s.known[f.Key.Addr]
	return Of(f) == Exclusive && (a == nil || !a.written && !a.wanted() && a.shared == 0)
}

// Claim changes the claim of a frontend on its address.
func (s *Addresses) Claim(addr netip.Addr, before, now Claim) {
	if before == now {
		return
	}
	a := s.at(addr)
	a.count(before, -1)
	a.count(now, 1)
	s.change(addr)
}

// Adopt registers the key of an address that a previous process wrote.
func (s *Addresses) Adopt(addr netip.Addr) {
	s.at(addr).written = true
	s.adopted = true
}

// Disown schedules the removal of adopted keys that no frontend claims. It is called once all frontends are known.
func (s *Addresses) Disown() {
	if !s.adopted {
		return
	}
	s.adopted = false
	for addr := range s.known {
		s.change(addr)
	}
}

// Changed returns the addresses whose keys must be inserted and deleted, and resets the set of changes.
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

// Written records that the map has the key of an address.
func (s *Addresses) Written(addr netip.Addr) { s.at(addr).written = true }

// Has reports whether the map has the key of an address.
func (s *Addresses) Has(addr netip.Addr) bool {
	a := s.known[addr]
	return a != nil && a.written
}

// Removed records that the map no longer has the key of an address.
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
