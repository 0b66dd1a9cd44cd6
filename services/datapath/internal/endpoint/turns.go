// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"context"
	"sync"
	"time"

	"github.com/sluice-net/sluice/model/workload"
)

// turns lets one call at a time work on an owner.
type turns struct {
	mu     sync.Mutex
	owners map[workload.Owner]*turn // guarded by mu
}

type turn struct {
	free     chan struct{} // holds a token while nobody works
	interest int           // guarded by turns.mu; who works or waits
	// aborts are guarded by turns.mu, and of those who work or wait and need
	// not end what they began.
	aborts map[*context.CancelCauseFunc]struct{}
}

func newTurns() *turns { return &turns{owners: map[workload.Owner]*turn{}} }

// enter waits for the owner's turn. leave must be called.
func (t *turns) enter(ctx context.Context, o workload.Owner) (leave func(), err error) {
	return t.enterWith(ctx, o, nil)
}

// enterWithin is enter for a caller that comes back later instead of waiting for
// longer. Whoever waits is served in the order of arrival, so that calls of which
// one follows the other do not keep it out.
func (t *turns) enterWithin(ctx context.Context, o workload.Owner, d time.Duration) (leave func(), ok bool) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	leave, err := t.enter(ctx, o)
	return leave, err == nil
}

// enterWith is enter for a creation, or a wait, which interrupt may end by
// abort.
func (t *turns) enterWith(ctx context.Context, o workload.Owner, abort context.CancelCauseFunc) (leave func(), err error) {
	e, done := t.join(o, abort)
	select {
	case <-e.free:
		return func() { e.free <- struct{}{}; done() }, nil
	case <-ctx.Done():
		done()
		return nil, context.Cause(ctx)
	}
}

// join notes the interest in the owner's turn until done is called.
func (t *turns) join(o workload.Owner, abort context.CancelCauseFunc) (e *turn, done func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e = t.owners[o]
	if e == nil {
		e = &turn{free: make(chan struct{}, 1), aborts: map[*context.CancelCauseFunc]struct{}{}}
		e.free <- struct{}{}
		t.owners[o] = e
	}
	e.interest++
	if abort != nil {
		e.aborts[&abort] = struct{}{}
	}
	return e, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(e.aborts, &abort)
		if e.interest--; e.interest == 0 {
			delete(t.owners, o)
		}
	}
}

// interrupt ends the creations, and waits, that work on the owner or wait for it.
func (t *turns) interrupt(o workload.Owner, cause error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.owners[o]; e != nil {
		for abort := range e.aborts {
			(*abort)(cause)
		}
		clear(e.aborts)
	}
}
