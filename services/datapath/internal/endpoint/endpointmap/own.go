// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpointmap

import (
	"fmt"
	"net/netip"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// ownProbes is SL_OWN_PROBES: how far behind its place an address may stand.
const ownProbes = 8

// errNoPlace says that other addresses of the host have all places that one could have.
var errNoPlace = fmt.Errorf("%w: others have their places in map sl_own", pin.ErrFull)

// placeOwn gives an address of the host its place in sl_own, by which connections name the
// address that was asked. It keeps the place that it has. An address that
// is not in want any more gives up its place to another one only.
func (eps *Maps) placeOwn(a netip.Addr, want map[netip.Addr]bool) error {
	place, has := -1, false
	err := eps.probeOwn(a, func(at int, holder netip.Addr) bool {
		if has = holder == a; !has && place < 0 && !want[holder] {
			place = at
		}
		return has
	})
	if has || err != nil {
		return err
	}
	if place < 0 {
		return errNoPlace
	}
	value := bpf.MapsSlOwn{Family: 4}
	if a.Is6() {
		value.Family = 6
	}
	copy(value.Addr[:], a.AsSlice())
	// in place: nothing names it, because its address is not the host's, or there is none
	return eps.own.Put(uint32(place), &value)
}

// OwnPlace is the place of an address of the host in sl_own, plus 1, by which programs
// name it; 0: it has none.
func (eps *Maps) OwnPlace(a netip.Addr) (uint16, error) {
	if err := eps.gate.RLock(); err != nil {
		return 0, err
	}
	defer eps.gate.RUnlock()
	place := uint16(0)
	err := eps.probeOwn(a, func(at int, holder netip.Addr) bool {
		if holder == a {
			place = uint16(at + 1)
		}
		return holder == a
	})
	return place, err
}

// probeOwn visits the places that an address of the host may have, with who has each,
// until it is enough.
func (eps *Maps) probeOwn(a netip.Addr, visit func(at int, holder netip.Addr) (enough bool)) error {
	size := int(eps.own.MaxEntries())
	for i := range ownProbes {
		at := (ipmap.Bucket(a) + i) % size
		var have bpf.MapsSlOwn
		if err := eps.own.Lookup(uint32(at), &have); err != nil {
			return fmt.Errorf("read place %d: %w", at, err)
		}
		if visit(at, ownAddr(&have)) {
			return nil
		}
	}
	return nil
}

// OwnAt is the address at a place that OwnPlace has told, plus 1; not valid: there is none.
func (eps *Maps) OwnAt(place uint16) (netip.Addr, error) {
	if err := eps.gate.RLock(); err != nil {
		return netip.Addr{}, err
	}
	defer eps.gate.RUnlock()
	if place == 0 || uint32(place) > eps.own.MaxEntries() {
		return netip.Addr{}, nil
	}
	var have bpf.MapsSlOwn
	if err := eps.own.Lookup(uint32(place-1), &have); err != nil {
		return netip.Addr{}, fmt.Errorf("read place %d: %w", place-1, err)
	}
	return ownAddr(&have), nil
}

// ownAddr is the address at a place; the zero one: it is free.
func ownAddr(v *bpf.MapsSlOwn) netip.Addr {
	switch v.Family {
	case 4:
		return netip.AddrFrom4([4]byte(v.Addr[:4]))
	case 6:
		return netip.AddrFrom16(v.Addr)
	}
	return netip.Addr{}
}
