// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// The places between the steps of a change of identity; the kernel's own steps have
// points of their own.
var (
	faultRelabelTables = fault.Register("datapath/relabel/tables")
	faultRelabelRecord = fault.Register("datapath/relabel/record")
	faultRelabelDone   = fault.Register("datapath/relabel/done")
)

// Update is what a caller wants changed of a live endpoint.
type Update struct {
	Owner workload.Owner
	// Manager of the caller. It must be that of the endpoint, if that has one.
	Manager string
	// Labels and Ports replace what the endpoint has; nil leaves it.
	Labels *[]label.Label
	Ports  *[]workload.NamedPort
}

// Update gives a live endpoint other labels or named ports, and with them another
// identity. It returns when that is enforced; after an error the endpoint is
// enforced as before. With validateOnly it changes nothing and says the identity
// that the endpoint would have, with number 0 if that is not known yet.
func (c *Core) Update(ctx context.Context, u Update, validateOnly bool) (endpoint.Endpoint, error) {
	if err := endpoint.ValidateOwner(u.Owner); err != nil {
		return endpoint.Endpoint{}, err
	}
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	leave, err := c.turns.LockWith(ctx, u.Owner, abort)
	if err != nil {
		return endpoint.Endpoint{}, err
	}
	defer leave()
	r, ok := c.steady(u.Owner)
	switch {
	case !ok:
		return endpoint.Endpoint{}, fmt.Errorf("%s: %w", u.Owner, endpoint.ErrNotFound)
	case r.Spec.Manager != "" && u.Manager != r.Spec.Manager:
		return endpoint.Endpoint{}, fmt.Errorf("endpoint of %s: %w: %q made it, not %q",
			u.Owner, endpoint.ErrForeign, r.Spec.Manager, u.Manager)
	case r.Identity.FromPod:
		return endpoint.Endpoint{}, fmt.Errorf("endpoint of %s: %w: change those of pod %s/%s",
			u.Owner, endpoint.ErrLabelsOfPod, r.Spec.Pod.Namespace, r.Spec.Pod.Name)
	}
	given := r.LastGiven()
	if u.Labels != nil {
		given.Labels = *u.Labels
	}
	if u.Ports != nil {
		given.Ports = *u.Ports
	}
	wanted := given.In(r.Spec)
	next := r
	if !slices.Equal(wanted.Labels, r.Spec.Labels) || !slices.Equal(wanted.Ports, r.Spec.Ports) || r.Given != nil {
		next.Given = &endpoint.Given{Labels: wanted.Labels, Ports: wanted.Ports}
	}
	if validateOnly {
		if next.Identity, err = c.cfg.Identities.Preview(ctx, wanted); err != nil {
			return endpoint.Endpoint{}, fmt.Errorf("resolve the identity: %w", err)
		}
		return c.endpoint(next, endpoint.Ready), nil
	}
	if next.Identity, err = c.resolveNow(ctx, wanted); err == nil {
		err = c.relabel(ctx, r, next, false)
	}
	if err != nil {
		// Perhaps the identity service holds what was wanted and no longer what the
		// endpoint has.
		c.refreshDue.Store(true)
		return endpoint.Endpoint{}, causeOf(ctx, err)
	}
	return c.Get(u.Owner)
}

// causeOf is err with what ended ctx, if that ended.
func causeOf(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w (%w)", cause, err)
	}
	return err
}

// steady is the record of an endpoint that is neither made nor deleted now, of
// this boot and published.
func (c *Core) steady(o workload.Owner) (endpoint.Record, bool) {
	r, ok := c.record(o)
	return r, ok && r.Phase == endpoint.PhaseReady && r.Slot != 0 && r.BootID == c.cfg.BootID && !c.disconnecting(o)
}

// relabel makes the record of a live endpoint, and with it what evaluates the
// endpoint, another one. It is the one place where that happens; the caller has the
// owner's turn. In this order:
//
//  1. the tables of the identity are in the kernel, and other tables know it. With
//     isolate, tables that cannot be made or are not taken over are not waited for: the
//     endpoint is isolated at 3 until they are there;
//  2. the record says the identity. A process that is killed from here on finds that
//     record and kernel differ, and goes on at 1;
//  3. one store changes identity and tables of the endpoint, then the ipcache follows.
//
// Until 3 the endpoint is evaluated as before, also while the policy service is away.
// isolate is set for changes that the identity service announces: it has seen that the
// labels changed, so the rights of the former ones must end. A request of a caller leaves
// the endpoint as it was when it fails, because the caller gets the error.
func (c *Core) relabel(ctx context.Context, r, next endpoint.Record, isolate bool) error {
	o := r.Spec.Owner
	if r.Identity.Equal(next.Identity) && r.LastGiven().Equal(next.LastGiven()) && !c.differs(o) {
		return nil
	}
	if err := c.prepare(ctx, next.Identity.Number, r.Identity.Number); err != nil && !(isolate && isolates(err)) {
		return err
	}
	if err := faultRelabelTables.Hit(ctx); err != nil {
		return err
	}
	if err := c.cfg.Records.Save(next); err != nil {
		return err
	}
	if next.Identity.Number == r.Identity.Number && !c.differs(o) {
		c.set(next, endpoint.Ready)
		return nil
	}
	// From here on it is done, or done again: the record says so.
	c.setDiffers(o, true)
	err := faultRelabelRecord.Hit(ctx)
	reason := ""
	switch {
	case err != nil:
	case isolate:
		reason, err = c.cfg.Maps.SetIdentityOrIsolate(ctx, r.Slot, next.Identity.Number)
	default:
		err = c.cfg.Maps.SetIdentity(ctx, r.Slot, next.Identity.Number)
	}
	if err != nil {
		// The record that is enforced, so that what failed stays undone.
		if serr := c.cfg.Records.Save(r); serr == nil && c.enforces(r) {
			c.setDiffers(o, false)
		} else {
			c.set(next, endpoint.Ready) // Relabels goes on
			wake(c.wakeRelabels)
		}
		return fmt.Errorf("identity %d of %s: %w", next.Identity.Number, o, err)
	}
	c.setDiffers(o, false)
	c.set(next, endpoint.Ready)
	c.relabels.Add(1)
	if reason != "" {
		c.log.WarnContext(ctx, "an endpoint is isolated until the tables of its identity are there",
			"owner", o.String(), "identity", next.Identity.Number, "reason", reason)
	}
	c.log.InfoContext(ctx, "identity changed",
		"owner", o.String(), "old", r.Identity.Number, "new", next.Identity.Number)
	return faultRelabelDone.Hit(ctx)
}

// prepare returns when the tables of an identity are in the kernel, if it is
// another one than the endpoint has.
func (c *Core) prepare(ctx context.Context, identity, old uint32) error {
	if c.cfg.Policies == nil || identity == old {
		return nil
	}
	if err := c.cfg.Policies.Prepare(ctx, identity); err != nil {
		return fmt.Errorf("await the policy of identity %d: %w", identity, err)
	}
	return nil
}

// isolates reports whether an error of prepare says that the tables of an identity cannot
// be made, or are not taken over. While the policy service is away it says neither.
func isolates(err error) bool {
	return errors.Is(err, endpoint.ErrFull) || errors.Is(err, endpoint.ErrPoliciesHeld)
}

// enforces says whether the maps have the identity of a record.
func (c *Core) enforces(r endpoint.Record) bool {
	entries, err := c.cfg.Maps.Entries()
	return err == nil && slices.ContainsFunc(entries, func(e endpoint.Entry) bool {
		return e.Slot == r.Slot && e.Identity == r.Identity.Number
	})
}

func (c *Core) differs(o workload.Owner) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, ok := c.differing[o]
	return ok
}

// setDiffers notes whether the maps may have another identity than the record.
func (c *Core) setDiffers(o workload.Owner, differs bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.differing[o]; !differs {
		delete(c.differing, o)
	} else if !ok {
		c.differing[o] = nil
	}
}

// wish is an identity that an owner shall have.
type wish struct {
	identity endpoint.Identity
	confirm  bool  // the identity service waits for Confirm
	err      error // why it is not enforced yet
}

// Wishes takes what the identity service wants owners to be; an owner in neither
// map keeps what was wanted of it.
func (c *Core) Wishes(wanted map[workload.Owner]endpoint.Identity, withdrawn map[workload.Owner]struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for o := range withdrawn {
		delete(c.wishes, o)
	}
	for o, id := range wanted {
		c.wishes[o] = wish{identity: id, confirm: true}
	}
	wake(c.wakeRelabels)
}

// OnlyWishesOf forgets what is wanted of owners that are not listed.
func (c *Core) OnlyWishesOf(listed map[workload.Owner]struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.wishes, func(o workload.Owner, _ wish) bool { _, ok := listed[o]; return !ok })
}

// due is what an owner shall be and is not known to be; false if there is nothing.
// mu is held.
func (c *Core) due(o workload.Owner) (wish, bool) {
	w, ok := c.wishes[o]
	if _, differs := c.differing[o]; differs && !ok {
		return wish{identity: c.records[o].Identity}, true
	}
	return w, ok
}

// maxRelabels is how many identities change at the same time.
const maxRelabels = 8

// Relabels has endpoints be what Wishes wants, and what the records say if a killed
// process did not come to that, each again and again until it succeeds. It returns
// when ctx ends.
func (c *Core) Relabels(ctx context.Context) error {
	var work sync.WaitGroup
	defer work.Wait()
	places := make(chan struct{}, maxRelabels)
	pursued := map[workload.Owner]struct{}{} // guarded by mu
	for {
		c.mu.Lock()
		owners := slices.AppendSeq(slices.Collect(maps.Keys(c.wishes)), maps.Keys(c.differing))
		for _, o := range owners {
			if _, ok := pursued[o]; ok {
				continue
			}
			pursued[o] = struct{}{}
			work.Go(func() {
				c.pursue(ctx, o, places)
				c.mu.Lock()
				delete(pursued, o)
				_, again := c.due(o)
				c.mu.Unlock()
				if again {
					wake(c.wakeRelabels)
				}
			})
		}
		c.mu.Unlock()
		select {
		case <-c.wakeRelabels:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// pursue tries until nothing is wanted of the owner any more.
func (c *Core) pursue(ctx context.Context, o workload.Owner, places chan struct{}) {
	for delay := c.cfg.RetryDelay; ; delay = min(2*delay, 50*c.cfg.RetryDelay) {
		c.mu.Lock()
		w, ok := c.due(o)
		c.mu.Unlock()
		if !ok {
			return
		}
		err := c.grant(ctx, o, w, places)
		if ctx.Err() != nil {
			return
		}
		c.mu.Lock()
		if now, ok := c.wishes[o]; ok && now.identity.Equal(w.identity) {
			if now.err = err; err == nil {
				delete(c.wishes, o)
			} else {
				c.wishes[o] = now
			}
		}
		if _, ok := c.differing[o]; ok {
			c.differing[o] = err
		}
		c.mu.Unlock()
		if err == nil {
			continue
		}
		if delay == c.cfg.RetryDelay {
			c.log.WarnContext(ctx, "change of identity waits, the old one is enforced",
				"owner", o.String(), "identity", w.identity.Number, log.Err(err))
		}
		if pause(ctx, delay) != nil {
			return
		}
	}
}

// grant gives an owner's endpoint an identity and says so to the identity service.
// It waits for the tables without the owner's turn, which others may need.
func (c *Core) grant(ctx context.Context, o workload.Owner, w wish, places chan struct{}) error {
	if r, ok := c.steady(o); ok && (r.Identity.Number != w.identity.Number || c.differs(o)) {
		if err := c.prepare(ctx, w.identity.Number, 0); err != nil && !isolates(err) {
			return err
		}
	}
	select {
	case places <- struct{}{}:
		defer func() { <-places }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	leave, err := c.turns.LockWith(ctx, o, abort)
	if err != nil {
		return err
	}
	defer leave()
	r, ok := c.steady(o)
	if !ok {
		c.setDiffers(o, false)
		return nil // it is gone; another one asks for its identity
	}
	next := r
	if w.confirm { // else the record says it, which may have changed since
		next.Identity = w.identity
	}
	if err := c.relabel(ctx, r, next, true); err != nil {
		return causeOf(ctx, err)
	}
	if !w.confirm {
		return nil
	}
	return c.cfg.Identities.Confirm(ctx, o, w.identity.Number)
}

// waiting lists the endpoints that shall have another identity and why they do not
// yet, one line each. mu is held.
func (c *Core) waiting() (lines []string) {
	add := func(o workload.Owner, number uint32, err error) {
		if r, ok := c.records[o]; ok && r.Phase == endpoint.PhaseReady && err != nil {
			lines = append(lines, fmt.Sprintf("%s keeps its identity and waits to be %d: %v", o, number, err))
		}
	}
	for o, w := range c.wishes {
		add(o, w.identity.Number, w.err)
	}
	for o, err := range c.differing {
		if _, ok := c.wishes[o]; !ok {
			add(o, c.records[o].Identity.Number, err)
		}
	}
	slices.Sort(lines)
	return lines
}
