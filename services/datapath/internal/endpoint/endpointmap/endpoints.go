// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package endpointmap writes and reads the endpoint maps: the array with one entry for each
// endpoint, the keys by which devices and addresses lead to entries, and the epochs of endpoints,
// which make cached verdicts stale. The host is entry 0, and its addresses are stored here, too.
//
// An entry is written before the first key leads to it, and reused only after every key is removed
// and a grace period has passed. In between, changes are single stores of an aligned 64-bit value.
// The caller decides who becomes an endpoint and which tables evaluate it.
package endpointmap

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Maps are the endpoints of the node and the addresses of the host in the eBPF maps. Its methods
// may be called concurrently; changes are serialised.
type Maps struct {
	log       *slog.Logger
	reserved  bool
	services  bool
	addresses *ipcache.Cache

	devices, ip4, ip6 *ebpf.Map
	own               *ebpf.Map // map sl_own
	mem               []byte    // memory of sl_ep
	held              []byte    // memory of sl_held
	refused           []byte    // memory of sl_refused
	counter           []byte    // memory of sl_gen

	gate      pin.Gate
	slots     slotTable
	withdrawn map[nodetable.ID]bool // retired tables, which no endpoint may refer to any more
	renamed   map[ID]uint32         // endpoints that await WaitIdentity, with the epoch of their last change of identity
}

// Options configure Open.
type Options struct {
	// Reserved allows reserved identities for endpoints.
	Reserved bool
	// Services reports that node ports are reached at the host's addresses.
	Services bool
	Log      *slog.Logger
}

// Open returns Maps on the pinned maps. It writes nothing.
func Open(pm *pin.Maps, addresses *ipcache.Cache, o Options) *Maps {
	return &Maps{
		log: o.Log, reserved: o.Reserved, services: o.Services, addresses: addresses,
		devices: pm.Map(bpf.MapsMapSlIf), ip4: pm.Map(bpf.MapsMapSlIp4), ip6: pm.Map(bpf.MapsMapSlIp6),
		own: pm.Map(bpf.MapsMapSlOwn),
		mem: pm.Memory(bpf.MapsMapSlEp), held: pm.Memory(bpf.MapsMapSlHeld), refused: pm.Memory(bpf.MapsMapSlRefused),
		counter: pm.Memory(bpf.MapsMapSlGen),
		gate:    pin.Gate{ValidateOnly: pm.ValidateOnly}, withdrawn: map[nodetable.ID]bool{}, renamed: map[ID]uint32{},
	}
}

// Initialise completes deletions and changes of identity that a killed process left unfinished.
// Call it before anything is published.
func (eps *Maps) Initialise() error {
	if err := eps.initHost(); err != nil {
		return fmt.Errorf("initialise the host's endpoint entry: %w", err)
	}
	if err := eps.dropStrayKeys(); err != nil {
		return fmt.Errorf("complete earlier deletions: %w", err)
	}
	used, err := eps.usedSlots()
	if err != nil {
		return err
	}
	eps.slots = newSlotTable(used)
	if err := eps.settleIdentities(used); err != nil {
		return fmt.Errorf("complete changes of identities: %w", err)
	}
	return nil
}

// Local returns the addresses of all endpoints and of the host, each with its endpoint ID.
func (eps *Maps) Local() (map[netip.Addr]ID, error) {
	if err := eps.gate.RLock(); err != nil {
		return nil, err
	}
	defer eps.gate.RUnlock()
	return eps.addrOwners()
}

// Close makes every later call fail.
func (eps *Maps) Close() { eps.gate.Close() }

// ErrInUse: an endpoint still refers to the table.
var ErrInUse = errors.New("in use")

// Withdraw marks tables as retired, so that no endpoint can refer to them any more. If an endpoint
// still refers to one, it returns ErrInUse and retires none.
func (eps *Maps) Withdraw(ts ...nodetable.ID) error {
	if err := eps.gate.Lock(); err != nil {
		return err
	}
	defer eps.gate.Unlock()
	for s := HostID; s <= MaxEndpoints; s++ {
		p := eps.policyAt(s)
		for _, t := range []nodetable.ID{p.Egress, p.Ingress} {
			if slices.Contains(ts, t) {
				return fmt.Errorf("table %d: %w by endpoint ID %d", t, ErrInUse, s)
			}
		}
	}
	for _, t := range ts {
		eps.withdrawn[t] = true
	}
	return nil
}

// Release allows references to a table again: its ID was reused, or the table was not retired after
// all.
func (eps *Maps) Release(t nodetable.ID) {
	if err := eps.gate.Lock(); err != nil {
		return // closed: no entry changes any more
	}
	defer eps.gate.Unlock()
	delete(eps.withdrawn, t)
}

// Count returns the number of endpoints, without the host.
func (eps *Maps) Count() (int, error) {
	if err := eps.gate.RLock(); err != nil {
		return 0, err
	}
	defer eps.gate.RUnlock()
	used, err := eps.usedSlots()
	return len(used), err
}

// Named returns the tables that endpoints and the host refer to.
func (eps *Maps) Named() map[nodetable.ID]bool {
	named := map[nodetable.ID]bool{}
	for s := HostID; s <= MaxEndpoints; s++ {
		p := eps.policyAt(s)
		named[p.Egress], named[p.Ingress] = true, true
	}
	return named
}
