// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package loop runs the one goroutine that owns the state of a service of desired
// state, and counts how long each turn of it takes.
//
// A call from elsewhere is a turn: it waits in a queue of bounded length, runs alone,
// and its caller gets the answer. A call whose context ends while it waits never runs; one
// that has begun is waited for. As long as a turn lasts, every other call waits, so long
// work belongs into several turns, or beside the loop under a Lock.
//
// The package knows neither the state nor which operations there are.
package loop

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// ErrStopped says that the loop has ended, and took no call any more.
var ErrStopped = errors.New("the service is stopping")

// queued is how many calls wait in the queue; more wait to get there.
const queued = 64

// Options are fixed for the life of a loop.
type Options struct {
	// After runs at the end of each turn, before its caller has the answer; nil: nothing
	// does.
	After func()
	// Processor returns the processor time of the thread that Run is locked to; nil: it
	// is not measured.
	Processor func() time.Duration
	// Done returns how much of the service's work is done since its start, such as how
	// many tables are compiled; nil: it is not counted.
	Done func() int
}

// Loop owns the state of a service while Run runs.
type Loop struct {
	options   Options
	calls     chan func()
	stopped   chan struct{} // closed when Run has returned
	operation string        // of the present turn; belongs to the loop
	figures   record
}

// New returns a loop. Calls wait until Run takes them.
func New(o Options) *Loop {
	return &Loop{options: o, calls: make(chan func(), queued), stopped: make(chan struct{})}
}

// Work is what a loop does besides calls. Its functions run in the loop.
type Work struct {
	// Pause returns the time until Sweep has something to do.
	Pause func() time.Duration
	// Sweep does what is due without a call.
	Sweep func()
	// Wake has a token when Woken has something to do; nil: it never has.
	Wake  <-chan struct{}
	Woken func()
	// SweepAs and WokenAs are the operations that Sweep and Woken are counted as.
	SweepAs, WokenAs string
	// Fatal returns why the loop has to end; nil: it goes on.
	Fatal func() error
	// Stop is the last turn when the context ends; nil: there is none.
	Stop func()
}

// Run runs turns until the context ends, or until Fatal returns an error, which it
// returns. It is called once.
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

// run runs f as an operation of the loop and counts it.
func (l *Loop) run(operation string, f func()) {
	began := l.begin()
	l.operation = operation
	f()
	if l.options.After != nil {
		l.options.After()
	}
	l.end(l.operation, began)
}

// Rename counts the present turn as another operation. It is called in a turn.
func (l *Loop) Rename(operation string) { l.operation = operation }

// Stopped is closed when Run has returned.
func (l *Loop) Stopped() <-chan struct{} { return l.stopped }

// Ask runs f as a turn of the loop, which is counted as the operation, and returns its
// answer. It returns the error of ctx if that ends before the turn begins, and ErrStopped
// if the loop does. A turn that has begun is waited for, so what f has written is the
// caller's when Ask returns without such an error, and no turn runs after it.
func Ask[T any](ctx context.Context, l *Loop, operation string, f func() (T, error)) (T, error) {
	type answer struct {
		v   T
		err error
	}
	var none T
	var taken atomic.Bool // by the turn, or by a caller that has gone
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
		a := <-out // it has begun
		return a.v, a.err
	case <-l.stopped:
	}
	select {
	case a := <-out: // of the last turn
		return a.v, a.err
	default:
		return none, ErrStopped
	}
}

// Do is Ask for a turn that has no answer.
func (l *Loop) Do(ctx context.Context, operation string, f func()) error {
	_, err := Ask(ctx, l, operation, func() (struct{}, error) { f(); return struct{}{}, nil })
	return err
}

// Wait waits for a channel outside the loop. It returns the error of ctx if that ends
// first, and ErrStopped if the loop does.
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

// Lock is held by one goroutine at a time, over several turns of a loop: what is
// decided in one turn is then still right in a later one.
type Lock struct {
	loop *Loop
	held chan struct{}
}

// NewLock returns a lock that nobody holds.
func (l *Loop) NewLock() *Lock { return &Lock{loop: l, held: make(chan struct{}, 1)} }

// Hold waits until the lock is free and takes it. The caller gives it back with
// release. It returns the error of ctx if that ends first, and ErrStopped if the loop
// does.
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

// TryHold takes the lock if it is free. It does not wait, so a turn may call it.
func (l *Lock) TryHold() (release func(), held bool) {
	select {
	case l.held <- struct{}{}:
		return l.release, true
	default:
		return nil, false
	}
}

func (l *Lock) release() { <-l.held }
