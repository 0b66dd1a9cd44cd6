// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package keymutex provides one mutex per key. A wait for a mutex can be limited by a context, and
// interrupted by other goroutines.
package keymutex

import (
	"context"
	"sync"
	"time"
)

// Mutexes is a set of mutexes, one per key. The zero value is ready to use.
type Mutexes[K comparable] struct {
	mu   sync.Mutex
	keys map[K]*mutex // guarded by mu; mutexes that are held or waited for
}

type mutex struct {
	free     chan struct{} // holds a token while the mutex is not held
	interest int           // guarded by Mutexes.mu; number of holders and waiters
	// guarded by Mutexes.mu; cancel functions of the holders and waiters that used LockWith
	aborts map[*context.CancelCauseFunc]struct{}
}

// Lock takes the mutex of the key. The caller must call unlock unless ctx ended.
func (m *Mutexes[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	return m.LockWith(ctx, key, nil)
}

// LockWithin is Lock that waits at most d, for a caller that retries later. Waiters get the mutex in order of arrival,
// so other callers cannot starve this one.
func (m *Mutexes[K]) LockWithin(ctx context.Context, key K, d time.Duration) (unlock func(), ok bool) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	unlock, err := m.Lock(ctx, key)
	return unlock, err == nil
}

// LockWith is Lock for a holder or waiter that Interrupt may end by calling abort.
func (m *Mutexes[K]) LockWith(ctx context.Context, key K, abort context.CancelCauseFunc) (unlock func(), err error) {
	k, done := m.join(key, abort)
	select {
	case <-k.free:
		return func() { k.free <- struct{}{}; done() }, nil
	case <-ctx.Done():
		done()
		return nil, context.Cause(ctx)
	}
}

// join registers a holder or waiter of the key's mutex until done is called.
func (m *Mutexes[K]) join(key K, abort context.CancelCauseFunc) (k *mutex, done func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k = m.keys[key]
	if k == nil {
		if m.keys == nil {
			m.keys = map[K]*mutex{}
		}
		k = &mutex{free: make(chan struct{}, 1), aborts: map[*context.CancelCauseFunc]struct{}{}}
		k.free <- struct{}{}
		m.keys[key] = k
	}
	k.interest++
	if abort != nil {
		k.aborts[&abort] = struct{}{}
	}
	return k, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(k.aborts, &abort)
		if k.interest--; k.interest == 0 {
			delete(m.keys, key)
		}
	}
}

// Interrupt ends, with the cause, all holders and waiters of the key that used LockWith.
func (m *Mutexes[K]) Interrupt(key K, cause error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if k := m.keys[key]; k != nil {
		for abort := range k.aborts {
			(*abort)(cause)
		}
		clear(k.aborts)
	}
}
