// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// used returns the tables that evaluate an endpoint, with the IDs of these endpoints.
func (pl *placer) used() map[*kernelTable][]uint16 {
	out := map[*kernelTable][]uint16{}
	for t, slots := range pl.endpoints.used() {
		if k := pl.tables.byID[t]; k != nil {
			out[k] = slots
		}
	}
	return out
}

// affect marks the connections of all endpoints that a table evaluates for another evaluation.
func (pl *placer) affect(w *work, k *kernelTable) {
	for _, n := range pl.endpoints.evaluatedBy(k.id) {
		w.bump[n] = struct{}{}
	}
}

func (a *Applier) bumpAffected(w *work) error {
	var err error
	switch {
	case a.bumpAll:
		err = a.cfg.Kernel.BumpEpochs()
	case len(w.bump) > 0:
		err = a.cfg.Kernel.BumpEpochs(slices.Sorted(maps.Keys(w.bump))...)
	default:
		return nil
	}
	if err != nil {
		return fmt.Errorf("bump epochs: %w", err)
	}
	a.bumpAll = false
	clear(w.bump)
	return faultBump.Hit(w.ctx)
}

// sweep retires tables without endpoints and without an owner, and unused identity classes.
func (pl *placer) sweep(w *work) error {
	used := pl.used()
	var tables []nodetable.ID
	for id, k := range pl.tables.byID {
		if _, ok := used[k]; !ok && k.owner == nil {
			tables = append(tables, id)
		}
	}
	if len(tables) > 0 {
		slices.Sort(tables)
		if err := pl.tables.retire(tables...); err != nil {
			// It only costs space; the next sweep tries again.
			pl.log.Error("tables not retired", "tables", len(tables), log.Err(err))
			return nil
		}
		pl.draining()
		if err := faultRetire.Hit(w.ctx); err != nil {
			return err
		}
	}
	named := make(map[nodetable.IdentityClass]struct{})
	if pl.model != nil {
		for _, nc := range pl.model.classes {
			named[nc.number] = struct{}{}
		}
	}
	retired, err := pl.identities.retireUnused(func(nc nodetable.IdentityClass) bool {
		_, ok := named[nc]
		return ok || pl.tables.refersTo(nc)
	})
	if err != nil || retired == 0 {
		return err
	}
	pl.draining()
	return faultRetire.Hit(w.ctx)
}

// draining requests a grace period that frees the retired tables and classes.
func (pl *placer) draining() {
	select {
	case pl.drain <- struct{}{}:
	default:
	}
}
