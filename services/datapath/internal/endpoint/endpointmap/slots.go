// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpointmap

import (
	"context"
	"errors"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// slotTable allocates endpoint IDs. It assigns them in turn, so that a released ID is reused as late as possible.
type slotTable struct {
	state [MaxEndpoints + 1]slotState
	next  ID // where the search begins
	// draining are the IDs that the next grace period will free. IDs of a grace period in progress
	// belong to the caller of Barrier.
	draining []ID
}

type slotState uint8

const (
	slotFree slotState = iota
	slotUsed
	slotDraining // unpublished, but a running program may still use it
)

func newSlotTable(used []ID) slotTable {
	t := slotTable{next: 1}
	t.state[HostID] = slotUsed
	for _, s := range used {
		t.state[s] = slotUsed
	}
	return t
}

// take returns a free ID, or false.
func (t *slotTable) take() (ID, bool) {
	for range len(t.state) {
		s := t.next
		t.next = ID(int(t.next+1) % len(t.state))
		if t.state[s] == slotFree {
			t.state[s] = slotUsed
			return s, true
		}
	}
	return NoID, false
}

// giveBack returns an ID that no key has led to.
func (t *slotTable) giveBack(s ID) { t.state[s] = slotFree }

// retire quarantines an ID until a grace period has passed.
func (t *slotTable) retire(s ID) {
	if t.state[s] == slotUsed {
		t.state[s] = slotDraining
		t.draining = append(t.draining, s)
	}
}

// beginDrain returns the IDs that a grace period starting now will free.
func (t *slotTable) beginDrain() []ID {
	d := t.draining
	t.draining = nil
	return d
}

// endDrain frees the IDs if the grace period passed; otherwise they wait for the next one.
func (t *slotTable) endDrain(slots []ID, passed bool) {
	if !passed {
		t.draining = append(t.draining, slots...)
		return
	}
	for _, s := range slots {
		t.state[s] = slotFree
	}
}

// Barrier waits until every program run that started before the call has ended (8 to 16 ms), then
// frees the IDs that were unpublished before it. Publish calls it when it runs out of IDs.
func (eps *Maps) Barrier(ctx context.Context) error {
	if err := eps.gate.Lock(); err != nil {
		return err
	}
	slots := eps.slots.beginDrain()
	eps.gate.Unlock()

	err := pin.GracePeriod(ctx)

	if lerr := eps.gate.Lock(); lerr != nil {
		return errors.Join(err, lerr)
	}
	defer eps.gate.Unlock()
	eps.slots.endDrain(slots, err == nil)
	return err
}
