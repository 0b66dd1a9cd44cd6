// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package batch executes the calls of many callers in one operation. It does not delay calls to collect more of them:
// calls that arrive while an operation runs are executed together in the next one.
package batch

import (
	"context"
	"slices"
	"sync"
)

// Group batches calls. Do must be set before the first call.
type Group[T any] struct {
	// Do executes calls in the order of their arrival. To return a result, Do stores it in the call, which must then be
	// a pointer.
	Do func([]T)
	// Fits reports whether a call may be executed together with the calls in with. If it is nil, all calls may be.
	Fits func(with []T, call T) bool
	// AtOnce is the maximum number of concurrent calls of Do; values below 1 mean 1.
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

// Call waits until Do has executed the call, and then returns nil. If ctx ends first, it returns the error of ctx, and
// the call may still be executed.
func (g *Group[T]) Call(ctx context.Context, call T) error {
	e := &entry[T]{ctx: ctx, call: call, done: make(chan struct{})}
	g.mu.Lock()
	g.waiting = append(g.waiting, e)
	if g.running < max(g.AtOnce, 1) {
		// Start a new goroutine, because the caller may stop waiting. It ends when no call waits any more.
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

// take returns the waiting calls for the next operation; nil if no call waits.
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
