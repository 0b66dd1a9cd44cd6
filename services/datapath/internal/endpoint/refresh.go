// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	"github.com/sluice-net/sluice/model/workload"
)

// Refresh asks for the identity of every endpoint again, which renews the hold
// on it, and adopts a number that has changed. The service may have lost its
// state while it was away.
func (c *Core) Refresh(ctx context.Context) (changed int, err error) {
	c.refreshDue.Store(false)
	defer func() {
		if err != nil {
			c.refreshDue.Store(true)
		}
	}()
	var errs []error
	for _, r := range c.live() {
		ok, err := c.refresh(ctx, r.Spec.Owner)
		if errors.Is(err, ErrUnavailable) {
			return changed, err // the rest would fare no better
		}
		if err != nil {
			errs = append(errs, err)
		}
		if ok {
			changed++
		}
	}
	return changed, errors.Join(errs...)
}

// RefreshDue says whether an endpoint was given an identity while the service
// was away, or the last Refresh was incomplete.
func (c *Core) RefreshDue() bool { return c.refreshDue.Load() }

func (c *Core) refresh(ctx context.Context, o workload.Owner) (bool, error) {
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	leave, err := c.turns.LockWith(ctx, o, abort)
	if err != nil {
		return false, err
	}
	defer leave()
	r, ok := c.record(o)
	if !ok || r.Phase != PhaseReady || r.Slot == 0 {
		// without a slot its deletion, or its repair, is half done
		return false, nil
	}
	id, err := c.cfg.Identities.Resolve(ctx, r.Spec)
	if err != nil {
		return false, fmt.Errorf("resolve the identity of %s: %w", o, err)
	}
	if reflect.DeepEqual(id, r.Identity) {
		return false, nil
	}
	old := r.Identity.Number
	if c.cfg.Policies != nil && id.Number != old {
		if err := c.cfg.Policies.Await(ctx, id.Number); err != nil {
			if errors.Is(context.Cause(ctx), ErrDeleted) {
				return false, nil
			}
			return false, fmt.Errorf("await the policy of identity %d of %s: %w", id.Number, o, err)
		}
	}
	r.Identity = id
	// the record first: a process killed here finds by it what the maps lack
	if err := c.cfg.Records.Save(r); err != nil {
		return false, err
	}
	c.set(r, Ready)
	if id.Number == old {
		return false, nil
	}
	if err := c.cfg.Maps.SetIdentity(r.Slot, id.Number); err != nil {
		return false, fmt.Errorf("identity %d of %s: %w", id.Number, o, err)
	}
	c.log.InfoContext(ctx, "identity changed", "owner", o.String(), "old", old, "new", id.Number)
	return true, nil
}
