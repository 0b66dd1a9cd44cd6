// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"errors"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap/vip"
)

// close makes the node refuse connections to a new frontend that was refused for err. Without an
// element in the maps, its packets would reach another socket of the node, or leave the node.
//
// For an address that only Services use, the key of the address is enough. A node port, and the
// address of a load balancer whose packets from inside bypass the node, get a frontend without
// backends. External addresses stay absent, because other machines may have them. The owner of a
// host port does not start without it.
//
// These elements take at most half of the reserve that is kept for frontends that are there. If
// they do not fit, the returned error says that packets pass.
func (a *application) close(f *frontend.Frontend, err error) error {
	if errors.Is(err, frontend.ErrInvalid) {
		return err
	}
	var failed error
	switch {
	case vip.Of(f) == vip.Exclusive:
		failed = a.closeAddress(f)
	case f.Kind == frontend.NodePort, f.Kind == frontend.LoadBalancer:
		failed = a.closeFrontend(f)
	default:
		return err
	}
	var room *frontendtx.NoRoomError
	if failed != nil && errors.As(err, &room) {
		room.Open = true
	}
	return err
}

// closeAddress claims the address of a frontend that has no element itself.
func (a *application) closeAddress(f *frontend.Frontend) error {
	s := a.s
	if _, ok := s.closed[f.Key]; ok {
		return nil
	}
	if s.addresses.NeedsKey(f) {
		fam := familyOf(f.Key.Addr)
		size := int(s.keys[fam].MaxEntries())
		if free := s.keyRoom(fam) - reserve(size)/2; free < 1 {
			return &frontendtx.NoRoomError{Map: keyMap[fam], Need: 1, Free: max(free, 0), Limit: quarter(size)}
		}
		s.pending[fam]++
	}
	s.closed[f.Key] = struct{}{}
	s.addresses.Claim(f.Key.Addr, vip.Nothing, vip.Exclusive)
	return nil
}

// closeFrontend inserts a frontend without backends.
func (a *application) closeFrontend(f *frontend.Frontend) error {
	shut := &frontend.Frontend{Key: f.Key, Kind: f.Kind, Service: f.Service, Tenant: f.Tenant}
	if f.Inside != nil {
		shut.Inside = &frontend.List{}
	}
	if f.Outside != nil {
		shut.Outside = &frontend.List{}
	}
	return a.setWith(shut, closing)
}

// reopen forgets that the address of a frontend was claimed for it alone.
func (s *store) reopen(k frontend.Key) {
	if _, ok := s.closed[k]; ok {
		delete(s.closed, k)
		s.addresses.Claim(k.Addr, vip.Exclusive, vip.Nothing)
	}
}

// dropClosed takes an entry, whose key the kernel has no memory for, out of the maps. Connections
// to its address are refused as before.
func (a *application) dropClosed(e *entry) {
	claim := e.claim
	a.drop(e)
	if claim == vip.Exclusive {
		a.s.closed[e.key] = struct{}{}
		a.s.addresses.Claim(e.key.Addr, vip.Nothing, vip.Exclusive)
	}
}

// ofReserve counts the keys and the fronts that an entry has of the reserve, because it was
// refused. It needs them outside of the reserve when it is served.
func (e *entry) ofReserve() (keys, fronts int) {
	if e == nil || !e.refused {
		return 0, 0
	}
	e.each(func(*front) { fronts++ })
	return 1, fronts
}

// standing is what a frontend may use of the reserve.
type standing int

const (
	there    standing = iota // all of it
	newcomer                 // nothing
	closing                  // half of it
)

// kept is how many elements of a map are kept for other frontends.
func (st standing) kept(size int) int {
	switch st {
	case newcomer:
		return reserve(size)
	case closing:
		return reserve(size) / 2
	case there:
	}
	return 0
}

// keptMembers is how many elements of the map of members are kept for other frontends, beside a
// list with a table of so many bits.
func (s *store) keptMembers(st standing, tableBits int, gains bool) int {
	if st == newcomer || gains {
		return s.reservedMembers(tableBits)
	}
	return st.kept(s.nMembers)
}
