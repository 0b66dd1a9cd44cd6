// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package loop runs the single goroutine that owns the state of a desired-state service, and
// measures its turns.
//
// A call from another goroutine is a turn: it waits in a bounded queue, runs alone, and returns an
// answer to its caller. If the caller's context ends while the call is queued, the call never runs;
// once it has begun, the caller waits for it. All other calls wait during a turn, so long work must
// be split into several turns or be done outside the loop under a Lock.
//
// The package knows neither the state nor the operations.
package loop

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// ErrStopped is returned if the loop ended before it ran the call.
var ErrStopped = errors.New("the service is stopping")

// queued is the length of the queue. Callers block while the queue is full.
const queued = 64

// Options are fixed for the life of a loop.
type Options struct {
	// After runs at the end of each turn, before the caller receives the answer; may be nil.
	After func()
	// Processor returns the CPU time of the thread that Run is locked to; nil if CPU time is not
	// measured.
	Processor func() time.Duration
	// Done returns a count of the work done since the start, such as the number of compiled tables; nil if work is
	// not counted.
	Done func() int
}

// Loop owns the state of a service while Run runs.
type Loop struct {
	options   Options
	calls     chan func()
	stopped   chan struct{} // closed when Run has returned
	operation string        // of the current turn; owned by the loop
	figures   record
}

// New returns a loop. Calls wait until Run starts.
func New(o Options) *Loop {
	return &Loop{options: o, calls: make(chan func(), queued), stopped: make(chan struct{})}
}

// Work is the loop's work in addition to calls. The loop calls all its functions.
type Work struct {
	// Pause returns the time until the next Sweep.
	Pause func() time.Duration
	// Sweep runs timed work.
	Sweep func()
	// Wake triggers Woken; nil if Woken is never needed.
	Wake  <-chan struct{}
	Woken func()
	// SweepAs and WokenAs are the operation names of Sweep and Woken in the figures.
	SweepAs, WokenAs string
	// Fatal returns the error that must end the loop, or nil.
	Fatal func() error
	// Stop runs as the last turn after the context has ended; may be nil.
	Stop func()
}

// Run runs turns until the context ends, or until Fatal returns an error, which Run returns. It
// must be called once.
func (l *Loop) Run(ctx context.Context, w Work) error {
	defer close(l.stopped)
	if l.options.Done != nil {
		l.figures.done = l.options.Done()
	}
	for {
		if err := w.Fatal(); err != nil {
			return err
		}
		select {
		case call := <-l.calls:
			call()
		case <-time.After(w.Pause()):
			l.run(w.SweepAs, w.Sweep)
		case <-w.Wake:
			l.run(w.WokenAs, w.Woken)
		case <-ctx.Done():
			if w.Stop != nil {
				w.Stop()
			}
			return nil
		}
	}
}

// run runs f and counts it as an operation.
func (l *Loop) run(operation string, f func()) {
	began := l.begin()
	l.operation = operation
	f()
	if l.options.After != nil {
		l.options.After()
	}
	l.end(l.operation, began)
}

// Rename changes the operation that the current turn is counted as. It must be called within a
// turn.
func (l *Loop) Rename(operation string) { l.operation = operation }

// Stopped is closed when Run has returned.
func (l *Loop) Stopped() <-chan struct{} { return l.stopped }

// Ask runs f as a turn, counts it as the operation, and returns its answer. It returns the error of ctx if ctx ends
// before the turn begins, and ErrStopped if the loop ends before that. Once the turn has begun, Ask waits until it
// ends. So if Ask returns one of these errors, f never runs; otherwise f has ended, and the caller may read the
// variables that f has written.
func Ask[T any](ctx context.Context, l *Loop, operation string, f func() (T, error)) (T, error) {
	type answer struct {
		v   T
		err error
	}
	var none T
	var taken atomic.Bool // set by the turn, or by a caller that gave up
	out := make(chan answer, 1)
	call := func() {
		if ctx.Err() != nil || !taken.CompareAndSwap(false, true) {
			return
		}
		var a answer
		l.run(operation, func() { a.v, a.err = f() })
		out <- a
	}
	select {
	case l.calls <- call:
	case <-ctx.Done():
		return none, ctx.Err()
	case <-l.stopped:
		return none, ErrStopped
	}
	select {
	case a := <-out:
		return a.v, a.err
	case <-ctx.Done():
		if taken.CompareAndSwap(false, true) {
			return none, ctx.Err()
		}
		a := <-out // the turn has begun
		return a.v, a.err
	case <-l.stopped:
	}
	select {
	case a := <-out: // the last turn's answer
		return a.v, a.err
	default:
		return none, ErrStopped
	}
}

// Do is Ask for a function without a result.
func (l *Loop) Do(ctx context.Context, operation string, f func()) error {
	_, err := Ask(ctx, l, operation, func() (struct{}, error) { f(); return struct{}{}, nil })
	return err
}

// Wait receives from a channel outside the loop. It returns the error of ctx if ctx ends first, and
// ErrStopped if the loop ends first.
func (l *Loop) Wait(ctx context.Context, c <-chan struct{}) error {
	select {
	case <-c:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-l.stopped:
		return ErrStopped
	}
}

// Lock is a mutex that is held over several turns of a loop, so that a decision of one turn is
// still valid in a later turn.
type Lock struct {
	loop *Loop
	held chan struct{}
}

// NewLock returns an unlocked Lock.
func (l *Loop) NewLock() *Lock { return &Lock{loop: l, held: make(chan struct{}, 1)} }

// Hold waits for the lock and takes it. The caller must call release. Hold returns the error of ctx
// if ctx ends first, and ErrStopped if the loop ends first.
func (l *Lock) Hold(ctx context.Context) (release func(), err error) {
	select {
	case l.held <- struct{}{}:
		return l.release, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-l.loop.stopped:
		return nil, ErrStopped
	}
}

// TryHold takes the lock if it is free. It does not block, so it may be called within a turn.
func (l *Lock) TryHold() (release func(), held bool) {
	select {
	case l.held <- struct{}{}:
		return l.release, true
	default:
		return nil, false
	}
}

func (l *Lock) release() { <-l.held }
