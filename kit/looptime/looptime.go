// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package looptime measures how long each operation occupies the single owner of a service's state: a goroutine or a
// lock. All other operations wait during that time.
//
// The package knows neither the operations nor how the figures are exported.
package looptime

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// Bounds are the upper bounds of the histogram buckets.
var Bounds = [...]time.Duration{
	100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond,
	10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 2500 * time.Millisecond,
}

// Figures are the durations of one operation.
type Figures struct {
	Operation string
	Buckets   [len(Bounds)]uint64 // not cumulative; durations above the last bound are in no bucket
	Count     uint64
	Sum       time.Duration
	Longest   time.Duration
}

// Add records a duration.
func (f *Figures) Add(d time.Duration) {
	f.Count++
	f.Sum += d
	f.Longest = max(f.Longest, d)
	if i, _ := slices.BinarySearch(Bounds[:], d); i < len(Bounds) {
		f.Buckets[i]++
	}
}

// Cumulative returns the buckets in Prometheus form, by upper bound in seconds.
func (f *Figures) Cumulative() map[float64]uint64 {
	out := make(map[float64]uint64, len(Bounds))
	count := uint64(0)
	for i, bound := range Bounds {
		count += f.Buckets[i]
		out[bound.Seconds()] = count
	}
	return out
}

// Times are the figures of one owner. The zero value is ready to use; methods are safe for
// concurrent use.
type Times struct {
	mu sync.Mutex
	by map[string]*Figures // guarded by mu
}

// Add records that an operation occupied the owner for d. The set of operation names must be fixed.
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

// All returns a copy of the figures, sorted by operation.
func (t *Times) All() []Figures {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]Figures, 0, len(t.by))
	for _, operation := range slices.Sorted(maps.Keys(t.by)) {
		out = append(out, *t.by[operation])
	}
	return out
}

// Mutex is a lock that measures how long each operation holds it. Waiting for the lock is not
// measured.
type Mutex struct {
	mu        sync.Mutex
	operation string    // guarded by mu
	began     time.Time // guarded by mu
	times     Times
}

// Lock takes the lock on behalf of an operation.
func (m *Mutex) Lock(operation string) {
	m.mu.Lock()
	m.operation, m.began = operation, time.Now()
}

// Unlock releases the lock.
func (m *Mutex) Unlock() {
	operation, d := m.operation, time.Since(m.began)
	m.mu.Unlock()
	m.times.Add(operation, d)
}

// Times returns the figures of the lock. It does not take the lock.
func (m *Mutex) Times() []Figures { return m.times.All() }
