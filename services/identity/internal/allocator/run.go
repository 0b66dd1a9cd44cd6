// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/identity"
)

// writers is how many references are written at once after a reconnect.
const writers = 8

// Run keeps session, mirror, references and cache until ctx is done, and
// returns nil then. It is called once.
func (a *Allocator) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { a.runSession(ctx) })
	wg.Go(func() { a.runFollow(ctx) })
	wg.Go(func() { a.runKnown(ctx) })
	wg.Go(func() { a.runRecords(ctx) })
	wg.Go(func() { a.runCollect(ctx) })
	wg.Go(func() { a.runNumbers(ctx) })
	wg.Wait()
	return nil
}

// pause sleeps between two attempts; it doubles up to RetryMax.
func (a *Allocator) pause(ctx context.Context, d *time.Duration) {
	*d = min(max(2**d, a.cfg.RetryMin), a.cfg.RetryMax)
	select {
	case <-time.After(*d/2 + rand.N(*d)): // not all nodes at once
	case <-ctx.Done():
	}
}

func (a *Allocator) runFollow(ctx context.Context) {
	var wait time.Duration
	for ctx.Err() == nil {
		began := time.Now()
		err := a.store.Follow(ctx, a.observe)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > a.cfg.RetryMax {
			wait = 0
		}
		if errors.Is(err, ErrUnavailable) {
			a.cfg.Log.Debug("following the store", log.Err(err))
		} else {
			a.cfg.Log.Error("following the store", log.Err(err))
		}
		a.pause(ctx, &wait)
	}
}

// runKnown writes the cache, gathering changes; the first listing at once, and
// the last changes at the end.
func (a *Allocator) runKnown(ctx context.Context) {
	delay := a.cfg.KnownDelay
	if a.uncached {
		delay = 0
	}
	save := func() {
		if err := a.saveKnown(); err != nil {
			a.cfg.Log.Error("the cache of identities was not written; it is tried again with the next change", log.Err(err))
			return
		}
		delay = a.cfg.KnownDelay
	}
	for {
		select {
		case <-ctx.Done():
			if ready, _ := a.Ready(); ready {
				save()
			}
			return
		case <-a.mirror.dirty:
		}
		select {
		case <-time.After(delay):
		case <-ctx.Done():
		}
		// An unfinished listing must not be taken for the cluster.
		if ready, _ := a.Ready(); ready {
			save()
		}
	}
}

// recordsAgain is the pause after records that could not be written.
const recordsAgain = time.Second

// runRecords retries writes that a full disk refused, so that the reported state of the disk is current even without
// calls.
func (a *Allocator) runRecords(ctx context.Context) {
	for {
		select {
		case <-a.unwritten:
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(recordsAgain):
		case <-ctx.Done():
			return
		}
		_ = a.saver.wait(ctx) // noteRecords has its error
	}
}

// noteRecords notes how a write of the records ended.
func (a *Allocator) noteRecords(err error) {
	a.mu.Lock(opSave)
	defer a.mu.Unlock()
	a.available.disk(err)
	if err != nil {
		select {
		case a.unwritten <- struct{}{}:
		default:
		}
	}
}

func (a *Allocator) runSession(ctx context.Context) {
	var wait time.Duration
	first := true
	for ctx.Err() == nil {
		began := time.Now()
		err := a.session(ctx, &first)
		if ctx.Err() != nil {
			return
		}
		a.disconnected(err)
		if time.Since(began) > a.cfg.RetryMax {
			wait = 0
		}
		a.pause(ctx, &wait)
	}
}

// disconnected notes that there is no session, and logs it once.
func (a *Allocator) disconnected(err error) {
	a.mu.Lock(opSession)
	defer a.mu.Unlock()
	switch isNew := a.available.down(err); {
	case !isNew:
	case errors.Is(err, ErrNameTaken):
		a.cfg.Log.Error("another node owns this node's name; label sets get no numbers on this node", log.Err(err))
	default:
		a.cfg.Log.Warn("the store is unavailable; known label sets are still answered", "endpoints", a.store.Endpoints(),
			log.Err(err))
	}
}

// noSpace notes that the store accepts no writes, and logs it once.
func (a *Allocator) noSpace(err error) {
	a.mu.Lock(opSession)
	defer a.mu.Unlock()
	if a.available.space(err) {
		a.cfg.Log.Error("the store has no space: new label sets get no number until its operator frees space",
			"endpoints", a.store.Endpoints(), log.Err(err))
	}
}

// reconnected notes that there is a session whose references equal the holds.
func (a *Allocator) reconnected() {
	a.mu.Lock(opSession)
	defer a.mu.Unlock()
	a.available.up()
}

// Connected reports whether there is a session whose references equal the holds; the channel is closed when that may
// have changed.
func (a *Allocator) Connected() (bool, <-chan struct{}) {
	a.mu.Lock(opRead)
	defer a.mu.Unlock()
	return a.available.connected, a.available.changed
}

// alive asks the store about the session. A claim that began in an earlier session may have reported the present one
// as lost; the store's answer decides.
func (a *Allocator) alive(ctx context.Context) error {
	if err := a.bounded(ctx, a.store.Ping); err != nil {
		return err
	}
	a.reconnected()
	return nil
}

// within runs a method of the store for at most StoreTimeout.
func within[T any](ctx context.Context, a *Allocator, f func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, a.cfg.StoreTimeout)
	defer cancel()
	return f(ctx)
}

// bounded runs one request to the store.
func (a *Allocator) bounded(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, a.cfg.StoreTimeout)
	defer cancel()
	return f(ctx)
}

// session joins the store, makes its references equal to the holds, and keeps them equal until the session fails. This
// node neither claims nor collects before they are equal.
func (a *Allocator) session(ctx context.Context, first *bool) error {
	fresh, err := within(ctx, a, a.store.Join)
	if err != nil {
		return err
	}
	a.mu.Lock(opSession)
	if session := a.store.Session(); session != a.joined {
		a.joined = session
		a.saver.dirty()
	}
	a.mu.Unlock()
	if err := a.saver.wait(ctx); err != nil {
		a.cfg.Log.Error("the session was not written; the next process begins a new one and writes all references again", log.Err(err))
	}
	if fresh {
		a.mu.Lock(opSession)
		for _, h := range a.held.byNumber {
			h.ref = 0
		}
		clear(a.releases.due) // they went with the session, or are found below
		a.mu.Unlock()
	}
	select {
	case <-a.lost: // of the session before
	default:
	}
	// In a new process no claim is under way: references without a hold were left behind by the former process.
	if err := a.reconcile(ctx, *first); err != nil {
		return err
	}
	if err := a.flush(ctx); err != nil {
		return err
	}
	*first = false
	a.mu.Lock(opSession)
	a.sessions++
	a.mu.Unlock()
	a.reconnected()
	a.mu.Lock(opSession)
	held := len(a.held.byNumber)
	a.mu.Unlock()
	a.cfg.Log.Info("store session is up", "endpoints", a.store.Endpoints(), "held", held, "new_session", fresh)

	var watcher sync.WaitGroup
	defer watcher.Wait()
	watching, stop := context.WithCancel(ctx)
	defer stop()
	severed := make(chan error, 1)
	watcher.Go(func() { severed <- a.store.Severed(watching) })
	heartbeat := time.NewTicker(a.cfg.Heartbeat)
	defer heartbeat.Stop()
	compare := time.NewTicker(a.cfg.Reconcile)
	defer compare.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err = <-a.lost:
			if errors.Is(err, ErrUnavailable) {
				// The caller's deadline may have been short; ask the store without it.
				err = a.alive(ctx)
			}
		case <-heartbeat.C:
			err = a.alive(ctx)
		case err = <-severed:
		case <-a.kick:
			err = a.flush(ctx)
		case <-compare.C:
			if err = a.reconcile(ctx, false); err == nil {
				err = a.flush(ctx)
			}
		}
		if err != nil {
			return err
		}
	}
}

// reconcile compares the references in the store with the holds. A reference without a hold is removed if strict is
// set, and otherwise if the last comparison saw it too, unchanged: a claim may be under way.
func (a *Allocator) reconcile(ctx context.Context, strict bool) error {
	refs, err := within(ctx, a, a.store.References)
	if err != nil {
		return err
	}
	have := make(map[identity.Numeric]int64, len(refs))
	present := make(map[identity.Numeric]bool, len(refs))
	for _, r := range refs {
		have[r.Number], present[r.Number] = r.Revision, r.Present
	}
	a.mu.Lock(opCompare)
	defer a.mu.Unlock()
	a.releases.compare(refs, strict, a.held.has)
	for n, h := range a.held.byNumber {
		if n.Scope() != identity.ScopeCluster {
			continue
		}
		switch {
		case h.ref != 0 && have[n] == 0:
			h.ref = 0
		case h.ref == 0 && present[n]:
			// The reference was there for the whole lifetime of its session, so the number was never collected and
			// need not be written again.
			if e, ok := a.mirror.known[n]; ok && !e.gone && e.labels.Text() == h.labels.Text() {
				h.ref = have[n]
			}
		}
	}
	return nil
}

// flush writes missing references and removes due ones.
func (a *Allocator) flush(ctx context.Context) error {
	a.mu.Lock(opReferences)
	var restore []identity.Identity
	for n, h := range a.held.byNumber {
		if n.Scope() == identity.ScopeCluster && h.ref == 0 {
			restore = append(restore, identity.Identity{Number: n, Labels: h.labels})
		}
	}
	release := a.releases.list()
	a.mu.Unlock()

	slices.SortFunc(restore, identity.Compare)
	slices.SortFunc(release, func(x, y Reference) int { return cmp.Compare(x.Number, y.Number) })
	restore, err := a.renew(ctx, restore)
	if err != nil {
		return err
	}
	var work []func(context.Context) error
	for _, id := range restore {
		work = append(work, func(ctx context.Context) error { return a.restore(ctx, id) })
	}
	for refs := range slices.Chunk(release, flushStep) {
		work = append(work, func(ctx context.Context) error { return a.drop(ctx, refs) })
	}
	err = inParallel(ctx, writers, work)
	// A conflict may have moved holders to another identity. Their endpoints are published only after the holders are
	// written.
	if err := a.saver.wait(ctx); err != nil {
		a.cfg.Log.Error("the holders were not written; the next change tries again", log.Err(err))
	}
	return err
}

// flushStep is how many references are written or dropped within the time of
// one request.
const flushStep = 256

// renew writes the references of many held identities at once, and returns the identities that must be restored one by
// one.
func (a *Allocator) renew(ctx context.Context, ids []identity.Identity) (left []identity.Identity, err error) {
	if len(ids) < 2 {
		return ids, nil
	}
	for step := range slices.Chunk(ids, flushStep) {
		claims, err := within(ctx, a, func(ctx context.Context) ([]Claim, error) { return a.store.Renew(ctx, step) })
		written := make(map[identity.Numeric]Claim, len(claims))
		for _, c := range claims {
			written[c.Number] = c
		}
		for _, id := range step {
			if c, ok := written[id.Number]; ok {
				a.restored(id, c)
			} else {
				left = append(left, id)
			}
		}
		if errors.Is(err, ErrNoSpace) {
			a.noSpace(err)
			return nil, nil // the others would not be written either
		}
		if err != nil {
			return nil, fmt.Errorf("restore %d identities: %w", len(step), err)
		}
	}
	return left, nil
}

// inParallel runs work with at most n at a time. After the first error, which it returns, it starts no more.
func inParallel(ctx context.Context, n int, work []func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan func(context.Context) error)
	var wg sync.WaitGroup
	for range min(n, len(work)) {
		wg.Go(func() {
			for f := range next {
				if err := f(ctx); err != nil {
					cancel(err)
				}
			}
		})
	}
feed:
	for _, f := range work {
		select {
		case next <- f:
		case <-ctx.Done():
			break feed
		}
	}
	close(next)
	wg.Wait()
	return context.Cause(ctx)
}

// drop releases references in the store.
func (a *Allocator) drop(ctx context.Context, refs []Reference) error {
	if err := faultReleaseStore.Hit(ctx); err != nil {
		return err
	}
	if err := a.bounded(ctx, func(ctx context.Context) error { return a.store.Release(ctx, refs...) }); err != nil {
		return fmt.Errorf("release %d identities: %w", len(refs), err)
	}
	if err := faultReleasedStore.Hit(ctx); err != nil {
		return err
	}
	a.mu.Lock(opReferences)
	defer a.mu.Unlock()
	a.releases.done(refs)
	return nil
}

// restore writes the reference of one held identity.
func (a *Allocator) restore(ctx context.Context, id identity.Identity) error {
	claim, err := within(ctx, a, func(ctx context.Context) (Claim, error) { return a.store.Restore(ctx, id) })
	if conflict, ok := errors.AsType[*ConflictError](err); ok {
		err = a.resolve(ctx, conflict)
		if err == nil {
			return nil
		}
	}
	switch {
	case err == nil:
	case errors.Is(err, ErrNoSpace):
		a.noSpace(err) // no reason to end the session; tried again at the next comparison
		return nil
	case errors.Is(err, ErrUnavailable), errors.Is(err, ErrSessionLost), ctx.Err() != nil:
		return fmt.Errorf("restore %d: %w", id.Number, err)
	default:
		// One corrupt identity must not keep the node from all others. It is
		// tried again at the next comparison, and shows as a pending write.
		a.cfg.Log.Error("the reference to a held identity cannot be written; if this persists, nodes may collect its number",
			"identity", id.Number, "labels", id.Labels.Text(), log.Err(err))
		return nil
	}
	a.note(Update{Upserts: []Entry{{Identity: id, Revision: claim.Revision}}})
	a.restored(id, claim)
	return nil
}

// restored notes that the reference of a held identity was written.
func (a *Allocator) restored(id identity.Identity, claim Claim) {
	a.mu.Lock(opReferences)
	defer a.mu.Unlock()
	h := a.held.as(id.Number, id.Labels)
	if h == nil {
		a.releases.due[id.Number] = claim.Revision // released meanwhile
		a.wake()
		return
	}
	h.ref = max(h.ref, claim.Revision)
	a.available.space(nil)
	a.counters.Restored++
	a.learn(id, claim.Revision)
	if claim.Created {
		a.cfg.Log.Warn("a held identity was missing in the store and was created again", "identity", id.Number, "labels",
			id.Labels.Text())
	}
}

// resolve moves the holders of a number that now has another label set to the number that their label set has. It is
// loud, because packets of this node carried the wrong number until here, and the datapath learns the right one when it
// resolves its endpoints again.
func (a *Allocator) resolve(ctx context.Context, c *ConflictError) error {
	unlock, err := a.byLabels.Lock(ctx, c.Held.Labels.Text())
	if err != nil {
		return err
	}
	defer unlock()
	var claim Claim
	for range maxAttempts {
		candidate, _, done := a.candidate(c.Held.Labels)
		claim, err = within(ctx, a, func(ctx context.Context) (Claim, error) {
			return a.store.Claim(ctx, c.Held.Labels, c.Moved, candidate)
		})
		done()
		if !errors.Is(err, ErrOccupied) || candidate == 0 {
			break
		}
		a.mu.Lock(opReferences)
		a.candidates.occupy(candidate, time.Now().Add(a.cfg.Reconcile))
		a.mu.Unlock()
	}
	if err != nil {
		return fmt.Errorf("resolve %w: %w", c, err)
	}
	if claim.Number == c.Held.Number {
		// Since the conflict was found, the number was assigned to this label set again.
		a.note(Update{Upserts: []Entry{{Identity: c.Held, Revision: claim.Revision}}})
		a.restored(c.Held, claim)
		return nil
	}
	a.mu.Lock(opReferences)
	defer a.mu.Unlock()
	if a.held.as(c.Held.Number, c.Held.Labels) == nil {
		return nil // released meanwhile; the new reference is found as a stray
	}
	moved := identity.Identity{Number: claim.Number, Labels: c.Held.Labels}
	if a.held.other(moved.Number, moved.Labels) != nil {
		return nil // that one is in conflict itself and moves first; tried again at the next comparison
	}
	a.learn(moved, claim.Revision)
	holders, first := a.held.reassign(c.Held.Number, moved, claim.Revision)
	a.places.release(namespaceOf(moved.Labels))
	if first {
		a.places.hold(namespaceOf(moved.Labels))
	}
	a.replace(c)
	a.saver.dirty()
	a.counters.Conflicts++
	a.cfg.Log.Error("identity conflict: a held number belongs to another label set in the cluster; its holders were moved and must be resolved again",
		"identity", c.Held.Number, "labels", c.Held.Labels.Text(), "now", c.Occupant.Labels.Text(), "moved_to", claim.Number, "holders", holders)
	return nil
}

// replace publishes the present label set of a number whose holders have moved. The mirror may know more than the
// conflict, which was found earlier: it follows the store. Called with mu held.
func (a *Allocator) replace(c *ConflictError) {
	n := c.Held.Number
	e, ok := a.mirror.known[n]
	stale := ok && e.labels.Text() == c.Held.Labels.Text()
	if stale {
		a.mirror.remove(n)
		a.candidates.unassign(n)
	}
	switch {
	case ok && !stale:
		// It was not published while this node held the number for another label set.
		a.pub.Upsert(n, identity.Identity{Number: n, Labels: e.labels})
	case !c.Occupant.Labels.IsZero() && c.Revision > a.mirror.revision:
		a.learn(c.Occupant, c.Revision)
	default:
		a.pub.Delete(n)
	}
}
