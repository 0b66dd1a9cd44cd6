// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"errors"

	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// Kinds of IDs in quarantine: of fronts, and of backends of each family.
const (
	frontKind   = iota
	backendKind // plus the family
	kinds       = backendKind + families
)

// removed counts removed IDs that are not free yet, by the tenant that used them.
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

// An eighth of a map's IDs is the reserve. A tenant may not use the reserve while the IDs in quarantine that it
// released are more than a sixteenth of the reserve. A namespace without the tenant label may use only half of the
// reserve while the IDs in quarantine that all such namespaces released are more than half of it. In a small map, up to
// few IDs in quarantine have no effect.
const (
	keptOfMap  = 8
	ownOfKept  = 16
	halfOfKept = 2
	few        = 16 // in quarantine, for a small map
)

// leaves returns how many IDs of a map a change of a tenant has to leave to others, because IDs that the tenant, or all
// namespaces without the label, released are still in quarantine.
//
// Otherwise, a tenant that constantly creates and removes Services would use up the IDs of others, because shares do
// not count IDs in quarantine.
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

// own records the tenant of a front, and of its backends that a previous process wrote.
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

// noteShort records whether refused frontends may fit when removed IDs become free.
func (a *application) noteShort() {
	s := a.s
	for _, r := range a.res.Refused {
		room, ok := errors.AsType[*frontendtx.NoRoomError](r.Err)
		if ok && room.Map != bpf.MapsMapSlMember && (len(s.resting) > 0 || !s.left.empty() || len(s.leaving) > 0) {
			s.short = true
		}
	}
}

// Short reports whether refused frontends may fit after Collect.
func (m *Maps) Short() bool {
	if m.gate.RLock() != nil {
		return false
	}
	defer m.gate.RUnlock()
	return m.store.short
}

// Freed receives when Collect has freed IDs after frontends were refused.
func (m *Maps) Freed() <-chan struct{} { return m.freed }
