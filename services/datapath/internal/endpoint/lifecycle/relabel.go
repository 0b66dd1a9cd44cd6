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
	"sync/atomic"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Fault points between the steps of a change of identity. The changes of the kernel maps have fault
// points of their own.
var (
	faultRelabelTables = fault.Register("datapath/relabel/tables")
	faultRelabelRecord = fault.Register("datapath/relabel/record")
	faultRelabelDone   = fault.Register("datapath/relabel/done")
)

// Relabeller changes the identities of live endpoints: at the request of a caller, when the identity
// service announces another one, and after the service may have lost its state.
type Relabeller struct {
	cfg      *Config
	registry *registry // its mutex, mu, also guards the fields below
	resolver *resolver

	wishes   map[workload.Owner]wish // guarded by mu; identities that the identity service has announced
	wake     chan struct{}           // wakes Run
	relabels atomic.Uint64           // changes of identities
}

// Update is a caller's change of a live endpoint.
type Update struct {
	Owner workload.Owner
	// Manager of the caller. It must be the manager of the endpoint, if the endpoint has one.
	Manager string
	// Labels and Ports replace the endpoint's; nil keeps them.
	Labels *[]label.Label
	Ports  *[]workload.NamedPort
}

// Update changes the labels or named ports of a live endpoint, and with them its identity. It
// returns when the new identity is enforced; after an error the old one is. With validateOnly it
// changes nothing and returns the identity that the endpoint would have, with number 0 if that is
// not known yet.
func (l *Relabeller) Update(ctx context.Context, u Update, validateOnly bool) (endpoint.Endpoint, error) {
	if err := endpoint.ValidateOwner(u.Owner); err != nil {
		return endpoint.Endpoint{}, err
	}
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	leave, err := l.registry.locks.LockWith(ctx, u.Owner, abort)
	if err != nil {
		return endpoint.Endpoint{}, err
	}
	defer leave()
	r, ok := l.steady(u.Owner)
	switch {
	case !ok:
		return endpoint.Endpoint{}, fmt.Errorf("%s: %w", u.Owner, endpoint.ErrNotFound)
	case r.Spec.Manager != "" && u.Manager != r.Spec.Manager:
		return endpoint.Endpoint{}, fmt.Errorf("endpoint of %s: %w: it was created by %q, not by %q",
			u.Owner, endpoint.ErrForeign, r.Spec.Manager, u.Manager)
	case r.Identity.FromPod:
		return endpoint.Endpoint{}, fmt.Errorf("endpoint of %s: %w: change the labels of pod %s/%s instead",
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
		if next.Identity, err = l.cfg.Identities.Preview(ctx, wanted); err != nil {
			return endpoint.Endpoint{}, fmt.Errorf("resolve the identity: %w", err)
		}
		return l.registry.endpoint(next, endpoint.Ready), nil
	}
	if next.Identity, err = l.resolver.resolveNow(ctx, wanted); err == nil {
		err = l.relabel(ctx, r, next, false)
	}
	if err != nil {
		// The identity service may now hold a reference to the requested identity instead of the
		// endpoint's.
		l.resolver.refreshDue.Store(true)
		return endpoint.Endpoint{}, causeOf(ctx, err)
	}
	return l.registry.Get(u.Owner)
}

// causeOf adds the cause to err if ctx has ended.
func causeOf(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w (%w)", cause, err)
	}
	return err
}

// steady returns the record of a published endpoint of this boot that is neither being created nor
// deleted.
func (l *Relabeller) steady(o workload.Owner) (endpoint.Record, bool) {
	r, ok := l.registry.record(o)
	return r, ok && r.Phase == endpoint.PhaseReady && r.Slot != 0 && r.BootID == l.cfg.BootID &&
		!l.registry.disconnecting(o)
}

// relabel changes the identity of a live endpoint. It is the only place that does; the caller holds
// the owner's mutex. The steps:
//  1. Wait until the kernel has the tables of the identity, and other tables include the
//     identity. With isolate it does not wait for tables that exceed the capacity or are not
//     adopted yet: the endpoint is isolated in step 3 until they exist.
//  2. Save the record with the new identity. If the process is killed from here on, the next
//     one finds the difference between record and kernel, and starts again at step 1.
//  3. One store changes identity and tables of the endpoint, then the ipcache is updated.
//
// Until step 3 the endpoint is evaluated as before, also while the policy service is unavailable.
// isolate is set for changes that the identity service announces: the labels have changed, so the
// permissions of the old labels must end. A failed request of a caller leaves the endpoint
// unchanged, because the caller gets the error.
func (l *Relabeller) relabel(ctx context.Context, r, next endpoint.Record, isolate bool) error {
	o := r.Spec.Owner
	if r.Identity.Equal(next.Identity) && r.LastGiven().Equal(next.LastGiven()) && !l.registry.differs(o) {
		return nil
	}
	if err := l.prepare(ctx, next.Identity.Number, r.Identity.Number); err != nil && !(isolate && isolates(err)) {
		return err
	}
	if err := faultRelabelTables.Hit(ctx); err != nil {
		return err
	}
	if err := l.cfg.Records.Save(next); err != nil {
		return err
	}
	if next.Identity.Number == r.Identity.Number && !l.registry.differs(o) {
		l.registry.set(next, endpoint.Ready)
		return nil
	}
	// From here on the record has the new identity, so the change is either completed now or retried.
	l.registry.setDiffers(o, true)
	err := faultRelabelRecord.Hit(ctx)
	reason := ""
	switch {
	case err != nil:
	case isolate:
		reason, err = l.cfg.Maps.SetIdentityOrIsolate(ctx, r.Slot, next.Identity.Number)
	default:
		err = l.cfg.Maps.SetIdentity(ctx, r.Slot, next.Identity.Number)
	}
	if err != nil {
		// Restore the record of the enforced identity, so that a restart does not repeat the failed change.
		if serr := l.cfg.Records.Save(r); serr == nil && l.enforces(r) {
			l.registry.setDiffers(o, false)
		} else {
			l.registry.set(next, endpoint.Ready) // Run retries
			wake(l.wake)
		}
		return fmt.Errorf("identity %d of %s: %w", next.Identity.Number, o, err)
	}
	l.registry.setDiffers(o, false)
	l.registry.set(next, endpoint.Ready)
	l.relabels.Add(1)
	if reason != "" {
		l.cfg.Log.WarnContext(ctx, "endpoint isolated until the kernel has the tables of its identity",
			"owner", o.String(), "identity", next.Identity.Number, "reason", reason)
	}
	l.cfg.Log.InfoContext(ctx, "identity changed",
		"owner", o.String(), "old", r.Identity.Number, "new", next.Identity.Number)
	return faultRelabelDone.Hit(ctx)
}

// prepare returns when the kernel has the tables of an identity, if the identity changes.
func (l *Relabeller) prepare(ctx context.Context, identity, old uint32) error {
	if l.cfg.Policies == nil || identity == old {
		return nil
	}
	if err := l.cfg.Policies.Prepare(ctx, identity); err != nil {
		return fmt.Errorf("await the policy of identity %d: %w", identity, err)
	}
	return nil
}

// isolates reports whether prepare failed because the tables of an identity exceed the capacity of the maps, or because
// the policies are not adopted yet. If the policy service is unavailable, it returns false, because neither is known.
func isolates(err error) bool {
	return errors.Is(err, endpoint.ErrFull) || errors.Is(err, endpoint.ErrPoliciesHeld)
}

// enforces reports whether the maps have the identity of a record.
func (l *Relabeller) enforces(r endpoint.Record) bool {
	entries, err := l.cfg.Maps.Entries()
	return err == nil && slices.ContainsFunc(entries, func(e endpoint.Entry) bool {
		return e.Slot == r.Slot && e.Identity == r.Identity.Number
	})
}

// wish is an identity that an owner should have.
type wish struct {
	identity endpoint.Identity
	confirm  bool  // the identity service waits for Confirm
	err      error // why it is not enforced yet
}

// Wishes stores the identities that the identity service has announced for owners, and removes the
// withdrawn ones. Other owners keep theirs.
func (l *Relabeller) Wishes(wanted map[workload.Owner]endpoint.Identity, withdrawn map[workload.Owner]struct{}) {
	l.registry.mu.Lock()
	defer l.registry.mu.Unlock()
	for o := range withdrawn {
		delete(l.wishes, o)
	}
	for o, id := range wanted {
		l.wishes[o] = wish{identity: id, confirm: true}
	}
	wake(l.wake)
}

// OnlyWishesOf drops the announced identities of owners that are not listed.
func (l *Relabeller) OnlyWishesOf(listed map[workload.Owner]struct{}) {
	l.registry.mu.Lock()
	defer l.registry.mu.Unlock()
	maps.DeleteFunc(l.wishes, func(o workload.Owner, _ wish) bool { _, ok := listed[o]; return !ok })
}

// due returns the identity that an owner should have and may not have yet; false if no change is pending.
// mu is held.
func (l *Relabeller) due(o workload.Owner) (wish, bool) {
	w, ok := l.wishes[o]
	if _, differs := l.registry.differing[o]; differs && !ok {
		return wish{identity: l.registry.records[o].Identity}, true
	}
	return w, ok
}

// maxRelabels is the number of identities that change concurrently.
const maxRelabels = 8

// Run assigns the identities from Wishes to endpoints, and completes changes that a killed process recorded but
// did not make. It retries each until it succeeds, and returns when ctx ends.
func (l *Relabeller) Run(ctx context.Context) error {
	var work sync.WaitGroup
	defer work.Wait()
	places := make(chan struct{}, maxRelabels)
	pursued := map[workload.Owner]struct{}{} // guarded by mu
	for {
		l.registry.mu.Lock()
		owners := slices.AppendSeq(slices.Collect(maps.Keys(l.wishes)), maps.Keys(l.registry.differing))
		for _, o := range owners {
			if _, ok := pursued[o]; ok {
				continue
			}
			pursued[o] = struct{}{}
			work.Go(func() {
				l.pursue(ctx, o, places)
				l.registry.mu.Lock()
				delete(pursued, o)
				_, again := l.due(o)
				l.registry.mu.Unlock()
				if again {
					wake(l.wake)
				}
			})
		}
		l.registry.mu.Unlock()
		select {
		case <-l.wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// pursue retries until the owner's endpoint has the announced identity.
func (l *Relabeller) pursue(ctx context.Context, o workload.Owner, places chan struct{}) {
	for delay := l.cfg.RetryDelay; ; delay = min(2*delay, 50*l.cfg.RetryDelay) {
		l.registry.mu.Lock()
		w, ok := l.due(o)
		l.registry.mu.Unlock()
		if !ok {
			return
		}
		err := l.grant(ctx, o, w, places)
		if ctx.Err() != nil {
			return
		}
		l.registry.mu.Lock()
		if now, ok := l.wishes[o]; ok && now.identity.Equal(w.identity) {
			if now.err = err; err == nil {
				delete(l.wishes, o)
			} else {
				l.wishes[o] = now
			}
		}
		if _, ok := l.registry.differing[o]; ok {
			l.registry.differing[o] = err
		}
		l.registry.mu.Unlock()
		if err == nil {
			continue
		}
		if delay == l.cfg.RetryDelay {
			l.cfg.Log.WarnContext(ctx, "identity change is pending; the old identity stays enforced",
				"owner", o.String(), "identity", w.identity.Number, log.Err(err))
		}
		if pause(ctx, delay) != nil {
			return
		}
	}
}

// grant changes an endpoint's identity and confirms it to the identity service. It waits for the
// tables without the owner's mutex, which other calls may need.
func (l *Relabeller) grant(ctx context.Context, o workload.Owner, w wish, places chan struct{}) error {
	if r, ok := l.steady(o); ok && (r.Identity.Number != w.identity.Number || l.registry.differs(o)) {
		if err := l.prepare(ctx, w.identity.Number, 0); err != nil && !isolates(err) {
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
	leave, err := l.registry.locks.LockWith(ctx, o, abort)
	if err != nil {
		return err
	}
	defer leave()
	r, ok := l.steady(o)
	if !ok {
		l.registry.setDiffers(o, false)
		return nil // the endpoint is gone; the next one resolves its own identity
	}
	next := r
	if w.confirm { // otherwise the endpoint keeps the record's identity, which may have changed since
		next.Identity = w.identity
	}
	if err := l.relabel(ctx, r, next, true); err != nil {
		return causeOf(ctx, err)
	}
	if !w.confirm {
		return nil
	}
	return l.cfg.Identities.Confirm(ctx, o, w.identity.Number)
}

// waiting lists the endpoints that do not have their new identity yet and why, one line each. mu is
// held.
func (l *Relabeller) waiting() (lines []string) {
	add := func(o workload.Owner, number uint32, err error) {
		if r, ok := l.registry.records[o]; ok && r.Phase == endpoint.PhaseReady && err != nil {
			lines = append(lines, fmt.Sprintf("%s keeps its identity until it can change to %d: %v", o, number, err))
		}
	}
	for o, w := range l.wishes {
		add(o, w.identity.Number, w.err)
	}
	for o, err := range l.registry.differing {
		if _, ok := l.wishes[o]; !ok {
			add(o, l.registry.records[o].Identity.Number, err)
		}
	}
	slices.Sort(lines)
	return lines
}

// Refresh resolves the identity of every endpoint again, which renews the reference, and adopts a
// changed number: the identity service may have lost its state. It returns how many identities
// changed.
func (l *Relabeller) Refresh(ctx context.Context) (changed int, err error) {
	l.resolver.refreshDue.Store(false)
	defer func() {
		if err != nil {
			l.resolver.refreshDue.Store(true)
		}
	}()
	var errs []error
	for _, r := range l.registry.live() {
		ok, err := l.refresh(ctx, r.Spec.Owner)
		if errors.Is(err, endpoint.ErrUnavailable) && !errors.Is(err, endpoint.ErrPodUnknown) {
			return changed, err // the rest would fail, too
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

// RefreshDue reports whether an endpoint got its identity without the identity service, or the last
// Refresh was incomplete.
func (l *Relabeller) RefreshDue() bool { return l.resolver.refreshDue.Load() }

func (l *Relabeller) refresh(ctx context.Context, o workload.Owner) (bool, error) {
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	leave, err := l.registry.locks.LockWith(ctx, o, abort)
	if err != nil {
		return false, err
	}
	defer leave()
	r, ok := l.steady(o)
	if !ok {
		return false, nil
	}
	next := r
	next.Identity, err = l.resolver.resolveNow(ctx, r.Workload())
	if err == nil {
		err = l.relabel(ctx, r, next, true)
	}
	if err != nil && errors.Is(context.Cause(ctx), endpoint.ErrDeleted) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("identity of %s: %w", o, err)
	}
	return next.Identity.Number != r.Identity.Number, nil
}
