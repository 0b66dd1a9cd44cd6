// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// adopt makes a kernel table the table of the service: it adds the classes, rows and prefixes that the kernel table
// lacks. Surplus rows and prefixes stay until tidy.
func (pl *placer) adopt(w *work, t *serviceTable, k *kernelTable, m *nodetable.Match) error {
	k.owner, t.kernel = t, k
	pl.rooms.take(t, pl.kernel.TableSize(k.id))
	t.classes, t.same, t.err = m.Classes, m.Same, nil
	if err := pl.grow(w, t); err != nil {
		return err
	}
	for _, nc := range slices.Sorted(maps.Keys(t.content.Peers)) {
		if _, ok := k.content.Peers[nc]; ok {
			continue
		}
		if err := pl.peer(w, t, nc, false); err != nil {
			return err
		}
	}
	for p, want := range t.content.Prefixes {
		have, ok := k.content.Prefixes[p]
		same := ok
		for i := range want {
			at := t.classes[want[i]]
			same = same && at != nodetable.Absent && k.content.Alike(have[i], at)
		}
		if same {
			continue
		}
		if err := pl.prefix(w, t, p, false); err != nil {
			return err
		}
	}
	return pl.alignDefaults(w, t)
}

// tidy removes surplus rows and prefixes from an adopted table.
func (pl *placer) tidy(w *work, t *serviceTable) error {
	k := t.kernel
	if k == nil {
		return nil
	}
	for _, nc := range slices.Sorted(maps.Keys(k.content.Peers)) {
		if _, ok := t.content.Peers[nc]; ok {
			continue
		}
		if err := pl.dropRow(w, k, nc); err != nil {
			return err
		}
	}
	for p := range maps.Clone(k.content.Prefixes) {
		if _, ok := t.content.Prefixes[p]; ok {
			continue
		}
		if err := pl.prefix(w, t, p, false); err != nil {
			return err
		}
	}
	return pl.alignDefaults(w, t)
}

// replace adopts a complete snapshot. It keeps tables that the kernel already has, and writes
// nothing if nothing changed.
//
// If the service restarted with other policies, both tables and identities change, and the service cannot know a safe
// order. So if the leaving tables would evaluate an identity differently after its change, the identity first gets an
// intermediate class: the leaving tables evaluate this class as the old entry, the new tables as the new one.
func (a *Applier) replace(w *work, next *model) error {
	for _, k := range a.tables.byID {
		k.owner = nil
	}
	a.model = next
	a.rooms.reset(a.cfg.Kernel.MapSizes())
	w.keepClosed, w.leveled = true, true
	for _, t := range next.sortedTables() {
		if t.forgotten {
			continue
		}
		if k, m := a.tables.candidate(t, a.used()); k != nil {
			if err := a.adopt(w, t, k, m); err != nil {
				return err
			}
		}
	}
	for _, t := range next.sortedTables() {
		if t.kernel == nil && !t.forgotten {
			a.rooms.ledger.Restore(ask{table: t}, t.charge.object(t.charge.payers()[0], t.estimate(), false), false)
		}
	}
	short, _ := a.divide()
	for _, t := range short {
		if err := a.shrink(w, t); err != nil {
			return err
		}
	}
	for _, t := range next.sortedTables() {
		if t.kernel != nil || t.err != nil {
			continue
		}
		rows, ok := a.admit(t)
		if !ok {
			if err := a.placePart(w, t, a.rooms.exceeds(t, false), unbounded); err != nil {
				return err
			}
			continue
		}
		if err := a.define(w, t, rows); err != nil {
			return err
		}
	}

	final := map[uint32]nodetable.Identity{}
	for id := range a.identities.entries {
		final[id] = nodetable.Identity{}
	}
	for id := range next.wants {
		final[id], _ = next.entry(id)
	}
	between, err := a.between(final)
	if err != nil {
		return err
	}
	if err := a.storeEntries(w, between); err != nil {
		return err
	}
	for id, s := range a.endpoints.subjects {
		if next.binds[id] == nil {
			a.endpoints.gone(id)
			continue
		}
		s.dirty = true
	}
	if err := a.flip(w); err != nil {
		return err
	}
	if err := a.storeEntries(w, final); err != nil {
		return err
	}
	w.keepClosed = false
	for _, t := range next.sortedTables() {
		if err := a.tidy(w, t); err != nil {
			return err
		}
	}
	w.checks = true
	select {
	case <-a.synced:
	default:
		close(a.synced)
	}
	return nil
}

// between returns the entries of identities for the time while endpoints change from leaving tables to new ones. It is
// the final entry, if the leaving tables evaluate that like the old entry; otherwise an intermediate one.
func (a *Applier) between(final map[uint32]nodetable.Identity) (map[uint32]nodetable.Identity, error) {
	var leaving, staying []*kernelTable
	used := a.used()
	for k := range a.tables.sorted() {
		if k.owner != nil {
			staying = append(staying, k)
		} else if _, ok := used[k]; ok {
			leaving = append(leaving, k)
		}
	}
	if len(leaving) == 0 {
		return final, nil
	}
	type pair struct{ old, new nodetable.Identity }
	seen := map[pair]nodetable.Identity{}
	out := make(map[uint32]nodetable.Identity, len(final))
	for _, id := range slices.Sorted(maps.Keys(final)) {
		p := pair{a.identities.entries[id], final[id]}
		to, ok := seen[p]
		if !ok {
			to = p.new
			alike := func(k *kernelTable) bool { return k.content.EvaluatesAlike(p.old, p.new) }
			if p.old != p.new && !all(leaving, alike) {
				var err error
				if to, err = a.classBetween(p.old, p.new, leaving, staying); err != nil {
					return nil, err
				}
			}
			seen[p] = to
		}
		out[id] = to
	}
	return out, nil
}

func all(list []*kernelTable, f func(*kernelTable) bool) bool {
	return !slices.ContainsFunc(list, func(k *kernelTable) bool { return !f(k) })
}

// classBetween defines an identity class that the leaving tables evaluate as the old entry and the
// other tables as the new one. Without capacity the identity is unknown for a moment.
func (a *Applier) classBetween(old, to nodetable.Identity, leaving, staying []*kernelTable) (nodetable.Identity, error) {
	nc, err := a.identities.number(nodetable.KeyBetween(old, to))
	if err != nil || nc == 0 {
		return nodetable.Identity{}, err
	}
	entry := nodetable.Identity{Class: nc, Kind: to.Kind, Scope: to.Scope, Known: true}
	if !to.Known {
		entry.Kind, entry.Scope = old.Kind, old.Scope
	}
	for i, list := range [][]*kernelTable{leaving, staying} {
		as := [2]nodetable.Identity{old, to}[i]
		for _, k := range list {
			if k.content.EvaluatesAlike(entry, as) {
				continue
			}
			switch err := a.tables.addRow(k, nc, k.content.ClassOf(as)); {
			case errors.Is(err, nodetable.ErrNoCapacity):
				return nodetable.Identity{}, nil
			case err != nil:
				return nodetable.Identity{}, fmt.Errorf("add the interim row of a changed identity: %w", err)
			}
		}
	}
	return entry, nil
}

// retry retries everything that exceeded the capacity. recovered reports that a subject got tables
// that had been refused.
func (a *Applier) retry(w *work) (recovered bool, err error) {
	if a.model == nil || a.next.collecting() {
		return false, nil
	}
	refused, lacked := map[uint32]bool{}, map[uint32]bool{}
	for id, s := range a.endpoints.subjects {
		refused[id], lacked[id] = s.refusal != "", s.lacks
	}
	w.leveled = true
	if err := a.level(w); err != nil {
		return false, err
	}
	a.unsaid = append(a.unsaid, w.nacks...)
	for _, t := range a.model.sortedTables() {
		if err := a.retryTable(w, t); err != nil {
			return false, err
		}
	}
	for id, s := range a.endpoints.subjects {
		s.dirty = s.dirty || refused[id]
	}
	if err := a.flip(w); err != nil {
		return false, err
	}
	w.nacks = nil // they were sent before
	// After the endpoints were switched, so that leaving tables no longer prevent the change.
	want := map[uint32]nodetable.Identity{}
	for id := range a.model.wants {
		if entry, _ := a.model.entry(id); entry != a.identities.entries[id] {
			want[id] = entry
		}
	}
	if err := a.storeEntries(w, want); err != nil {
		return false, err
	}
	for id, s := range a.endpoints.subjects {
		recovered = recovered || (refused[id] || lacked[id]) && s.refusal == "" && !s.lacks
	}
	numbered, err := a.numberOne()
	if err != nil {
		return false, err
	}
	return recovered || numbered || a.model.remembers(), a.settle(w)
}

// numberOne tries to number an identity class that had no number. The service has to send the rows
// and identities of the class again, because they were left out.
func (a *Applier) numberOne() (bool, error) {
	if a.model.unnumbered == 0 {
		return false, nil
	}
	for _, nc := range a.model.classes {
		if nc.number == 0 {
			number, err := a.identities.number(nc.key)
			return number != 0, err
		}
	}
	return false, nil
}

func (pl *placer) retryTable(w *work, t *serviceTable) error {
	if t.forgotten {
		return nil
	}
	if t.kernel == nil {
		err := pl.place(w, t)
		if t.kernel != nil {
			pl.flipUsers(t) // the table may have lost its space in the kernel in this attempt
		}
		return err
	}
	if t.err == nil && len(t.missing) == 0 && len(t.missingPrefixes) == 0 {
		return nil
	}
	if t.part != nil {
		if len(t.missing)+len(t.missingPrefixes) == 0 {
			return nil
		}
		return pl.refit(w, t)
	}
	t.err = nil
	if err := pl.grow(w, t); err != nil {
		return err
	}
	for _, nc := range slices.Sorted(maps.Keys(t.missing)) {
		if err := pl.peer(w, t, nc, false); err != nil {
			return err
		}
	}
	for _, p := range slices.SortedFunc(maps.Keys(t.missingPrefixes), netip.Prefix.Compare) {
		if err := pl.prefix(w, t, p, !t.missingPrefixes[p]); err != nil {
			return err
		}
	}
	return nil
}
