// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"errors"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap/vip"
)

// close makes the node refuse connections to a new frontend that was refused with err. Without an element in the maps,
// its packets would reach another socket of the node, or leave the node.
//
// If only Services use the address, the key of the address suffices. A NodePort, and a load balancer address whose
// packets from inside bypass the node, get a frontend without backends. External addresses get no element, because
// other machines may have them. Host ports get none, because their endpoint does not start.
//
// These elements use at most half of the reserve for changes of existing frontends. If they do not fit, the returned
// error states that packets pass.
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

// closeAddress claims the address of a frontend that has no element.
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

// reopen drops the claim of closeAddress.
func (s *store) reopen(k frontend.Key) {
	if _, ok := s.closed[k]; ok {
		delete(s.closed, k)
		s.addresses.Claim(k.Addr, vip.Exclusive, vip.Nothing)
	}
}

// dropClosed removes an entry for whose key the kernel lacks memory. Connections to its address are still refused.
func (a *application) dropClosed(e *entry) {
	claim := e.claim
	a.drop(e)
	if claim == vip.Exclusive {
		a.s.closed[e.key] = struct{}{}
		a.s.addresses.Claim(e.key.Addr, vip.Nothing, vip.Exclusive)
	}
}

// ofReserve returns how many keys and fronts of the reserve an entry uses because it was refused. When it is served,
// they must fit outside the reserve.
func (e *entry) ofReserve() (keys, fronts int) {
	if e == nil || !e.refused {
		return 0, 0
	}
	e.each(func(*front) { fronts++ })
	return 1, fronts
}

// standing defines how much of the reserve a frontend may use.
type standing int

const (
	there    standing = iota // all of it
	newcomer                 // none of it
	closing                  // half of it
)

// kept returns how many elements of a map are reserved for other frontends.
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

// keptMembers returns how many elements of sl_member are reserved for other frontends, when a list with a table of the
// given size is added.
func (s *store) keptMembers(st standing, tableBits int, gains bool) int {
	if st == newcomer || gains {
		return s.reservedMembers(tableBits)
	}
	return st.kept(s.nMembers)
}
