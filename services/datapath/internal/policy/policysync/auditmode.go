// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
)

// SetAudit enables audit mode for exactly the given endpoints, or all with Config.Audit. Connections of an endpoint
// that leaves audit mode are evaluated again before SetAudit returns.
func (a *Applier) SetAudit(ctx context.Context, audited auditmode.Audited) error {
	slots, err := a.setAudit(ctx, audited)
	if len(slots) > 0 && a.cfg.Changed != nil {
		a.cfg.Changed(slots)
	}
	return err
}

func (a *Applier) setAudit(ctx context.Context, audited auditmode.Audited) (changed []uint16, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.auditAll = audited.All
	for _, n := range slices.Sorted(maps.Keys(a.endpoints.slots)) {
		if a.endpoints.slots[n].audit != (a.cfg.Audit || audited.Has(n)) {
			changed = append(changed, n)
		}
	}
	return changed, a.enforceAudit(ctx, audited, changed)
}

// enforceAudit sets the audit mode of some endpoints. The lock is held.
func (a *Applier) enforceAudit(ctx context.Context, audited auditmode.Audited, slots []uint16) error {
	groups := map[bool][]uint16{}
	for _, n := range slots {
		on := a.cfg.Audit || audited.Has(n)
		groups[on] = append(groups[on], n)
	}
	var errs []error
	for _, on := range []bool{false, true} {
		err := a.cfg.Kernel.SetAudit(ctx, on, groups[on]...)
		if err != nil {
			errs = append(errs, fmt.Errorf("audit mode of %d endpoints: %w", len(groups[on]), err))
		}
		for _, n := range groups[on] {
			a.endpoints.slots[n].audit = on == (err == nil) // after an error the next call tries again
			a.History.Set(n, a.endpoints.policyOf(n), a.cfg.Now())
		}
	}
	return errors.Join(errs...)
}
