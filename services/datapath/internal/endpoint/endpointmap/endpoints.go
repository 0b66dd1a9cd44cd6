// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package endpointmap writes and reads the maps of endpoints: the array with a
// slot for each, the keys by which devices and addresses lead there, and the
// epochs of slots, which make verdicts stale. The host is slot 0, and its
// addresses are here too.
//
// A slot is written before the first key leads to it, and not again before every
// key is gone and a grace period has passed. What changes meanwhile is one
// aligned word. Who may be an endpoint and which tables evaluate it is the
// caller's business.
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

// Maps are the endpoints of the node, and the addresses of the host, as
// the programs see them. Its methods may be called concurrently; changes are
// applied one after the other.
type Maps struct {
	log       *slog.Logger
	reserved  bool
	services  bool
	addresses *ipcache.Cache

	devices, ip4, ip6 *ebpf.Map
	own               *ebpf.Map // sl_own
	mem               []byte    // of sl_ep
	held              []byte    // of sl_held
	refused           []byte    // of sl_refused
	counter           []byte    // of sl_gen

	gate      pin.Gate
	slots     slotTable
	withdrawn map[nodetable.ID]bool // tables that no word may name any more
	renamed   map[ID]uint32         // slots that await Settled, with the epoch of their last change of identity
}

// Options say what an endpoint may be.
type Options struct {
	// Reserved lets endpoints have reserved identities.
	Reserved bool
	// Services has node ports answer at the host's addresses.
	Services bool
	Log      *slog.Logger
}

// Open finds the maps of endpoints among all. It writes nothing.
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

// Initialise completes what a killed process left half-deleted. Nothing is
// published before.
func (eps *Maps) Initialise() error {
	if err := eps.initHost(); err != nil {
		return fmt.Errorf("initialise the host's slot: %w", err)
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

// Local are the addresses of endpoints and of the host, each with its slot.
func (eps *Maps) Local() (map[netip.Addr]ID, error) {
	if err := eps.gate.RLock(); err != nil {
		return nil, err
	}
	defer eps.gate.RUnlock()
	return eps.addrOwners()
}

// Close refuses every later call.
func (eps *Maps) Close() { eps.gate.Close() }

// ErrInUse says that an endpoint's word names the table.
var ErrInUse = errors.New("in use")

// Withdraw has no word name the tables any more. If one does, it is
// ErrInUse, and none is withdrawn.
func (eps *Maps) Withdraw(ts ...nodetable.ID) error {
	if err := eps.gate.Lock(); err != nil {
		return err
	}
	defer eps.gate.Unlock()
	for s := HostID; s <= MaxEndpoints; s++ {
		p := eps.policyAt(s)
		for _, t := range []nodetable.ID{p.Egress, p.Ingress} {
			if slices.Contains(ts, t) {
				return fmt.Errorf("table %d: %w by slot %d", t, ErrInUse, s)
			}
		}
	}
	for _, t := range ts {
		eps.withdrawn[t] = true
	}
	return nil
}

// Release lets words name a table again: its number has another meaning, or it
// was not retired after all.
func (eps *Maps) Release(t nodetable.ID) {
	if err := eps.gate.Lock(); err != nil {
		return // no word changes any more
	}
	defer eps.gate.Unlock()
	delete(eps.withdrawn, t)
}

// Count is how many endpoints there are, without the host.
func (eps *Maps) Count() (int, error) {
	if err := eps.gate.RLock(); err != nil {
		return 0, err
	}
	defer eps.gate.RUnlock()
	used, err := eps.usedSlots()
	return len(used), err
}

// Named are the tables that a word names.
func (eps *Maps) Named() map[nodetable.ID]bool {
	named := map[nodetable.ID]bool{}
	for s := HostID; s <= MaxEndpoints; s++ {
		p := eps.policyAt(s)
		named[p.Egress], named[p.Ingress] = true, true
	}
	return named
}
