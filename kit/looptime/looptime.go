// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package looptime counts for how long the one owner of a service's state, a
// goroutine or a lock, is taken by each operation: as long as one lasts, every
// other waits.
//
// It knows neither which operations there are nor how the figures are shown.
package looptime

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// Bounds are the upper bounds of the histograms.
var Bounds = [...]time.Duration{
	100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond,
	10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 2500 * time.Millisecond,
}

// Figures say for how long operations of one kind took the owner.
type Figures struct {
	Operation string
	Buckets   [len(Bounds)]uint64 // not cumulative; what is longer than the last bound is in none
	Count     uint64
	Sum       time.Duration
	Longest   time.Duration
}

// Add notes one operation, which took d.
func (f *Figures) Add(d time.Duration) {
	f.Count++
	f.Sum += d
	f.Longest = max(f.Longest, d)
	if i, _ := slices.BinarySearch(Bounds[:], d); i < len(Bounds) {
		f.Buckets[i]++
	}
}

// Cumulative are the buckets as Prometheus has them, by upper bound in seconds.
func (f *Figures) Cumulative() map[float64]uint64 {
	out := make(map[float64]uint64, len(Bounds))
	count := uint64(0)
	for i, bound := range Bounds {
		count += f.Buckets[i]
		out[bound.Seconds()] = count
	}
	return out
}

// Times are the figures of one owner. The zero value is ready; its methods may
// be called concurrently.
type Times struct {
	mu sync.Mutex
	by map[string]*Figures // guarded by mu
}

// Add notes that an operation took the owner for d. The set of operations must
// be a fixed one.
func (t *Times) Add(operation string, d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f := t.by[operation]
	if f == nil {
		if t.by == nil {
			t.by = make(map[string]*Figures)
		}
		f = &Figures{Operation: operation}
		t.by[operation] = f
	}
	f.Add(d)
}

// All is a copy of the figures, sorted by operation.
func (t *Times) All() []Figures {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]Figures, 0, len(t.by))
	for _, operation := range slices.Sorted(maps.Keys(t.by)) {
		out = append(out, *t.by[operation])
	}
	return out
}

// Mutex is a lock that counts for how long each operation holds it. The wait for
// the lock is not counted.
type Mutex struct {
	mu        sync.Mutex
	operation string    // guarded by mu
	began     time.Time // guarded by mu
	times     Times
}

// Lock takes the lock for an operation.
func (m *Mutex) Lock(operation string) {
	m.mu.Lock()
	m.operation, m.began = operation, time.Now()
}

// Unlock gives the lock back.
func (m *Mutex) Unlock() {
	operation, d := m.operation, time.Since(m.began)
	m.mu.Unlock()
	m.times.Add(operation, d)
}

// Times are the figures of the lock. It does not take the lock.
func (m *Mutex) Times() []Figures { return m.times.All() }
