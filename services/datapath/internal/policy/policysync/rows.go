// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// place finds or writes the kernel table of a table of the service.
func (a *Applier) place(w *work, t *serviceTable) error {
	rows, ok := a.admit(t)
	if (!ok || rows < len(t.content.Peers)) && !w.leveled {
		w.leveled = true
		if err := a.level(w); err != nil || t.kernel != nil {
			return err
		}
		rows, ok = a.admit(t)
	}
	if !ok {
		exceeds := a.rooms.exceeds(t, false)
		var err error
		if ok, err = a.yield(w, t, t.estimate()); err != nil {
			return err
		}
		if !ok {
			return a.placePart(w, t, exceeds, unbounded)
		}
		rows = len(t.content.Peers)
	}
	if k, match := a.candidate(t); k != nil {
		return a.adopt(w, t, k, match)
	}
	return a.define(w, t, rows)
}

// candidate returns the best kernel table without an owner that can become t by changes in place,
// or nil.
func (a *Applier) candidate(t *serviceTable) (*kernelTable, *nodetable.Match) {
	var best *kernelTable
	var bestMatch *nodetable.Match
	used := a.used()
	for _, id := range slices.Sorted(maps.Keys(a.tables)) {
		k := a.tables[id]
		if k.owner != nil || k.content.Hash != t.content.Hash {
			continue
		}
		m := k.content.Match(&t.content, k.known)
		if m == nil {
			continue
		}
		_, inUse := used[k]
		m.InUse = inUse
		if bestMatch == nil || m.Better(bestMatch) {
			best, bestMatch = k, m
		}
	}
	return best, bestMatch
}

// define writes a new table. rows is the number of rows that fit the shares of its tenants. If the
// table exceeds the capacity, define writes a part, or records why.
func (a *Applier) define(w *work, t *serviceTable, rows int) error {
	content, full := t.content, error(nil)
	if rows < len(content.Peers) {
		content, full = a.model.reduced(t, rows), a.rooms.exceeds(t, true)
	}
	id, err := a.cfg.Kernel.DefineTable(content)
	why, _ := errors.AsType[*nodetable.NoCapacityError](err)
	if why != nil && why.PeerRows() {
		content, full = a.model.reduced(t, min(why.Free, why.Limit)), err
		id, err = a.cfg.Kernel.DefineTable(content)
	}
	if errors.Is(err, nodetable.ErrNoCapacity) {
		a.needs(t, why)
		t.err = err
		if why == nil {
			return nil
		}
		most := unbounded
		if limit, ok := limitOf(why.Map); ok {
			most[limit] = min(why.Free, why.Limit)
		}
		return a.placePart(w, t, err, most)
	}
	if err != nil {
		return fmt.Errorf("define table %d: %w", t.id, err)
	}
	k := &kernelTable{id: id, content: content.Clone(), owner: t}
	a.tables[id] = k
	a.unplace(t)
	t.kernel, t.same, t.err = k, true, full
	if size := a.cfg.Kernel.TableSize(id); size != t.charge.units && !a.rooms.fits(t, size) {
		exceeds := a.rooms.exceeds(t, false)
		a.unplace(t)
		a.discard(id)
		if fits, err := a.yield(w, t, size); err != nil {
			return err
		} else if fits {
			return a.define(w, t, rows)
		}
		return a.placePart(w, t, exceeds, unbounded)
	}
	if full != nil {
		a.model.lacks(t, content.Peers)
	}
	t.classes = make([]uint16, len(t.content.Classes))
	for i := range t.classes {
		t.classes[i] = uint16(i) //nolint:gosec // at most maxClasses
	}
	return faultDefine.Hit(w.ctx)
}

// grow adds the classes that the kernel table lacks.
func (a *Applier) grow(w *work, t *serviceTable) error {
	k := t.kernel
	if k == nil {
		return nil
	}
	for len(t.classes) < len(t.content.Classes) {
		t.classes = append(t.classes, nodetable.Absent)
	}
	var added []policytable.Ranges
	where := slices.Clone(t.classes)
	if t.same {
		have := len(k.content.Classes)
		added = t.content.Classes[have:]
		for i := have; i < len(where); i++ {
			where[i] = uint16(i) //nolint:gosec // at most MaxClasses
		}
	} else {
		known := maps.Clone(k.known())
		for i, c := range where {
			if c != nodetable.Absent {
				continue
			}
			ranges := t.content.Classes[i]
			if t.part != nil {
				ranges = t.part.Ranges(uint16(i), ranges) //nolint:gosec // at most MaxClasses
			}
			what := ranges.Meaning()
			at, ok := known[what]
			if !ok {
				at = uint16(len(k.content.Classes) + len(added)) //nolint:gosec // at most twice MaxClasses
				added, known[what] = append(added, ranges), at
			}
			where[i] = at
		}
	}
	if len(added) > 0 {
		by := nodetable.Size{nodetable.LimitPeerClasses: len(added), nodetable.LimitPortNodes: len(added)}
		if !a.rooms.grows(t, by, by) {
			t.err = a.rooms.exceeds(t, true)
			return nil
		}
		err := a.cfg.Kernel.GrowTable(k.id, added)
		if errors.Is(err, nodetable.ErrNoCapacity) {
			t.err = err
			return nil
		}
		if err != nil {
			return fmt.Errorf("grow table %d: %w", t.id, err)
		}
		k.content.Classes = slices.Concat(k.content.Classes, added)
		k.meanings = nil
	}
	t.classes, t.err = where, nil
	return faultGrow.Hit(w.ctx)
}

// peer updates one row of a table.
func (a *Applier) peer(w *work, t *serviceTable, nc nodetable.IdentityClass, remove bool) error {
	k := t.kernel
	if k == nil || nc == 0 {
		return nil
	}
	if remove {
		_, lacked := t.missing[nc]
		a.model.hasRow(t, nc)
		if t.part != nil {
			delete(t.part.rows, nc)
		}
		if err := a.dropRow(w, k, nc); err != nil || !lacked {
			return err
		}
		return a.alignDefaults(w, t)
	}
	class := t.classes[t.content.Peers[nc]]
	if err := a.row(t, nc, class); errors.Is(err, nodetable.ErrNoCapacity) || class == nodetable.Absent {
		a.model.lacksRow(t, nc)
		if err != nil {
			t.err = err
		}
		return a.alignDefaults(w, t)
	} else if err != nil {
		return fmt.Errorf("row of table %d: %w", t.id, err)
	}
	if err := faultRows.Hit(w.ctx); err != nil {
		return err
	}
	if _, lacked := t.missing[nc]; lacked {
		a.model.hasRow(t, nc)
		return a.alignDefaults(w, t)
	}
	return nil
}

// flipUsers marks the subjects of a table dirty.
func (a *Applier) flipUsers(t *serviceTable) {
	if a.model == nil {
		return // a snapshot is being adopted, which flips all
	}
	for id, list := range a.model.binds {
		s := a.endpoints.subjects[id]
		if s != nil && (list[policytable.Egress].table == t || list[policytable.Ingress].table == t) {
			s.dirty = true
		}
	}
}

// row writes a row of a table of the service, unless it exists.
func (a *Applier) row(t *serviceTable, nc nodetable.IdentityClass, class uint16) error {
	have, paid := len(t.kernel.content.Peers), t.charge.units[nodetable.LimitPeerRows]
	if _, ok := t.kernel.content.Peers[nc]; !ok && class != nodetable.Absent && have >= paid {
		by := nodetable.Size{nodetable.LimitPeerRows: 1}
		wanted := nodetable.Size{nodetable.LimitPeerRows: max(1+have/8, len(t.missing))}
		if !a.rooms.grows(t, by, wanted) {
			return a.rooms.exceeds(t, true)
		}
	}
	return a.addRow(t.kernel, nc, class)
}

// addRow writes a row, unless it exists.
func (a *Applier) addRow(k *kernelTable, nc nodetable.IdentityClass, class uint16) error {
	if class == nodetable.Absent {
		return nil
	}
	if old, ok := k.content.Peers[nc]; ok {
		if old == class || slices.Equal(k.content.Classes[old], k.content.Classes[class]) {
			return nil
		}
		return fmt.Errorf("identity class %d already has another row in table %d of the kernel", nc, k.id)
	}
	if err := a.cfg.Kernel.SetPeer(k.id, nc, class); err != nil {
		return err
	}
	k.content.Peers[nc] = class
	return nil
}

// dropRow deletes a row, if it exists.
func (a *Applier) dropRow(w *work, k *kernelTable, nc nodetable.IdentityClass) error {
	if _, ok := k.content.Peers[nc]; !ok {
		return nil
	}
	if err := a.cfg.Kernel.DeletePeer(k.id, nc); err != nil {
		return fmt.Errorf("row of identity class %d in table %d: %w", nc, k.id, err)
	}
	delete(k.content.Peers, nc)
	if a.identities.members[nc] > 0 {
		a.affect(w, k)
	}
	return faultRows.Hit(w.ctx)
}

// prefix updates one prefix of a table. grants reports that the prefix only allows more.
func (a *Applier) prefix(w *work, t *serviceTable, p netip.Prefix, grants bool) error {
	k := t.kernel
	if k == nil {
		return nil
	}
	if t.part != nil {
		if err := a.spread(w, t, p); err != nil {
			return err
		}
	}
	// Flip its subjects when it starts or stops allowing too much.
	defer func(before bool) {
		if before != t.allowsTooMuch() {
			a.flipUsers(t)
		}
	}(t.allowsTooMuch())
	delete(t.missingPrefixes, p)
	want, wanted := t.content.Prefixes[p]
	have, there := k.content.Prefixes[p]
	if !wanted {
		if !there {
			return nil
		}
		if err := a.cfg.Kernel.DeletePrefix(k.id, p); err != nil {
			return fmt.Errorf("prefix %v of table %d: %w", p, t.id, err)
		}
		delete(k.content.Prefixes, p)
		a.affect(w, k)
		return faultPrefixes.Hit(w.ctx)
	}
	lacks := false
	for i, c := range want {
		want[i] = t.classes[c]
		lacks = lacks || want[i] == nodetable.Absent
	}
	if there && have == want {
		return nil
	}
	err := error(nil)
	var by nodetable.Size
	by[prefixLimit(p.Addr().Is4())] = 1
	if !lacks && !there && !a.rooms.grows(t, by, by) {
		err = a.rooms.exceeds(t, true)
	} else if !lacks {
		err = a.cfg.Kernel.SetPrefix(k.id, p, want)
	}
	if lacks || errors.Is(err, nodetable.ErrNoCapacity) {
		if t.missingPrefixes == nil {
			t.missingPrefixes = map[netip.Prefix]bool{}
		}
		t.missingPrefixes[p] = !grants
		if err != nil {
			t.err = err
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("prefix %v of table %d: %w", p, t.id, err)
	}
	k.content.Prefixes[p] = want
	if !grants {
		a.affect(w, k)
	}
	return faultPrefixes.Hit(w.ctx)
}
