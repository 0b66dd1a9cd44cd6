// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package podrange keeps the node's pod ranges: which there are at this moment,
// and how one comes and goes while pods run.
//
// The ipcache remembers them. A range is there before anything else of it, and
// until nothing else of it is left, so that a process that was killed, or that
// starts while sluice-ipam is away, finds every range that the node may have.
package podrange

import (
	"net/netip"
	"slices"
	"sync"
)

// NodeAddr is the node's own address in a range, the second of it.
func NodeAddr(p netip.Prefix) netip.Addr { return p.Addr().Next() }

// Set is the ranges of the node. It may be used concurrently; what it returns is
// the caller's.
type Set struct {
	changes bool

	mu   sync.RWMutex
	all  []netip.Prefix // guarded by mu
	open []netip.Prefix // guarded by mu; those of all in which endpoints may be made
	// primary are the ranges whose own addresses are the node's overlay addresses, one
	// of a family; guarded by mu; not all need be among all.
	primary map[bool]netip.Prefix
	// remembered are the families whose primary range an earlier process has left, and
	// the source has not named yet; guarded by mu.
	remembered map[bool]bool
	known      bool // guarded by mu; primary is what the source has
}

// Of returns a set of ranges that are all open and, if no Keeper changes them,
// all that there ever are: then the first of each family is primary.
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

// Changes says whether a range may come.
func (s *Set) Changes() bool { return s.changes }

// All are the ranges that the node is to have rules, routes and an address for.
func (s *Set) All() []netip.Prefix {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.Clone(s.all)
}

// NodeAddrs are the node's own addresses in all ranges.
func (s *Set) NodeAddrs() []netip.Addr {
	var addrs []netip.Addr
	for _, p := range s.All() {
		if a := NodeAddr(p); !slices.Contains(addrs, a) {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// OverlayAddrs are the overlay addresses of the node, at most one of a family, IPv4
// first: its own addresses in the primary ranges. They stay the same while ranges come
// and go beside these. They are not known before the source has said which ranges are
// primary, unless the node has no range at all: until then they are those that Remember
// was told. A family whose primary range the node does not have yet has none.
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

// Remember says which overlay addresses an earlier process used. Their ranges are primary
// until the source has said which are. An address that is not the node's own in one of its
// ranges is left out, and so is all of it where the configuration has the ranges.
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

// setPrimary makes the range of a family primary; false: it is already.
func (s *Set) setPrimary(p netip.Prefix) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	is4 := p.Addr().Is4()
	changes := s.primary[is4] != p
	s.primary[is4] = p
	delete(s.remembered, is4)
	return changes
}

// listed says that the source has named every primary range, so that what was remembered
// ends; false: it had before.
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

// Of is the range that holds an address.
func (s *Set) Of(a netip.Addr) (netip.Prefix, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if i := slices.IndexFunc(s.all, func(p netip.Prefix) bool { return p.Contains(a) }); i >= 0 {
		return s.all[i], true
	}
	return netip.Prefix{}, false
}

// Open says whether an endpoint may be made with an address.
func (s *Set) Open(a netip.Addr) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.ContainsFunc(s.open, func(p netip.Prefix) bool { return p.Contains(a) })
}

// Close ends the making of endpoints in a range.
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
