// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package podrange manages the node's pod ranges, and adds and removes ranges while pods run.
//
// The ipcache stores the ranges. The ipcache entry of a range is created first and removed last, so that after a kill,
// or a start while sluice-ipam is unavailable, the process finds every range that the node may have.
package podrange

import (
	"net/netip"
	"slices"
	"sync"
)

// NodeAddr returns the node's own address in a range, the second address.
func NodeAddr(p netip.Prefix) netip.Addr { return p.Addr().Next() }

// Set holds the ranges of the node. It is safe for concurrent use, and its methods return copies.
type Set struct {
	changes bool

	mu   sync.RWMutex
	all  []netip.Prefix // guarded by mu
	open []netip.Prefix // guarded by mu; ranges in which endpoints can be created
	// primary are the ranges whose own addresses are the node's overlay addresses, one per family; guarded by mu; may
	// contain ranges that are not in all.
	primary map[bool]netip.Prefix
	// remembered are the families whose primary range comes from a previous process and is not confirmed by the source;
	// guarded by mu.
	remembered map[bool]bool
	known      bool // guarded by mu; primary comes from the source
}

// Of returns a set with all ranges open. If changes is false, no Keeper changes the set, and the first range of each
// family is primary.
func Of(ranges []netip.Prefix, changes bool) *Set {
	s := &Set{
		changes: changes, all: slices.Clone(ranges), open: slices.Clone(ranges),
		primary: map[bool]netip.Prefix{}, remembered: map[bool]bool{},
	}
	for _, p := range ranges {
		if _, ok := s.primary[p.Addr().Is4()]; !ok && !changes {
			s.primary[p.Addr().Is4()] = p
		}
	}
	s.known = !changes
	return s
}

// Changes reports whether the ranges can change.
func (s *Set) Changes() bool { return s.changes }

// All returns the ranges for which the node needs rules, routes and an address.
func (s *Set) All() []netip.Prefix {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.Clone(s.all)
}

// NodeAddrs returns the node's own addresses in all ranges.
func (s *Set) NodeAddrs() []netip.Addr {
	var addrs []netip.Addr
	for _, p := range s.All() {
		if a := NodeAddr(p); !slices.Contains(addrs, a) {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// OverlayAddrs returns the overlay addresses of the node, at most one per family, IPv4 first: its own addresses in the
// primary ranges. They do not change when other ranges are added or removed. A family whose primary range the node does
// not have yet has no overlay address. known is false until the source has announced the primary ranges, unless the
// node has no range; until then, the addresses of Remember are returned.
func (s *Set) OverlayAddrs() (addrs []netip.Addr, known bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, is4 := range []bool{true, false} {
		if p, ok := s.primary[is4]; ok && slices.Contains(s.all, p) {
			addrs = append(addrs, NodeAddr(p))
		}
	}
	return addrs, s.known || len(s.all) == 0
}

// Remember sets the overlay addresses that a previous process used. Their ranges are primary until the source has
// announced the primary ranges. Addresses that are not the node's own in one of its ranges are ignored. With configured
// ranges, all are ignored.
func (s *Set) Remember(overlay []netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known {
		return
	}
	for _, p := range s.all {
		is4 := p.Addr().Is4()
		if _, ok := s.primary[is4]; !ok && slices.Contains(overlay, NodeAddr(p)) {
			s.primary[is4], s.remembered[is4] = p, true
		}
	}
}

// setPrimary makes a range the primary range of its family. It returns false if it already was.
func (s *Set) setPrimary(p netip.Prefix) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	is4 := p.Addr().Is4()
	changes := s.primary[is4] != p
	s.primary[is4] = p
	delete(s.remembered, is4)
	return changes
}

// listed records that the source has announced all primary ranges, and discards remembered ones. It returns false if
// this was already recorded.
func (s *Set) listed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for is4 := range s.remembered {
		delete(s.primary, is4)
	}
	clear(s.remembered)
	first := !s.known
	s.known = true
	return first
}

// Of returns the range that contains an address.
func (s *Set) Of(a netip.Addr) (netip.Prefix, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if i := slices.IndexFunc(s.all, func(p netip.Prefix) bool { return p.Contains(a) }); i >= 0 {
		return s.all[i], true
	}
	return netip.Prefix{}, false
}

// Open reports whether an endpoint can be created with an address.
func (s *Set) Open(a netip.Addr) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.ContainsFunc(s.open, func(p netip.Prefix) bool { return p.Contains(a) })
}

// Close prevents the creation of endpoints in a range.
func (s *Set) Close(p netip.Prefix) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open = without(s.open, p)
}

func (s *Set) isOpen(p netip.Prefix) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.Contains(s.open, p)
}

func (s *Set) add(p netip.Prefix) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(without(s.all, p), p)
}

func (s *Set) opened(p netip.Prefix) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open = append(without(s.open, p), p)
}

func (s *Set) remove(p netip.Prefix) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all, s.open = without(s.all, p), without(s.open, p)
}

func without(ranges []netip.Prefix, p netip.Prefix) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(ranges), func(q netip.Prefix) bool { return q == p })
}
