// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pin

import "sync"

// Gate guards the maps of one package: changes are serialised, reads run concurrently with each other, and no
// call is accepted after Close.
type Gate struct {
	ValidateOnly bool

	mu     sync.RWMutex
	closed bool // guarded by mu
}

// Lock begins a change. If it returns nil, the caller must call Unlock.
func (g *Gate) Lock() error {
	if g.ValidateOnly {
		return ErrValidateOnly
	}
	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		return ErrClosed
	}
	return nil
}

// Unlock ends a change.
func (g *Gate) Unlock() { g.mu.Unlock() }

// RLock begins a read. If it returns nil, the caller must call RUnlock.
func (g *Gate) RLock() error {
	g.mu.RLock()
	if g.closed {
		g.mu.RUnlock()
		return ErrClosed
	}
	return nil
}

// RUnlock ends a read.
func (g *Gate) RUnlock() { g.mu.RUnlock() }

// Read runs f concurrently with other reads, but with no change.
func (g *Gate) Read(f func() error) error {
	if err := g.RLock(); err != nil {
		return err
	}
	defer g.RUnlock()
	return f()
}

// Close waits for running calls and makes every later call fail. It reports whether this was the first Close.
func (g *Gate) Close() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	was := g.closed
	g.closed = true
	return !was
}
