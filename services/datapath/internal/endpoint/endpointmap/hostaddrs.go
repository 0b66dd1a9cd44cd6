// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpointmap

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// SyncHostAddrs makes addrs the complete set of the host's own addresses: each
// leads to slot 0 and has identity host in the ipcache. Only differences are
// written; connections with an address that came or went are evaluated again. Loopback, multicast and IPv6 link-local addresses are left out: no
// pod reaches them. An address that an endpoint holds is pin.ErrExists, and the
// rest is still applied. So it is if there are more addresses than fit beside
// those of all endpoints: a HostAddrsError. Those that are known already and
// the first of addrs are kept.
func (eps *Maps) SyncHostAddrs(addrs []netip.Addr) error {
	if err := eps.gate.Lock(); err != nil {
		return err
	}
	defer eps.gate.Unlock()
	owners, err := eps.addrOwners()
	if err != nil {
		return err
	}
	want, errs := eps.wantedHostAddrs(addrs, owners)
	for a, s := range owners {
		if s != HostID || want[a] {
			continue
		}
		if err := eps.removeHostAddr(a); err != nil {
			errs = append(errs, fmt.Errorf("host address %v: %w", a, err))
		}
	}
	var unplaced []netip.Addr
	for a := range want {
		s, known := owners[a]
		if known && s != HostID {
			errs = append(errs, fmt.Errorf("host address %v: %w by slot %d", a, pin.ErrExists, s))
			continue
		}
		if err := eps.addresses.SetLocal(a, identity.Host); err != nil {
			errs = append(errs, fmt.Errorf("host address %v: ipcache: %w", a, err))
			continue
		}
		switch err := eps.placeOwn(a, want); {
		case errors.Is(err, pin.ErrFull):
			unplaced = append(unplaced, a)
		case err != nil:
			errs = append(errs, fmt.Errorf("host address %v: %w", a, err))
		}
		if known {
			continue
		}
		m, key := eps.addrMap(a)
		if err := errors.Join(pin.InsertOnce(m, key, uint32(HostID)), eps.addresses.Bump(a)); err != nil {
			errs = append(errs, fmt.Errorf("host address %v: %w", a, err))
		}
	}
	// Without services a place only has the host answer UDP from the address that was asked.
	if len(unplaced) > 0 && eps.services {
		errs = append(errs, fmt.Errorf("%d host addresses, %v one of them, at which node ports do not answer pods: %w",
			len(unplaced), slices.MinFunc(unplaced, netip.Addr.Compare), errNoPlace))
	}
	return errors.Join(errs...)
}

// removeHostAddr removes the key last: it is by the key that the next call, or
// the next process, finds the address if something fails.
func (eps *Maps) removeHostAddr(a netip.Addr) error {
	if err := eps.addresses.RemoveLocal(a); err != nil {
		return fmt.Errorf("ipcache: %w", err)
	}
	m, key := eps.addrMap(a)
	return errors.Join(pin.DeleteKey(m, key), eps.addresses.Bump(a))
}

// HostAddrsError says that the host has more addresses than fit. It wraps
// pin.ErrFull.
type HostAddrsError struct {
	// Map is the name of the map of the family.
	Map string
	// Have is how many addresses there are, Limit how many fit.
	Have, Limit int
}

// Error names the map and the figures.
func (e *HostAddrsError) Error() string {
	return fmt.Sprintf("map %s: the host has %d addresses, %d fit beside those of %d endpoints; the rest count as the world's",
		e.Map, e.Have, e.Limit, MaxEndpoints)
}

// Unwrap makes the error an pin.ErrFull.
func (e *HostAddrsError) Unwrap() error { return pin.ErrFull }

// wantedHostAddrs is the set that SyncHostAddrs makes: what a pod can reach, as
// far as it fits.
func (eps *Maps) wantedHostAddrs(addrs []netip.Addr, owners map[netip.Addr]ID) (want map[netip.Addr]bool, errs []error) {
	want = map[netip.Addr]bool{}
	var known, fresh []netip.Addr
	for _, a := range addrs {
		a = a.Unmap().WithZone("")
		if !a.IsValid() || !unicast(a) || a.Is6() && a.IsLinkLocalUnicast() || want[a] {
			continue
		}
		want[a] = true
		if s, ok := owners[a]; ok && s == HostID {
			known = append(known, a)
		} else {
			fresh = append(fresh, a)
		}
	}
	count := map[*ebpf.Map]int{}
	for _, a := range slices.Concat(known, fresh) {
		m, _ := eps.addrMap(a)
		if count[m]++; count[m] > int(m.MaxEntries())-MaxEndpoints {
			delete(want, a)
		}
	}
	for name, m := range map[string]*ebpf.Map{bpf.MapsMapSlIp4: eps.ip4, bpf.MapsMapSlIp6: eps.ip6} {
		if limit := int(m.MaxEntries()) - MaxEndpoints; count[m] > limit {
			errs = append(errs, &HostAddrsError{Map: name, Have: count[m], Limit: limit})
		}
	}
	return want, errs
}

// HostAddrs lists the host's own addresses as the maps hold them, sorted.
func (eps *Maps) HostAddrs() ([]netip.Addr, error) {
	if err := eps.gate.RLock(); err != nil {
		return nil, err
	}
	defer eps.gate.RUnlock()
	owners, err := eps.addrOwners()
	if err != nil {
		return nil, err
	}
	var as []netip.Addr
	for a, s := range owners {
		if s == HostID {
			as = append(as, a)
		}
	}
	slices.SortFunc(as, netip.Addr.Compare)
	return as, nil
}
