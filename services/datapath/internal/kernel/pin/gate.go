// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pin

import "sync"

// Gate orders the calls of one package that has maps: changes one after the
// other, looks beside each other, and none after its close.
type Gate struct {
	ValidateOnly bool

	mu     sync.RWMutex
	closed bool // guarded by mu
}

// Lock begins a change. The caller unlocks if it returns nil.
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

// RLock begins a read. The caller unlocks if it returns nil.
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

// Read runs f with the gate open for reading: concurrently with other reads, and with no change.
func (g *Gate) Read(f func() error) error {
	if err := g.RLock(); err != nil {
		return err
	}
	defer g.RUnlock()
	return f()
}

// Close waits for the calls that are under way and refuses every later one. It
// says whether it was the first to do so.
func (g *Gate) Close() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	was := g.closed
	g.closed = true
	return !was
}
