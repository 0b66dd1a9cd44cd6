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
func (pl *placer) place(w *work, t *serviceTable) error {
	rows, ok := pl.admit(t)
	if (!ok || rows < len(t.content.Peers)) && !w.leveled {
		w.leveled = true
		if err := pl.level(w); err != nil || t.kernel != nil {
			return err
		}
		rows, ok = pl.admit(t)
	}
	if !ok {
		exceeds := pl.rooms.exceeds(t, false)
		var err error
		if ok, err = pl.yield(w, t, t.estimate()); err != nil {
			return err
		}
		if !ok {
			return pl.placePart(w, t, exceeds, unbounded)
		}
		rows = len(t.content.Peers)
	}
	if k, match := pl.tables.candidate(t, pl.used()); k != nil {
		return pl.adopt(w, t, k, match)
	}
	return pl.define(w, t, rows)
}

// define writes a new table. rows is the number of rows that fit the shares of its tenants. If the
// table exceeds the capacity, define writes a part, or records why.
func (pl *placer) define(w *work, t *serviceTable, rows int) error {
	content, full := t.content, error(nil)
	if rows < len(content.Peers) {
		content, full = pl.model.reduced(t, rows), pl.rooms.exceeds(t, true)
	}
	k, err := pl.tables.define(content)
	why, _ := errors.AsType[*nodetable.NoCapacityError](err)
	if why != nil && why.PeerRows() {
		content, full = pl.model.reduced(t, min(why.Free, why.Limit)), err
		k, err = pl.tables.define(content)
	}
	if errors.Is(err, nodetable.ErrNoCapacity) {
		pl.needs(t, why)
		t.err = err
		if why == nil {
			return nil
		}
		most := unbounded
		if limit, ok := limitOf(why.Map); ok {
			most[limit] = min(why.Free, why.Limit)
		}
		return pl.placePart(w, t, err, most)
	}
	if err != nil {
		return fmt.Errorf("define table %d: %w", t.id, err)
	}
	pl.unplace(t)
	k.owner = t
	t.kernel, t.same, t.err = k, true, full
	if size := pl.kernel.TableSize(k.id); size != t.charge.units && !pl.rooms.fits(t, size) {
		exceeds := pl.rooms.exceeds(t, false)
		pl.unplace(t)
		pl.discard(k.id)
		if fits, err := pl.yield(w, t, size); err != nil {
			return err
		} else if fits {
			return pl.define(w, t, rows)
		}
		return pl.placePart(w, t, exceeds, unbounded)
	}
	if full != nil {
		pl.model.lacks(t, content.Peers)
	}
	t.classes = make([]uint16, len(t.content.Classes))
	for i := range t.classes {
		t.classes[i] = uint16(i) //nolint:gosec // at most maxClasses
	}
	return faultDefine.Hit(w.ctx)
}

// grow adds the classes that the kernel table lacks.
func (pl *placer) grow(w *work, t *serviceTable) error {
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
		if !pl.rooms.grows(t, by, by) {
			t.err = pl.rooms.exceeds(t, true)
			return nil
		}
		err := pl.tables.grow(k, added)
		if errors.Is(err, nodetable.ErrNoCapacity) {
			t.err = err
			return nil
		}
		if err != nil {
			return fmt.Errorf("grow table %d: %w", t.id, err)
		}
	}
	t.classes, t.err = where, nil
	return faultGrow.Hit(w.ctx)
}

// peer updates one row of a table.
func (pl *placer) peer(w *work, t *serviceTable, nc nodetable.IdentityClass, remove bool) error {
	k := t.kernel
	if k == nil || nc == 0 {
		return nil
	}
	if remove {
		_, lacked := t.missing[nc]
		pl.model.hasRow(t, nc)
		if t.part != nil {
			delete(t.part.rows, nc)
		}
		if err := pl.dropRow(w, k, nc); err != nil || !lacked {
			return err
		}
		return pl.alignDefaults(w, t)
	}
	class := t.classes[t.content.Peers[nc]]
	if err := pl.row(t, nc, class); errors.Is(err, nodetable.ErrNoCapacity) || class == nodetable.Absent {
		pl.model.lacksRow(t, nc)
		if err != nil {
			t.err = err
		}
		return pl.alignDefaults(w, t)
	} else if err != nil {
		return fmt.Errorf("row of table %d: %w", t.id, err)
	}
	if err := faultRows.Hit(w.ctx); err != nil {
		return err
	}
	if _, lacked := t.missing[nc]; lacked {
		pl.model.hasRow(t, nc)
		return pl.alignDefaults(w, t)
	}
	return nil
}

// flipUsers marks the subjects of a table dirty.
func (pl *placer) flipUsers(t *serviceTable) {
	if pl.model == nil {
		return // a snapshot is being adopted, which flips all
	}
	for id, list := range pl.model.binds {
		s := pl.endpoints.subjects[id]
		if s != nil && (list[policytable.Egress].table == t || list[policytable.Ingress].table == t) {
			s.dirty = true
		}
	}
}

// row writes a row of a table of the service, unless it exists.
func (pl *placer) row(t *serviceTable, nc nodetable.IdentityClass, class uint16) error {
	have, paid := len(t.kernel.content.Peers), t.charge.units[nodetable.LimitPeerRows]
	if _, ok := t.kernel.content.Peers[nc]; !ok && class != nodetable.Absent && have >= paid {
		by := nodetable.Size{nodetable.LimitPeerRows: 1}
		wanted := nodetable.Size{nodetable.LimitPeerRows: max(1+have/8, len(t.missing))}
		if !pl.rooms.grows(t, by, wanted) {
			return pl.rooms.exceeds(t, true)
		}
	}
	return pl.tables.addRow(t.kernel, nc, class)
}

// dropRow deletes a row, if it exists.
func (pl *placer) dropRow(w *work, k *kernelTable, nc nodetable.IdentityClass) error {
	if _, ok := k.content.Peers[nc]; !ok {
		return nil
	}
	if err := pl.tables.dropRow(k, nc); err != nil {
		return err
	}
	if pl.identities.members[nc] > 0 {
		pl.affect(w, k)
	}
	return faultRows.Hit(w.ctx)
}

// prefix updates one prefix of a table. grants reports that the prefix only allows more.
func (pl *placer) prefix(w *work, t *serviceTable, p netip.Prefix, grants bool) error {
	k := t.kernel
	if k == nil {
		return nil
	}
	if t.part != nil {
		if err := pl.spread(w, t, p); err != nil {
			return err
		}
	}
	// Switch the subjects of the table when it starts or stops allowing too much.
	defer func(before bool) {
		if before != t.allowsTooMuch() {
			pl.flipUsers(t)
		}
	}(t.allowsTooMuch())
	delete(t.missingPrefixes, p)
	want, wanted := t.content.Prefixes[p]
	have, there := k.content.Prefixes[p]
	if !wanted {
		if !there {
			return nil
		}
		if err := pl.tables.dropPrefix(k, p); err != nil {
			return fmt.Errorf("prefix %v of table %d: %w", p, t.id, err)
		}
		pl.affect(w, k)
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
	if !lacks && !there && !pl.rooms.grows(t, by, by) {
		err = pl.rooms.exceeds(t, true)
	} else if !lacks {
		err = pl.tables.setPrefix(k, p, want)
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
	if !grants {
		pl.affect(w, k)
	}
	return faultPrefixes.Hit(w.ctx)
}
