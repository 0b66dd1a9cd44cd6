// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"slices"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// minPodIdentity is the first number that the identity service assigns. The meaning of lower
// numbers never changes.
const minPodIdentity = 256

// decide adopts a complete snapshot, or keeps the tables if the service is behind.
func (a *Applier) decide(w *work, b policytable.Barrier) error {
	why := a.past.Lags(b)
	if why == "" {
		if a.next.held != "" {
			a.log.Warn("adopting policies that were held back",
				"revision", b.PolicyRevision, "enforced", a.past.Revision())
		}
		a.setHeld("")
		a.past.Note(b)
		return a.replace(w, a.next.taken())
	}
	if a.next.held == "" {
		a.log.Error("policies not adopted",
			"revision", b.PolicyRevision, "enforced", a.past.Revision(), "incomplete", b.Incomplete)
	}
	a.next.held = why
	a.setHeld(why)
	select {
	case <-a.synced:
	default:
		close(a.synced) // The service has sent everything and will not send a newer state by itself.
	}
	if slices.Contains(b.Incomplete, "identity") {
		return nil
	}
	// A removed identity number may be reused soon.
	var gone []uint32
	for id := range a.identities.entries {
		if _, ok := a.next.model.wants[id]; !ok && id >= minPodIdentity {
			gone = append(gone, id)
		}
	}
	return a.makeUnknown(w, gone)
}

func (a *Applier) setHeld(why string) {
	a.view.mu.Lock()
	defer a.view.mu.Unlock()
	a.view.held = why
}

// makeUnknown makes identities unknown while the adopted tables stay. In these tables a number has its old meaning,
// although the number may now belong to another label set.
func (a *Applier) makeUnknown(w *work, gone []uint32) error {
	want := make(map[uint32]nodetable.Identity, len(gone))
	for _, id := range gone {
		if _, ok := a.identities.entries[id]; ok && id >= minPodIdentity {
			want[id] = nodetable.Identity{}
		}
	}
	if len(want) == 0 {
		return nil
	}
	if err := a.storeEntries(w, want); err != nil {
		return err
	}
	return a.bumpAffected(w)
}

// holding returns the revision that stays enforced, and why.
func (a *Applier) holding() (revision uint64, why string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.past.Revision(), a.next.held
}
