// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpointmap

import (
	"sync/atomic"
	"unsafe"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// noPickUp is SL_EP_NO_PICK_UP: a bit of an endpoint's state that the programs set and the
// collector clears.
const noPickUp = 0x1

func (eps *Maps) state(s ID) *uint64 {
	return pin.Word(eps.mem, int(s)*slotSize+int(unsafe.Offsetof(bpf.MapsSlEndpoint{}.State)))
}

// StopPickUp stops all endpoints from picking up connections, because the programs no longer know
// which connections a policy has terminated. Endpoints published later are not affected: they have
// no such connections.
func (eps *Maps) StopPickUp() {
	for s := ID(1); s <= MaxEndpoints; s++ {
		atomic.OrUint64(eps.state(s), noPickUp)
	}
}

// PickUpStopped returns the number of endpoints that do not pick up connections.
func (eps *Maps) PickUpStopped() (n int, err error) {
	if err := eps.gate.RLock(); err != nil {
		return 0, err
	}
	defer eps.gate.RUnlock()
	for s := ID(1); s <= MaxEndpoints; s++ {
		if atomic.LoadUint64(eps.state(s))&noPickUp != 0 && eps.slotRecord(s).Ifindex != 0 {
			n++
		}
	}
	return n, nil
}

// AllowPickUp clears the bit that StopPickUp and the programs set.
func (eps *Maps) AllowPickUp() {
	for s := ID(1); s <= MaxEndpoints; s++ {
		atomic.AndUint64(eps.state(s), ^uint64(noPickUp))
	}
}
