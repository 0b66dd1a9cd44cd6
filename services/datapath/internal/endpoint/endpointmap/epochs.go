// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpointmap

import (
	"context"
	"errors"
	"sync/atomic"
	"unsafe"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// BumpEpochs sets a new epoch for endpoints with one atomic write each and keeps their tables, so that their
// connections are evaluated again. Without arguments it does so for every endpoint and the host.
func (eps *Maps) BumpEpochs(slots ...ID) error {
	if err := eps.gate.Lock(); err != nil {
		return err
	}
	defer eps.gate.Unlock()
	if len(slots) == 0 {
		used, err := eps.usedSlots()
		if err != nil {
			return err
		}
		slots = append(used, HostID)
	}
	for _, s := range slots {
		if s != HostID {
			if err := eps.mustLead(s); err != nil {
				return err
			}
		}
		eps.bumpEpoch(s)
	}
	return nil
}

func (eps *Maps) bumpEpoch(s ID) {
	p := eps.policyAt(s)
	p.Epoch = eps.nextEpoch()
	eps.setPolicy(s, p)
}

func (eps *Maps) policyAt(s ID) Policy { return policyOf(atomic.LoadUint64(eps.packedPolicy(s))) }

// AuditBit is SL_EP_AUDIT, in the byte after mtu and deliver; a test compares it with the header.
// endingBit marks an endpoint whose audit mode was switched off while connections may still have a
// verdict from it; no program reads this bit.
const (
	AuditBit  = 1
	endingBit = 0x80
)

// flagsWord points to the 32-bit value whose last byte holds the flags.
func (eps *Maps) flagsWord(s ID) *uint32 {
	return pin.Word32(eps.mem, int(s)*slotSize+int(unsafe.Offsetof(bpf.MapsSlEndpoint{}.Mtu)))
}

// SetAudit switches audit mode of endpoints on or off: in audit mode, packets that the policy
// denies pass and are reported. It ignores IDs without an endpoint.
//
// When it is switched off, connections that began in audit mode are evaluated again: SetAudit waits
// until no program can still see the old flag, then bumps the epochs. A mark in the flags survives
// if the process is killed in between, and the next call for the endpoint completes the change.
func (eps *Maps) SetAudit(ctx context.Context, on bool, slots ...ID) error {
	if len(slots) == 0 {
		return nil
	}
	var changed []ID
	if err := eps.change(slots, func(s ID) {
		w := eps.flagsWord(s)
		was := atomic.LoadUint32(w)
		const audit, ending = AuditBit << 24, endingBit << 24
		now := was | audit
		if !on {
			now = was &^ audit
			if was&audit != 0 {
				now |= ending
			}
		}
		atomic.StoreUint32(w, now)
		if now != was || !on && now&ending != 0 {
			changed = append(changed, s)
		}
	}); err != nil || len(changed) == 0 {
		return err
	}
	if err := faultAuditFlag.Hit(ctx); err != nil {
		return err
	}
	if !on {
		if err := pin.GracePeriod(ctx); err != nil {
			return err
		}
	}
	return eps.change(changed, func(s ID) {
		eps.bumpEpoch(s)
		if !on {
			atomic.AndUint32(eps.flagsWord(s), ^uint32(endingBit<<24))
		}
	})
}

// faultAuditFlag lies between the change of the flags and the change of the epochs.
var faultAuditFlag = fault.Register("datapath/audit-mode/flag")

// change runs f for the IDs that endpoints have.
func (eps *Maps) change(slots []ID, f func(ID)) error {
	if err := eps.gate.Lock(); err != nil {
		return err
	}
	defer eps.gate.Unlock()
	for _, s := range slots {
		switch err := eps.mustLead(s); {
		case errors.Is(err, ErrNotFound):
		case err != nil:
			return err
		default:
			f(s)
		}
	}
	return nil
}

// firstMarker is the smallest value that a connection stores as a marker instead of an epoch:
// SL_EPOCHS_BUSY minus the number of a CPU. The counter would take a century at a thousand changes
// a minute to reach it.
const firstMarker = 0xffff0000

// ContinueEpochs sets the counter to the highest epoch in use: of all endpoints, and of the entries whose epochs the
// function others passes to visit. It is needed if sl_gen was created anew but other maps were adopted: a reused epoch
// would make cached verdicts of another policy valid.
func (eps *Maps) ContinueEpochs(others func(visit func(uint32)) error) error {
	most := uint32(0)
	raise := func(epoch uint32) {
		if epoch < firstMarker {
			most = max(most, epoch)
		}
	}
	for s := range MaxEndpoints + 1 {
		raise(eps.policyAt(ID(s)).Epoch)
	}
	if err := others(raise); err != nil {
		return err
	}
	atomic.StoreUint64(pin.Word(eps.counter, 0), uint64(most))
	eps.log.Warn("counter of epochs was lost; it continues after the highest epoch in use", "epoch", most)
	return nil
}
