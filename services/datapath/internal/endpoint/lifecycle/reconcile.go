// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// reconcileRetry is the pause after a failed reconciliation with sluice-ipam.
const reconcileRetry = time.Second

// ReconcileLoop reconciles sluice-ipam's allocations and the identities with the records once the
// services answer, and again after each time one was unavailable, because it may have lost state.
// It returns when ctx ends.
func (c *Core) ReconcileLoop(ctx context.Context, ipam endpoint.Connection, identity endpoint.Service) error {
	leases, identities := true, true
	ctx, cancel := context.WithCancel(ctx)
	reconnected := ipam.Reconnected(ctx)
	defer func() {
		cancel()
		for range reconnected { //nolint:revive // it ends with its goroutine
		}
	}()
	for {
		if leases {
			released, err := c.Reconcile(ctx)
			leases = err != nil
			if released > 0 {
				c.log.Info("reconciled with ipam", "released", released)
			}
		}
		if identities {
			_, err := c.relabeller.Refresh(ctx)
			identities = err != nil
		}
		t := time.NewTimer(reconcileRetry)
		select {
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		case _, ok := <-reconnected:
			t.Stop()
			leases = leases || ok
		case <-t.C:
		}
		leases = leases || ipam.Err() != nil
		identities = identities || identity.Err() != nil || c.relabeller.RefreshDue()
	}
}

// claimUnconfirmed claims the addresses of live endpoints that sluice-ipam does not list as
// confirmed: it has lost its state and would lease the addresses to others, whose creation would
// fail.
func (c *Core) claimUnconfirmed(ctx context.Context, confirmed []workload.Owner) (claimed int, err error) {
	known := map[workload.Owner]bool{}
	for _, o := range confirmed {
		known[o] = true
	}
	var errs []error
	unclaimed := map[workload.Owner]error{}
	for _, r := range c.registry.live() {
		o := r.Spec.Owner
		if known[o] {
			continue
		}
		ok, err := c.claimAgain(ctx, o)
		if err != nil {
			errs = append(errs, err)
			unclaimed[o] = err
		}
		if ok {
			claimed++
		}
		if errors.Is(err, endpoint.ErrUnavailable) {
			break // the rest would fail, too
		}
	}
	c.registry.mu.Lock()
	c.unclaimed = unclaimed
	c.registry.mu.Unlock()
	return claimed, errors.Join(errs...)
}

func (c *Core) claimAgain(ctx context.Context, o workload.Owner) (bool, error) {
	leave, err := c.registry.locks.Lock(ctx, o)
	if err != nil {
		return false, err
	}
	defer leave()
	r, ok := c.registry.record(o)
	if !ok || r.Phase != endpoint.PhaseReady || r.BootID != c.cfg.BootID || c.registry.disconnecting(o) {
		return false, nil
	}
	if err := c.cfg.Leases.Claim(ctx, o, r.Spec.Addrs); err != nil {
		return false, fmt.Errorf("claim the addresses %v of %s again: %w", r.Spec.Addrs, o, err)
	}
	c.log.WarnContext(ctx, "addresses of a live endpoint claimed again, because ipam did not know them",
		"owner", o.String(), "addresses", r.Spec.Addrs)
	return true, nil
}

// Reconcile releases the confirmed addresses, and the identity, of owners without a record. Such
// owners exist only after a power failure: records are not synced, because what they describe does
// not outlive the boot. An owner is in a record before its lease is confirmed. So an owner that is
// in a listing of confirmed leases, but in no record afterwards, has no endpoint, unless an
// unreadable record may be the owner's. Owners of other managers are left alone.
//
// Addresses of live endpoints that sluice-ipam does not list are claimed again, because it has lost
// them.
func (c *Core) Reconcile(ctx context.Context) (released int, err error) {
	owners, others, err := c.cfg.Leases.Confirmed(ctx)
	if err != nil {
		return 0, fmt.Errorf("list confirmed addresses: %w", err)
	}
	_, cerr := c.claimUnconfirmed(ctx, slices.Concat(owners, others))
	errs := []error{cerr}
	for _, o := range owners {
		ok, err := c.releaseUnknown(ctx, o)
		if err != nil {
			errs = append(errs, err)
		}
		if ok {
			released++
		}
	}
	return released, errors.Join(errs...)
}

func (c *Core) releaseUnknown(ctx context.Context, o workload.Owner) (bool, error) {
	leave, err := c.registry.locks.Lock(ctx, o)
	if err != nil {
		return false, err
	}
	defer leave()
	if _, known := c.registry.record(o); known || c.registry.mayBeUnreadable(o) {
		return false, nil
	}
	if err := c.cfg.Identities.Release(ctx, o); err != nil {
		return false, fmt.Errorf("release the identity of %s: %w", o, err)
	}
	if err := c.cfg.Leases.Release(ctx, o); err != nil {
		return false, fmt.Errorf("release the addresses of %s: %w", o, err)
	}
	c.log.Info("addresses of an unknown owner released", "owner", o.String())
	return true, nil
}
