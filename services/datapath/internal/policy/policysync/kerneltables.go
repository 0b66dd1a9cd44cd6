// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// kernelTables are the tables in the kernel, as this process wrote or found them. Every write of a table is one of its
// methods, which changes the kernel first and then its record; a failed write changes neither. It makes no decisions:
// the caller checks shares, decides the order of changes, and holds the lock.
type kernelTables struct {
	kernel Kernel
	byID   map[nodetable.ID]*kernelTable
}

// kernelTable is a table in the kernel, with the service's table that it was made from.
type kernelTable struct {
	id       nodetable.ID
	content  nodetable.Content // its content in the kernel
	owner    *serviceTable
	meanings map[policytable.Meaning]uint16 // of classes; nil until first used
}

// known returns the table's classes by meaning. If several classes have the same meaning, it returns the first one.
func (k *kernelTable) known() map[policytable.Meaning]uint16 {
	if k.meanings == nil {
		k.meanings = k.content.Meanings()
	}
	return k.meanings
}

func newKernelTables(k Kernel) *kernelTables {
	return &kernelTables{kernel: k, byID: map[nodetable.ID]*kernelTable{}}
}

// adopt reads the tables of an earlier process.
func (ks *kernelTables) adopt(l *slog.Logger) error {
	infos, err := ks.kernel.Tables()
	if err != nil {
		return fmt.Errorf("list tables: %w", err)
	}
	for _, info := range infos {
		id := info.ID
		c, err := ks.kernel.TableContent(id)
		if err == nil {
			err = c.Validate()
		}
		if err != nil {
			// Endpoints that use the table keep it, but no other endpoint gets it.
			l.Error("table is not adopted", "table", id, log.Err(err))
			c = nodetable.Content{Table: policytable.Table{Classes: []policytable.Ranges{nil}}}
		}
		ks.byID[id] = &kernelTable{id: id, content: c.Clone()}
	}
	return nil
}

// sorted yields the tables by ID.
func (ks *kernelTables) sorted() iter.Seq[*kernelTable] {
	return func(yield func(*kernelTable) bool) {
		for _, id := range slices.Sorted(maps.Keys(ks.byID)) {
			if !yield(ks.byID[id]) {
				return
			}
		}
	}
}

// refersTo reports whether a table has a row of an identity class.
func (ks *kernelTables) refersTo(nc nodetable.IdentityClass) bool {
	for _, k := range ks.byID {
		if _, ok := k.content.Peers[nc]; ok {
			return true
		}
	}
	return false
}

// candidate returns the most suitable table without an owner that can be changed into t in place, or nil. used are the
// tables that evaluate endpoints.
func (ks *kernelTables) candidate(t *serviceTable, used map[*kernelTable][]uint16) (*kernelTable, *nodetable.Match) {
	var best *kernelTable
	var bestMatch *nodetable.Match
	for k := range ks.sorted() {
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

// equal returns a table without an owner that equals the part in d, for example after a restart. It returns nil if no
// table matches. It sets which class of that table corresponds to each class of the definition.
func (ks *kernelTables) equal(d *definition) *kernelTable {
	for k := range ks.sorted() {
		if k.owner != nil || k.content.Hash != d.content.Hash || len(k.content.Peers) != len(d.content.Peers) ||
			len(k.content.Prefixes) != len(d.content.Prefixes) {
			continue
		}
		match := k.content.Match(&d.content, k.known)
		if match == nil || match.Rows > 0 || slices.Contains(match.Classes, nodetable.Absent) {
			continue
		}
		alike := true
		for kind, class := range d.content.DefaultClasses {
			alike = alike && k.content.Alike(k.content.DefaultClasses[kind], match.Classes[class])
		}
		for p, classes := range d.content.Prefixes {
			for i, class := range classes {
				alike = alike && k.content.Alike(k.content.Prefixes[p][i], match.Classes[class])
			}
		}
		if !alike {
			continue
		}
		for i, class := range d.classes {
			d.classes[i] = match.Classes[class]
		}
		return k
	}
	return nil
}

// define writes a new table.
func (ks *kernelTables) define(c nodetable.Content) (*kernelTable, error) {
	id, err := ks.kernel.DefineTable(c)
	if err != nil {
		return nil, err
	}
	k := &kernelTable{id: id, content: c.Clone()}
	ks.byID[id] = k
	return k, nil
}

// grow appends classes to a table.
func (ks *kernelTables) grow(k *kernelTable, added []policytable.Ranges) error {
	if err := ks.kernel.GrowTable(k.id, added); err != nil {
		return err
	}
	k.content.Classes = slices.Concat(k.content.Classes, added)
	k.meanings = nil
	return nil
}

// addRow writes a row, unless it exists.
func (ks *kernelTables) addRow(k *kernelTable, nc nodetable.IdentityClass, class uint16) error {
	if class == nodetable.Absent {
		return nil
	}
	if old, ok := k.content.Peers[nc]; ok {
		if old == class || slices.Equal(k.content.Classes[old], k.content.Classes[class]) {
			return nil
		}
		return fmt.Errorf("identity class %d already has another row in table %d of the kernel", nc, k.id)
	}
	if err := ks.kernel.SetPeer(k.id, nc, class); err != nil {
		return err
	}
	k.content.Peers[nc] = class
	return nil
}

func (ks *kernelTables) dropRow(k *kernelTable, nc nodetable.IdentityClass) error {
	if err := ks.kernel.DeletePeer(k.id, nc); err != nil {
		return fmt.Errorf("row of identity class %d in table %d: %w", nc, k.id, err)
	}
	delete(k.content.Peers, nc)
	return nil
}

// setPrefix adds or replaces a prefix.
func (ks *kernelTables) setPrefix(k *kernelTable, p netip.Prefix, classes policytable.PrefixClasses) error {
	if err := ks.kernel.SetPrefix(k.id, p, classes); err != nil {
		return err
	}
	k.content.Prefixes[p] = classes
	return nil
}

func (ks *kernelTables) dropPrefix(k *kernelTable, p netip.Prefix) error {
	if err := ks.kernel.DeletePrefix(k.id, p); err != nil {
		return err
	}
	delete(k.content.Prefixes, p)
	return nil
}

// setDefaults replaces the classes of peers without a row.
func (ks *kernelTables) setDefaults(k *kernelTable, classes [identity.Kinds]policytable.Class) error {
	if err := ks.kernel.SetDefaults(k.id, classes); err != nil {
		return err
	}
	k.content.DefaultClasses = classes
	return nil
}

// retire retires tables that no endpoint uses.
func (ks *kernelTables) retire(ids ...nodetable.ID) error {
	if err := ks.kernel.RetireTables(ids...); err != nil {
		return err
	}
	for _, id := range ids {
		delete(ks.byID, id)
	}
	return nil
}
