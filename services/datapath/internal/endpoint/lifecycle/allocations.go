// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Fault points between the steps of a release.
var (
	faultReleaseIdentity = fault.Register("datapath/delete/release-identity")
	faultReleaseLease    = fault.Register("datapath/delete/release-lease")
	faultForget          = fault.Register("datapath/delete/forget")
)

// Allocations makes the addresses and identities of owners in other services match the records. It releases addresses
// and identities of deleted and unknown owners, and claims addresses of live endpoints that sluice-ipam has lost.
type Allocations struct {
	cfg        *Config
	registry   *registry // its mutex, mu, also guards the fields below
	relabeller *Relabeller

	unclaimed map[workload.Owner]error // guarded by mu; live endpoints that ipam refuses to confirm again

	wake      chan struct{} // wakes Releases
	releasing atomic.Bool   // the release of an owner failed and will be retried
}

// maxReleases is the number of owners released concurrently.
const maxReleases = 8

// Releases releases the addresses and identities of deleted endpoints, with retries. It returns
// when ctx ends.
func (a *Allocations) Releases(ctx context.Context) error {
	delay := a.cfg.RetryDelay
	for {
		err := a.releaseAll(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err == nil {
			a.releasing.Store(false)
			delay = a.cfg.RetryDelay
			select {
			case <-a.wake:
			case <-ctx.Done():
				return ctx.Err()
			}
			continue
		}
		if !a.releasing.Swap(true) {
			a.cfg.Log.Warn("release of deleted endpoints failed, trying again",
				"pending", len(a.registry.tombstones()), log.Err(err))
		}
		if err := pause(ctx, delay); err != nil {
			return err
		}
		delay = min(2*delay, 100*a.cfg.RetryDelay)
	}
}

func (a *Allocations) releaseAll(ctx context.Context) error {
	var g errgroup.Group
	g.SetLimit(maxReleases)
	for _, o := range a.registry.tombstones() {
		g.Go(func() error { return a.release(ctx, o) })
	}
	return g.Wait()
}

// release releases the address and the identity of a deleted owner, the identity first: while
// sluice-ipam knows the owner, the reconciliation finds an identity that was not released.
func (a *Allocations) release(ctx context.Context, o workload.Owner) error {
	leave, err := a.registry.locks.Lock(ctx, o)
	if err != nil {
		return err
	}
	defer leave()
	if r, ok := a.registry.record(o); !ok || r.Phase != endpoint.PhaseDeleted {
		return nil // a new creation has taken over the lease and the reference
	}
	if err := a.cfg.Identities.Release(ctx, o); err != nil {
		return fmt.Errorf("release the identity of %s: %w", o, err)
	}
	if err := faultReleaseIdentity.Hit(ctx); err != nil {
		return err
	}
	if err := a.cfg.Leases.Release(ctx, o); err != nil {
		return fmt.Errorf("release the addresses of %s: %w", o, err)
	}
	if err := faultReleaseLease.Hit(ctx); err != nil {
		return err
	}
	if err := a.cfg.Records.Remove(o); err != nil {
		return fmt.Errorf("remove the tombstone of %s: %w", o, err)
	}
	a.registry.forget(o)
	return faultForget.Hit(ctx)
}

// reconcileRetry is the pause after a failed reconciliation with sluice-ipam.
const reconcileRetry = time.Second

// ReconcileLoop reconciles sluice-ipam's allocations and the identities with the records once the
// services answer, and again after each time one was unavailable, because it may have lost state.
// It returns when ctx ends.
func (a *Allocations) ReconcileLoop(ctx context.Context, ipam endpoint.Connection, identity endpoint.Service) error {
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
			released, err := a.Reconcile(ctx)
			leases = err != nil
			if released > 0 {
				a.cfg.Log.Info("reconciled with ipam", "released", released)
			}
		}
		if identities {
			_, err := a.relabeller.Refresh(ctx)
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
		identities = identities || identity.Err() != nil || a.relabeller.RefreshDue()
	}
}

// claimUnconfirmed claims the addresses of live endpoints that sluice-ipam does not list as
// confirmed: it has lost its state and would lease the addresses to others, whose creation would
// fail.
func (a *Allocations) claimUnconfirmed(ctx context.Context, confirmed []workload.Owner) (claimed int, err error) {
	known := map[workload.Owner]bool{}
	for _, o := range confirmed {
		known[o] = true
	}
	var errs []error
	unclaimed := map[workload.Owner]error{}
	for _, r := range a.registry.live() {
		o := r.Spec.Owner
		if known[o] {
			continue
		}
		ok, err := a.claimAgain(ctx, o)
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
	a.registry.mu.Lock()
	a.unclaimed = unclaimed
	a.registry.mu.Unlock()
	return claimed, errors.Join(errs...)
}

func (a *Allocations) claimAgain(ctx context.Context, o workload.Owner) (bool, error) {
	leave, err := a.registry.locks.Lock(ctx, o)
	if err != nil {
		return false, err
	}
	defer leave()
	r, ok := a.registry.record(o)
	if !ok || r.Phase != endpoint.PhaseReady || r.BootID != a.cfg.BootID || a.registry.disconnecting(o) {
		return false, nil
	}
	if err := a.cfg.Leases.Claim(ctx, o, r.Spec.Addrs); err != nil {
		return false, fmt.Errorf("claim the addresses %v of %s again: %w", r.Spec.Addrs, o, err)
	}
	a.cfg.Log.WarnContext(ctx, "addresses of a live endpoint claimed again, because ipam did not know them",
		"owner", o.String(), "addresses", r.Spec.Addrs)
	return true, nil
}

// Reconcile releases the confirmed addresses, and the identity, of owners without a record. Such owners exist only
// after a power failure: records are not synced to disk, because the kernel state that they describe ends with the
// boot. An owner is in a record before its lease is confirmed. So an owner has no endpoint if a listing of confirmed
// leases contains it and the records, read afterwards, do not. The exception is an owner to whom an unreadable record
// may belong. Owners of other managers are left alone.
//
// Addresses of live endpoints that sluice-ipam does not list are claimed again, because it has lost
// them.
func (a *Allocations) Reconcile(ctx context.Context) (released int, err error) {
	owners, others, err := a.cfg.Leases.Confirmed(ctx)
	if err != nil {
		return 0, fmt.Errorf("list confirmed addresses: %w", err)
	}
	_, cerr := a.claimUnconfirmed(ctx, slices.Concat(owners, others))
	errs := []error{cerr}
	for _, o := range owners {
		ok, err := a.releaseUnknown(ctx, o)
		if err != nil {
			errs = append(errs, err)
		}
		if ok {
			released++
		}
	}
	return released, errors.Join(errs...)
}

func (a *Allocations) releaseUnknown(ctx context.Context, o workload.Owner) (bool, error) {
	leave, err := a.registry.locks.Lock(ctx, o)
	if err != nil {
		return false, err
	}
	defer leave()
	if _, known := a.registry.record(o); known || a.registry.mayBeUnreadable(o) {
		return false, nil
	}
	if err := a.cfg.Identities.Release(ctx, o); err != nil {
		return false, fmt.Errorf("release the identity of %s: %w", o, err)
	}
	if err := a.cfg.Leases.Release(ctx, o); err != nil {
		return false, fmt.Errorf("release the addresses of %s: %w", o, err)
	}
	a.cfg.Log.Info("addresses of an unknown owner released", "owner", o.String())
	return true, nil
}
