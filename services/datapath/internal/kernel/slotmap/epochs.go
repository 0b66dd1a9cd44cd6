// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package slotmap

import (
	"sync/atomic"
	"unsafe"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// BumpEpochs gives endpoints a new epoch and leaves their tables, by one store
// each, so that their connections are evaluated again; without slots, every
// endpoint and the host.
func (eps *Maps) BumpEpochs(slots ...Slot) error {
	if err := eps.gate.Lock(); err != nil {
		return err
	}
	defer eps.gate.Unlock()
	if len(slots) == 0 {
		used, err := eps.usedSlots()
		if err != nil {
			return err
		}
		slots = append(used, HostSlot)
	}
	for _, s := range slots {
		if s != HostSlot {
			if err := eps.mustLead(s); err != nil {
				return err
			}
		}
		eps.bumpEpoch(s)
	}
	return nil
}

func (eps *Maps) bumpEpoch(s Slot) {
	p := eps.policyAt(s)
	p.Epoch = eps.nextEpoch()
	eps.setPolicy(s, p)
}

// policyAt reads a slot's word.
func (eps *Maps) policyAt(s Slot) Policy { return policyOf(atomic.LoadUint64(eps.word(s))) }

// AuditBit is SL_EP_AUDIT, in the byte behind mtu and deliver; a test compares it
// with the header.
const AuditBit = 1

// flagsWord is the 32-bit word whose last byte the flags are.
func (eps *Maps) flagsWord(s Slot) *uint32 {
	return pin.Word32(eps.mem, int(s)*slotSize+int(unsafe.Offsetof(bpf.MapsSlEndpoint{}.Mtu)))
}

// SetAudit switches audit mode for an endpoint: what its policy denies passes
// and is reported. What has begun meanwhile is evaluated again.
func (eps *Maps) SetAudit(s Slot, on bool) error {
	if err := eps.gate.Lock(); err != nil {
		return err
	}
	defer eps.gate.Unlock()
	if err := eps.mustLead(s); err != nil {
		return err
	}
	w := eps.flagsWord(s)
	was := atomic.LoadUint32(w)
	now := was &^ (AuditBit << 24)
	if on {
		now |= AuditBit << 24
	}
	if now == was {
		return nil
	}
	atomic.StoreUint32(w, now)
	eps.bumpEpoch(s)
	return nil
}

// firstMarker is where the numbers begin that stand in a connection for an epoch
// that it does not have: SL_EPOCHS_BUSY less the number of a CPU. The counter
// does not get there: it would take a century of a thousand changes a minute.
const firstMarker = 0xffff0000

// ContinueEpochs continues the counter of epochs behind those of all slots, and
// those that others visits. It is needed if sl_gen is new and other maps are
// not: epochs that were used twice would vouch for verdicts of another policy.
func (eps *Maps) ContinueEpochs(others func(visit func(uint32)) error) error {
	most := uint32(0)
	raise := func(epoch uint32) {
		if epoch < firstMarker {
			most = max(most, epoch)
		}
	}
	for s := range MaxEndpoints + 1 {
		raise(eps.policyAt(Slot(s)).Epoch)
	}
	if err := others(raise); err != nil {
		return err
	}
	atomic.StoreUint64(pin.Word(eps.counter, 0), uint64(most))
	eps.log.Warn("counter of epochs was lost and continues behind those in use", "epoch", most)
	return nil
}
