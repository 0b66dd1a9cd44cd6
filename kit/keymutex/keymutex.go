// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package keymutex has a mutex per key, whose lock is waited for under a context,
// and by those whose work others may end.
package keymutex

import (
	"context"
	"sync"
	"time"
)

// Mutexes are one for each key. The zero value is ready.
type Mutexes[K comparable] struct {
	mu   sync.Mutex
	keys map[K]*mutex // guarded by mu; those that are held or waited for
}

type mutex struct {
	free     chan struct{} // holds a token while the mutex is not held
	interest int           // guarded by Mutexes.mu; who holds it or waits
	// aborts are guarded by Mutexes.mu, and of those who hold it or wait and need
	// not end what they began.
	aborts map[*context.CancelCauseFunc]struct{}
}

// Lock waits for the mutex of the key. unlock must be called unless ctx ended.
func (m *Mutexes[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	return m.LockWith(ctx, key, nil)
}

// LockWithin is Lock for a caller that comes back later instead of waiting for
// longer. Those who wait are served in the order of arrival, so that calls of which
// one follows the other do not keep it out.
func (m *Mutexes[K]) LockWithin(ctx context.Context, key K, d time.Duration) (unlock func(), ok bool) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	unlock, err := m.Lock(ctx, key)
	return unlock, err == nil
}

// LockWith is Lock for work, or a wait, that Interrupt may end by abort.
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

// join notes the interest in the key's mutex until done is called.
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

// Interrupt ends the work, and the waits, of LockWith on the key.
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
