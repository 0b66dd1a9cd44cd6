// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package batch executes calls of many callers in one operation. A call never waits for others: a call that arrives
// while an operation runs is part of the next one.
package batch

import (
	"context"
	"slices"
	"sync"
)

// Group gathers calls. Do must be set before the first one.
type Group[T any] struct {
	// Do executes calls, in the order in which they came, and stores each result in the call itself, which must then
	// be a pointer.
	Do func([]T)
	// Fits reports whether one call of Do may execute a call together with others; nil: always.
	Fits func(with []T, call T) bool
	// AtOnce is the number of calls of Do that run at a time; less than 1 is 1.
	AtOnce int

	mu      sync.Mutex
	waiting []*entry[T] // guarded by mu
	running int         // guarded by mu
}

type entry[T any] struct {
	ctx  context.Context
	call T
	done chan struct{} // closed when Do returned
}

// Call returns nil when Do has returned from the call, or the error of ctx, when
// it may still be carried out.
func (g *Group[T]) Call(ctx context.Context, call T) error {
	e := &entry[T]{ctx: ctx, call: call, done: make(chan struct{})}
	g.mu.Lock()
	g.waiting = append(g.waiting, e)
	if g.running < max(g.AtOnce, 1) {
		// In a new goroutine, because the caller may give up. It ends when no call waits any more.
		g.running++
		go g.run()
	}
	g.mu.Unlock()
	select {
	case <-e.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (g *Group[T]) run() {
	for {
		act := g.take()
		if act == nil {
			return
		}
		calls := make([]T, len(act))
		for i, e := range act {
			calls[i] = e.call
		}
		g.Do(calls)
		for _, e := range act {
			close(e.done)
		}
	}
}

// take returns the waiting calls for the next act, once the current act is over; nil without waiting calls.
func (g *Group[T]) take() (act []*entry[T]) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var calls []T
	g.waiting = slices.DeleteFunc(g.waiting, func(e *entry[T]) bool {
		if e.ctx.Err() != nil {
			return true // the caller no longer waits
		}
		if g.Fits != nil && len(calls) > 0 && !g.Fits(calls, e.call) {
			return false
		}
		calls, act = append(calls, e.call), append(act, e)
		return true
	})
	if act == nil {
		g.running--
	}
	return act
}
