// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// If the kernel has no capacity for a row, only the table that needs the row is affected. The table treats the peers of
// the row as unknown: every deny rule with a selector matches them, and no allow rule with a selector does. The
// programs find no row for such a peer, and use the table's default class for the peer's kind. Therefore this default
// is set to the class of unknown peers. This also affects all other peers of the kind that have no row.

// lacksRow records that the kernel has no capacity for a row of a table.
func (m *model) lacksRow(t *serviceTable, nc nodetable.IdentityClass) {
	if t.missing == nil {
		t.missing = map[nodetable.IdentityClass]struct{}{}
	}
	t.missing[nc] = struct{}{}
	m.missingRows[t] = struct{}{}
}

// hasRow records that a table has a row, or no longer needs it.
func (m *model) hasRow(t *serviceTable, nc nodetable.IdentityClass) {
	if delete(t.missing, nc); len(t.missing) == 0 {
		delete(m.missingRows, t)
	}
}

// lacks records which rows a table in the kernel lacks.
func (m *model) lacks(t *serviceTable, there map[nodetable.IdentityClass]policytable.Class) {
	for nc := range t.content.Peers {
		if _, ok := there[nc]; !ok {
			m.lacksRow(t, nc)
		}
	}
	_, t.unsafe = m.defaults(t)
}

// reduced returns the content of a table with at most limit rows. If rows must be left out, it prefers to keep the rows
// without which their peers would be allowed more.
func (m *model) reduced(t *serviceTable, limit int) nodetable.Content {
	c := t.content.Clone()
	unknown := c.DefaultClasses[identity.KindUnknown]
	unsafe := make(map[policytable.Class]bool)
	for _, class := range c.Peers {
		if _, ok := unsafe[class]; !ok {
			unsafe[class] = !c.AtMost(unknown, class)
		}
	}
	all := slices.SortedFunc(maps.Keys(c.Peers), func(x, y nodetable.IdentityClass) int {
		if a, b := unsafe[c.Peers[x]], unsafe[c.Peers[y]]; a != b {
			if a {
				return -1
			}
			return 1
		}
		return int(x) - int(y)
	})
	for _, nc := range all[min(max(limit, 0), len(all)):] {
		for kind := range c.DefaultClasses {
			if m.kinds[nc]>>kind&1 != 0 {
				c.DefaultClasses[kind] = unknown
			}
		}
		delete(c.Peers, nc)
	}
	return c
}

// defaults returns the default classes that a table in the kernel needs for its missing rows, and
// whether the peers of some missing rows may do more with them than with the rows.
func (m *model) defaults(t *serviceTable) (classes [identity.Kinds]policytable.Class, unsafe bool) {
	classes = t.content.DefaultClasses
	unknown := classes[identity.KindUnknown]
	safe := make(map[policytable.Class]bool)
	var closed [identity.Kinds]bool
	for nc := range t.missing {
		kinds := m.kinds[nc]
		if kinds == 0 {
			continue // no identity has the class
		}
		for kind := range classes {
			if kinds>>kind&1 != 0 {
				classes[kind], closed[kind] = unknown, true
			}
		}
		class := t.content.Peers[nc]
		if _, ok := safe[class]; !ok {
			safe[class] = t.content.AtMost(unknown, class)
		}
		unsafe = unsafe || !safe[class]
	}
	return classes, unsafe || len(t.missing) > 0 && m.unsafeRows(t, closed)
}

// alignDefaults updates the default classes of a table, so that exactly the kinds of its missing
// rows are treated as unknown. If that would allow too much, it marks the table's subjects dirty,
// and flip isolates them.
func (pl *placer) alignDefaults(w *work, t *serviceTable) error {
	k := t.kernel
	if k == nil {
		return nil
	}
	classes, unsafe := pl.model.defaults(t)
	if t.unsafe != unsafe {
		before := t.allowsTooMuch()
		if t.unsafe = unsafe; before != t.allowsTooMuch() {
			pl.flipUsers(t)
		}
	}
	want := k.content.DefaultClasses
	for kind, class := range classes {
		closes := class == classes[identity.KindUnknown]
		at := t.classes[class]
		if at != nodetable.Absent && (closes || !w.keepClosed) && !k.content.Alike(want[kind], at) {
			want[kind] = at
		}
	}
	if want == k.content.DefaultClasses {
		return nil
	}
	if err := pl.tables.setDefaults(k, want); err != nil {
		return fmt.Errorf("peers without a row in table %d: %w", t.id, err)
	}
	pl.affect(w, k)
	return faultRows.Hit(w.ctx)
}

// alignFor prepares tables that lack the row of an identity's class for the identity's new entry.
func (a *Applier) alignFor(w *work, want map[uint32]nodetable.Identity) error {
	if a.model == nil || len(a.model.missingRows) == 0 {
		return nil
	}
	concerned := map[policytable.ID]*serviceTable{}
	for _, entry := range want {
		for t := range a.model.missingRows {
			if _, ok := t.missing[entry.Class]; ok && entry.Known {
				concerned[t.id] = t
			}
		}
	}
	closes := false
	for _, id := range slices.Sorted(maps.Keys(concerned)) {
		t := concerned[id]
		before := t.allowsTooMuch()
		if err := a.alignDefaults(w, t); err != nil {
			return err
		}
		closes = closes || !before && t.allowsTooMuch()
	}
	if !closes {
		return nil
	}
	return a.flip(w)
}
