// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"errors"

	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// Kinds of numbers that rest: of fronts, and of backends of each family.
const (
	frontKind   = iota
	backendKind // and the family
	kinds       = backendKind + families
)

// removed counts numbers that left and are not free yet. They count for the tenant that used
// them.
type removed struct {
	of     map[shares.Tenant]int
	others int // of namespaces without the tenant label
}

func (r *removed) add(t shares.Tenant, n int) {
	if r.of[t] += n; r.of[t] == 0 {
		delete(r.of, t)
	}
	if t != shares.System && !t.HasLabel() {
		r.others += n
	}
}

// Of the numbers of a map, an eighth are only for tenants of which fewer than a 128th rest. Half
// of the eighth is only for tenants with the label, while as many of the other namespaces rest.
const (
	keptOfMap  = 8
	ownOfKept  = 16
	halfOfKept = 2
	few        = 16 // that rest in a small map
)

// leaves returns how many numbers of a map of a size a change of a tenant leaves to others,
// because numbers that the tenant, or all namespaces without the label, gave up are not free yet.
//
// A tenant that creates and removes Services all the time uses up the numbers of others
// otherwise: no share counts what rests.
func (r *removed) leaves(t shares.Tenant, size int) int {
	kept := size / keptOfMap
	switch {
	case t == shares.System:
	case r.of[t] > max(kept/ownOfKept, few):
		return kept
	case !t.HasLabel() && r.others > max(kept/halfOfKept, few):
		return kept / halfOfKept
	}
	return 0
}

// own notes whose a front is, and its backends that an earlier process wrote.
func (s *store) own(f *front, t shares.Tenant) {
	if f.tenant != t {
		fam := familyOf(f.key.Addr)
		s.sourceUse[fam].use(f.tenant, -len(f.sources))
		s.sourceUse[fam].use(t, len(f.sources))
		f.tenant = t
	}
	for _, b := range f.list.backends {
		if b.tenant == (shares.Tenant{}) {
			b.tenant = t
		}
	}
}

// noteShort notes whether frontends were refused that may have room when removed numbers are free.
func (a *application) noteShort() {
	s := a.s
	for _, r := range a.res.Refused {
		room, ok := errors.AsType[*frontendtx.NoRoomError](r.Err)
		if ok && room.Map != bpf.MapsMapSlMember && (len(s.resting) > 0 || !s.left.empty() || len(s.leaving) > 0) {
			s.short = true
		}
	}
}

// Short reports whether frontends were refused that may have room after Collect.
func (m *Maps) Short() bool {
	if m.gate.RLock() != nil {
		return false
	}
	defer m.gate.RUnlock()
	return m.store.short
}

// Freed receives when Collect has freed numbers after frontends were refused.
func (m *Maps) Freed() <-chan struct{} { return m.freed }
