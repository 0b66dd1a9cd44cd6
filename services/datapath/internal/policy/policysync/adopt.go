// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
)

// Adopt reads the kernel's state: tables, identity classes, identities, and endpoints with their
// policy entries. All of it stays enforced until the service sends its state. trusted reports
// whether an endpoint's tables came from a policy service, so that new endpoints of the same
// identity may get them, too. audited says which endpoints are in audit mode.
func (a *Applier) Adopt(trusted func(slot uint16) bool, audited auditmode.Audited) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.past.Recall()
	if err := a.tables.adopt(a.log); err != nil {
		return err
	}
	if err := a.identities.adopt(); err != nil {
		return err
	}
	endpoints, err := a.cfg.Kernel.Bindings()
	if err != nil {
		return fmt.Errorf("list endpoints: %w", err)
	}
	for _, e := range endpoints {
		if e.Blocked() {
			continue // the endpoint is added when it is published again
		}
		a.endpoints.slots[e.Slot] = &slot{Binding: e}
		s := a.subject(e.Identity)
		s.users++
		if a.evaluated(e.Egress) && a.evaluated(e.Ingress) && trusted(e.Slot) {
			s.ready, s.egress, s.ingress = true, e.Egress, e.Ingress
		}
	}
	// set the audit mode of every endpoint, because the modes in the kernel are unknown
	a.auditAll = audited.All
	if err := a.enforceAudit(context.Background(), audited, slices.Sorted(maps.Keys(a.endpoints.slots))); err != nil {
		return err
	}
	a.left()
	return nil
}

// evaluated reports whether a table came from a policy service.
func (a *Applier) evaluated(t nodetable.ID) bool {
	_, ok := a.tables.byID[t]
	return ok || t == nodetable.Allow
}
