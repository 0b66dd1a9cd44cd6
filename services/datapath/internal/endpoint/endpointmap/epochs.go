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

// BumpEpochs gives endpoints a new epoch and leaves their tables, by one store
// each, so that their connections are evaluated again; without slots, every
// endpoint and the host.
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

// policyAt reads a slot's word.
func (eps *Maps) policyAt(s ID) Policy { return policyOf(atomic.LoadUint64(eps.packedPolicy(s))) }

// AuditBit is SL_EP_AUDIT, in the byte behind mtu and deliver; a test compares it
// with the header. endingBit says that audit mode was switched off, and that what it has
// let pass may still have a verdict; no program reads it.
const (
	AuditBit  = 1
	endingBit = 0x80
)

// flagsWord is the 32-bit word whose last byte the flags are.
func (eps *Maps) flagsWord(s ID) *uint32 {
	return pin.Word32(eps.mem, int(s)*slotSize+int(unsafe.Offsetof(bpf.MapsSlEndpoint{}.Mtu)))
}

// SetAudit switches audit mode for endpoints: what their policies deny passes and is
// reported. Slots that nobody has are left alone.
//
// What began while it was on is evaluated again when it is off: the epochs are bumped
// when no program runs that may still think that it is on. A process that is killed in
// between leaves a mark, by which the next call for the endpoint does the same.
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

// faultAuditFlag is between the flags and the epochs of a change of audit mode.
var faultAuditFlag = fault.Register("datapath/audit-mode/flag")

// change runs f for the slots that endpoints have.
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
		raise(eps.policyAt(ID(s)).Epoch)
	}
	if err := others(raise); err != nil {
		return err
	}
	atomic.StoreUint64(pin.Word(eps.counter, 0), uint64(most))
	eps.log.Warn("counter of epochs was lost and continues behind those in use", "epoch", most)
	return nil
}
