// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/identity"
)

// reconciler maintains a session with the store, and makes this node's references in the store equal to its holders.
type reconciler struct {
	index    *index
	conn     *connection
	claims   *claims
	follower *follower
	store    Store
	cfg      *Config
}

// writers is the number of concurrent writes of references after a reconnect.
const writers = 8

// flushStep is how many references one request writes or removes at most, so that it ends within its timeout.
const flushStep = 256

// run maintains a session until ctx ends.
func (s *reconciler) run(ctx context.Context) {
	var wait time.Duration
	first := true
	for ctx.Err() == nil {
		began := time.Now()
		err := s.session(ctx, &first)
		if ctx.Err() != nil {
			return
		}
		s.conn.disconnected(err)
		if time.Since(began) > s.cfg.RetryMax {
			wait = 0
		}
		s.cfg.pause(ctx, &wait)
	}
}

// session joins the store, makes the references equal to the holders, and keeps them equal until the session fails.
// Before they are equal, this node neither claims nor collects numbers.
func (s *reconciler) session(ctx context.Context, first *bool) error {
	fresh, err := within(ctx, s.cfg, s.store.Join)
	if err != nil {
		return err
	}
	s.index.mu.Lock(opSession)
	if session := s.store.Session(); session != s.index.joined {
		s.index.joined = session
		s.index.saver.dirty()
	}
	s.index.mu.Unlock()
	if err := s.index.saver.wait(ctx); err != nil {
		s.cfg.Log.Error("the session was not written; the next process begins a new one and writes all references again", log.Err(err))
	}
	if fresh {
		s.index.mu.Lock(opSession)
		for _, h := range s.index.held.byNumber {
			h.ref = 0
		}
		clear(s.index.releases.due) // due references ended with the former session, or are found below
		s.index.mu.Unlock()
	}
	select {
	case <-s.conn.lost: // an error of the previous session
	default:
	}
	// In a new process no claim is in progress, so references without a holder come from the former process.
	if err := s.reconcile(ctx, *first); err != nil {
		return err
	}
	if err := s.flush(ctx); err != nil {
		return err
	}
	*first = false
	s.index.mu.Lock(opSession)
	s.index.sessions++
	s.index.mu.Unlock()
	s.conn.reconnected()
	s.index.mu.Lock(opSession)
	held := len(s.index.held.byNumber)
	s.index.mu.Unlock()
	s.cfg.Log.Info("store session is up", "endpoints", s.store.Endpoints(), "held", held, "new_session", fresh)

	var watcher sync.WaitGroup
	defer watcher.Wait()
	watching, stop := context.WithCancel(ctx)
	defer stop()
	severed := make(chan error, 1)
	watcher.Go(func() { severed <- s.store.Severed(watching) })
	heartbeat := time.NewTicker(s.cfg.Heartbeat)
	defer heartbeat.Stop()
	compare := time.NewTicker(s.cfg.Reconcile)
	defer compare.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err = <-s.conn.lost:
			if errors.Is(err, ErrUnavailable) {
				// The deadline of the caller may have been short, so ask the store again without it.
				err = s.conn.alive(ctx)
			}
		case <-heartbeat.C:
			err = s.conn.alive(ctx)
		case err = <-severed:
		case <-s.index.kick:
			err = s.flush(ctx)
		case <-compare.C:
			if err = s.reconcile(ctx, false); err == nil {
				err = s.flush(ctx)
			}
		}
		if err != nil {
			return err
		}
	}
}

// reconcile compares the references in the store with the holders. A reference without a holder is removed if strict is
// set. Otherwise it is removed only if it was already found unchanged in the previous comparison, because a claim may
// be in progress.
func (s *reconciler) reconcile(ctx context.Context, strict bool) error {
	refs, err := within(ctx, s.cfg, s.store.References)
	if err != nil {
		return err
	}
	have := make(map[identity.Numeric]int64, len(refs))
	present := make(map[identity.Numeric]bool, len(refs))
	for _, r := range refs {
		have[r.Number], present[r.Number] = r.Revision, r.Present
	}
	s.index.mu.Lock(opCompare)
	defer s.index.mu.Unlock()
	s.index.releases.compare(refs, strict, s.index.held.has)
	for n, h := range s.index.held.byNumber {
		if n.Scope() != identity.ScopeCluster {
			continue
		}
		switch {
		case h.ref != 0 && have[n] == 0:
			h.ref = 0
		case h.ref == 0 && present[n]:
			// The reference has existed for the whole session, so the number was never collected, and the reference
			// need not be written again.
			if e, ok := s.index.mirror.known[n]; ok && !e.gone && e.labels.Text() == h.labels.Text() {
				h.ref = have[n]
			}
		}
	}
	return nil
}

// flush writes missing references, and removes the ones to be released.
func (s *reconciler) flush(ctx context.Context) error {
	s.index.mu.Lock(opReferences)
	var restore []identity.Identity
	for n, h := range s.index.held.byNumber {
		if n.Scope() == identity.ScopeCluster && h.ref == 0 {
			restore = append(restore, identity.Identity{Number: n, Labels: h.labels})
		}
	}
	release := s.index.releases.list()
	s.index.mu.Unlock()

	slices.SortFunc(restore, identity.Compare)
	slices.SortFunc(release, func(x, y Reference) int { return cmp.Compare(x.Number, y.Number) })
	restore, err := s.renew(ctx, restore)
	if err != nil {
		return err
	}
	var work []func(context.Context) error
	for _, id := range restore {
		work = append(work, func(ctx context.Context) error { return s.restore(ctx, id) })
	}
	for refs := range slices.Chunk(release, flushStep) {
		work = append(work, func(ctx context.Context) error { return s.drop(ctx, refs) })
	}
	err = inParallel(ctx, writers, work)
	// A conflict may have moved holders to another identity. Their endpoints are published only after the holders
	// were saved.
	if err := s.index.saver.wait(ctx); err != nil {
		s.cfg.Log.Error("the holders were not written; the next change tries again", log.Err(err))
	}
	return err
}

// renew writes the references of many held identities in few transactions, and returns the identities that must be
// restored one by one.
func (s *reconciler) renew(ctx context.Context, ids []identity.Identity) (left []identity.Identity, err error) {
	if len(ids) < 2 {
		return ids, nil
	}
	for step := range slices.Chunk(ids, flushStep) {
		claims, err := within(ctx, s.cfg, func(ctx context.Context) ([]Claim, error) { return s.store.Renew(ctx, step) })
		written := make(map[identity.Numeric]Claim, len(claims))
		for _, c := range claims {
			written[c.Number] = c
		}
		for _, id := range step {
			if c, ok := written[id.Number]; ok {
				s.restored(id, c)
			} else {
				left = append(left, id)
			}
		}
		if errors.Is(err, ErrNoSpace) {
			s.conn.noSpace(err)
			return nil, nil // the other writes would fail for the same reason
		}
		if err != nil {
			return nil, fmt.Errorf("restore %d identities: %w", len(step), err)
		}
	}
	return left, nil
}

// drop removes references from the store.
func (s *reconciler) drop(ctx context.Context, refs []Reference) error {
	if err := faultReleaseStore.Hit(ctx); err != nil {
		return err
	}
	if err := bounded(ctx, s.cfg, func(ctx context.Context) error { return s.store.Release(ctx, refs...) }); err != nil {
		return fmt.Errorf("release %d identities: %w", len(refs), err)
	}
	if err := faultReleasedStore.Hit(ctx); err != nil {
		return err
	}
	s.index.mu.Lock(opReferences)
	defer s.index.mu.Unlock()
	s.index.releases.done(refs)
	return nil
}

// restore writes the reference of one held identity.
func (s *reconciler) restore(ctx context.Context, id identity.Identity) error {
	claim, err := within(ctx, s.cfg, func(ctx context.Context) (Claim, error) { return s.store.Restore(ctx, id) })
	if conflict, ok := errors.AsType[*ConflictError](err); ok {
		err = s.resolve(ctx, conflict)
		if err == nil {
			return nil
		}
	}
	switch {
	case err == nil:
	case errors.Is(err, ErrNoSpace):
		s.conn.noSpace(err) // the session continues; the next comparison tries again
		return nil
	case errors.Is(err, ErrWaits):
		// Another label set has the number. The next comparison moves this set, after all nodes have claimed.
		s.cfg.Log.Warn("a held identity waits for another number", "identity", id.Number, "labels", id.Labels.Text(),
			log.Err(err))
		return nil
	case errors.Is(err, ErrUnavailable), errors.Is(err, ErrSessionLost), ctx.Err() != nil:
		return fmt.Errorf("restore %d: %w", id.Number, err)
	default:
		// One corrupt identity must not prevent the references to all others. The next comparison tries again,
		// and the status shows it as a pending write.
		s.cfg.Log.Error("the reference to a held identity cannot be written; if this persists, nodes may collect its number",
			"identity", id.Number, "labels", id.Labels.Text(), log.Err(err))
		return nil
	}
	s.follower.note(Update{Upserts: []Entry{{Identity: id, Revision: claim.Revision}}})
	s.restored(id, claim)
	return nil
}

// restored records that the reference of a held identity was written.
func (s *reconciler) restored(id identity.Identity, claim Claim) {
	s.index.mu.Lock(opReferences)
	defer s.index.mu.Unlock()
	h := s.index.held.as(id.Number, id.Labels)
	if h == nil {
		s.index.releases.due[id.Number] = claim.Revision // the holders have released the identity meanwhile
		s.index.wake()
		return
	}
	h.ref = max(h.ref, claim.Revision)
	s.index.available.space(nil)
	s.index.counters.Restored++
	s.index.learn(id, claim.Revision)
	if claim.Created {
		s.cfg.Log.Warn("a held identity was missing in the store and was created again", "identity", id.Number, "labels",
			id.Labels.Text())
	}
}

// resolve handles a number that got another label set in the cluster: it moves the holders on this node to the current
// number of their label set. It logs an error, because packets of this node have carried a wrong number, and still do
// until the datapath resolves its endpoints again.
func (s *reconciler) resolve(ctx context.Context, c *ConflictError) error {
	unlock, err := s.claims.byLabels.Lock(ctx, c.Held.Labels.Text())
	if err != nil {
		return err
	}
	defer unlock()
	var claim Claim
	for range maxAttempts {
		candidate, _, done := s.claims.candidate(c.Held.Labels)
		claim, err = within(ctx, s.cfg, func(ctx context.Context) (Claim, error) {
			return s.store.Claim(ctx, c.Held.Labels, c.Moved, candidate)
		})
		done()
		if errors.Is(err, ErrZone) {
			continue
		}
		if !errors.Is(err, ErrOccupied) || candidate == 0 {
			break
		}
		s.index.mu.Lock(opReferences)
		s.index.candidates.occupy(candidate, time.Now().Add(s.cfg.Reconcile))
		s.index.mu.Unlock()
	}
	if err != nil {
		return fmt.Errorf("resolve %w: %w", c, err)
	}
	if claim.Number == c.Held.Number {
		// After the conflict was found, the store assigned the number to this label set again.
		s.follower.note(Update{Upserts: []Entry{{Identity: c.Held, Revision: claim.Revision}}})
		s.restored(c.Held, claim)
		return nil
	}
	s.index.mu.Lock(opReferences)
	defer s.index.mu.Unlock()
	if s.index.held.as(c.Held.Number, c.Held.Labels) == nil {
		return nil // the identity was released; a comparison finds the new reference
	}
	moved := identity.Identity{Number: claim.Number, Labels: c.Held.Labels}
	if s.index.held.other(moved.Number, moved.Labels) != nil {
		// that number has a conflict itself, which is resolved first; the next comparison tries again
		return nil
	}
	s.index.learn(moved, claim.Revision)
	holders, first := s.index.held.reassign(c.Held.Number, moved, claim.Revision)
	s.index.places.release(namespaceOf(moved.Labels))
	if first {
		s.index.places.hold(namespaceOf(moved.Labels))
	}
	s.index.replace(c)
	s.index.saver.dirty()
	s.index.counters.Conflicts++
	s.cfg.Log.Error("identity conflict: a held number belongs to another label set in the cluster; its holders were moved and must be resolved again",
		"identity", c.Held.Number, "labels", c.Held.Labels.Text(), "now", c.Occupant.Labels.Text(), "moved_to", claim.Number, "holders", holders)
	return nil
}

// inParallel runs the functions in work, at most n at the same time. After the first error it starts no further
// function, and returns the error.
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
