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

// ownProbes is SL_OWN_PROBES: the number of consecutive indexes that an address may have in sl_own.
const ownProbes = 8

// errNoPlace: other addresses of the host occupy all indexes that the address could have.
var errNoPlace = fmt.Errorf("%w: other addresses occupy all of its places in map sl_own", pin.ErrFull)

// placeOwn stores an address of the host in sl_own, so that connections can refer to the address that the client used.
// An address keeps its index. An address that want no longer contains is overwritten only when another address needs
// its index.
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
	// in place: no connection refers to this index, because it is free, or its address no longer belongs to the host
	return eps.own.Put(uint32(place), &value)
}

// OwnPlace returns the index of an address of the host in sl_own plus 1, as programs use it; 0 if
// the address is not in the map.
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

// probeOwn visits the indexes that an address of the host may have, with the address stored at
// each, until visit returns true.
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

// OwnAt returns the address at an index that OwnPlace returned, or the zero Addr if the place is empty.
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

// ownAddr decodes an entry; the zero Addr if it is free.
func ownAddr(v *bpf.MapsSlOwn) netip.Addr {
	switch v.Family {
	case 4:
		return netip.AddrFrom4([4]byte(v.Addr[:4]))
	case 6:
		return netip.AddrFrom16(v.Addr)
	}
	return netip.Addr{}
}
