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

// SyncHostAddrs makes addrs the complete set of the host's own addresses: each leads to HostID and
// has identity host in the ipcache. It writes only differences. Connections with an added or
// removed address are evaluated again. Loopback, multicast and IPv6 link-local addresses are left
// out, because pods cannot reach them.
//
// Errors do not stop the call: pin.ErrExists for an address that an endpoint has, and a
// HostAddrsError if more addresses are given than the maps can hold in addition to the endpoints'
// addresses. Then addresses already stored are kept first, followed by the first of addrs.
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
			errs = append(errs, fmt.Errorf("host address %v: %w, of endpoint ID %d", a, pin.ErrExists, s))
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
	// Without services, the index in sl_own is only used to choose the source address of the host's UDP replies, so
	// no error is reported.
	if len(unplaced) > 0 && eps.services {
		errs = append(errs, fmt.Errorf("pods cannot reach node ports at %d host addresses, for example %v: %w",
			len(unplaced), slices.MinFunc(unplaced, netip.Addr.Compare), errNoPlace))
	}
	return errors.Join(errs...)
}

// removeHostAddr removes the key last: if something fails, the next call, also of a new process,
// finds the address by its key.
func (eps *Maps) removeHostAddr(a netip.Addr) error {
	if err := eps.addresses.RemoveLocal(a); err != nil {
		return fmt.Errorf("ipcache: %w", err)
	}
	m, key := eps.addrMap(a)
	return errors.Join(pin.DeleteKey(m, key), eps.addresses.Bump(a))
}

// HostAddrsError reports that the host has more addresses than fit. It wraps pin.ErrFull.
type HostAddrsError struct {
	// Map is the name of the map of the address family.
	Map string
	// Have is the number of addresses, Limit the number that fits.
	Have, Limit int
}

// Error names the map and the numbers.
func (e *HostAddrsError) Error() string {
	return fmt.Sprintf("map %s: the host has %d addresses, %d fit in addition to %d endpoints; the rest have identity world",
		e.Map, e.Have, e.Limit, MaxEndpoints)
}

// Unwrap returns pin.ErrFull.
func (e *HostAddrsError) Unwrap() error { return pin.ErrFull }

// wantedHostAddrs returns the addresses that pods can reach, as many as fit.
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

// HostAddrs returns the host's own addresses in the maps, sorted.
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
