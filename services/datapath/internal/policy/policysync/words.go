// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// flushEntries writes the entries of the collected identities.
func (a *Applier) flushEntries(w *work) error {
	if len(w.entries) == 0 {
		return nil
	}
	want := make(map[uint32]nodetable.Identity, len(w.entries))
	for _, id := range w.entries {
		want[id], _ = a.model.entry(id)
	}
	w.entries = w.entries[:0]
	return a.storeEntries(w, want)
}

// storeEntries changes entries of identities. First it adds rows to the tables without an owner that still evaluate
// endpoints, so that they evaluate the identities as before.
func (a *Applier) storeEntries(w *work, want map[uint32]nodetable.Identity) error {
	if err := a.alignFor(w, want); err != nil {
		return err
	}
	used := a.used()
	changes := make(map[uint32]nodetable.Identity, len(want))
	type pair struct{ old, new nodetable.Identity }
	seen := map[pair]nodetable.Identity{}
	for _, id := range slices.Sorted(maps.Keys(want)) {
		p := pair{a.identities.entries[id], want[id]}
		if p.old == p.new || !validIdentity(id) {
			continue
		}
		to, ok := seen[p]
		if !ok {
			var err error
			if to, err = a.cover(used, p.old, p.new); err != nil {
				return err
			}
			seen[p] = to
			a.pendingCapacity = a.pendingCapacity || to != p.new
			for k, slots := range used {
				// an unknown identity matched every deny rule and no allow rule
				if p.old.Known && !k.content.EvaluatesAlike(p.old, to) {
					for _, s := range slots {
						w.bump[s] = struct{}{}
					}
				}
			}
		}
		if to != p.old {
			changes[id] = to
		}
	}
	if len(changes) == 0 {
		return nil
	}
	if err := a.identities.store(changes); err != nil {
		return err
	}
	w.checks = true
	if err := faultEntries.Hit(w.ctx); err != nil {
		return err
	}
	return a.identities.publish(changes)
}

// cover adds rows to tables without an owner, so that they evaluate the new entry as the old one.
// Endpoints of a table without capacity for the row are isolated.
func (a *Applier) cover(used map[*kernelTable][]uint16, old, to nodetable.Identity) (nodetable.Identity, error) {
	if !to.Known {
		return to, nil
	}
	for k := range used {
		if k.owner != nil || k.content.EvaluatesAlike(old, to) {
			continue
		}
		err := nodetable.ErrNoCapacity
		if _, ok := k.content.Peers[to.Class]; !ok {
			err = a.tables.addRow(k, to.Class, k.content.ClassOf(old))
		}
		switch {
		case errors.Is(err, nodetable.ErrNoCapacity):
			if err := a.isolate(k); err != nil {
				return nodetable.Identity{}, err
			}
		case err != nil:
			return nodetable.Identity{}, fmt.Errorf("row of table %d of the kernel: %w", k.id, err)
		}
	}
	return to, nil
}

// left counts the identities that are still unknown.
func (a *Applier) left() {
	a.waiting = 0
	if a.model == nil {
		return
	}
	for id := range a.model.wants {
		if _, known := a.identities.entries[id]; !known && validIdentity(id) {
			a.waiting++
		}
	}
	a.pendingCapacity = a.waiting > 0
}
