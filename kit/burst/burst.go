// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package burst makes a process collect garbage less often while it does much work at once.
//
// Processes keep their heaps small (runtime.gcPercent is 50). So a small heap is collected again and again while a
// large change makes it grow: with 10,000 new Services, this took a third to half of the CPU time. During a burst, the
// heap may grow by Headroom between two collections. The memory is returned at the end of the burst: see
// process.GiveBackMemory.
package burst

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"sync/atomic"
	"time"
)

// Headroom is the growth of the heap, in addition to the configured percentage, between two collections of a burst.
const Headroom = 64 << 20

// Calm is the time after the last call of Begin after which a burst is over, even if the process is not idle.
const Calm = 30 * time.Second

// Large is the number of objects from which a change is a burst.
const Large = 256

var state struct {
	active atomic.Bool
	last   atomic.Int64 // time of the last Begin, in nanoseconds since 1970

	mu   sync.Mutex
	base int // percentage outside of bursts
}

// Active reports whether a burst has begun and not ended.
func Active() bool { return state.active.Load() }

// Begin begins a burst, or continues the current one. If garbage collection is switched off, it does nothing.
func Begin() {
	state.last.Store(time.Now().UnixNano())
	if Active() {
		return
	}
	state.mu.Lock()
	defer state.mu.Unlock()
	if Active() {
		return
	}
	base := debug.SetGCPercent(-1)
	if base < 0 {
		return
	}
	state.base = base
	debug.SetGCPercent(percent(base, live()))
	state.active.Store(true)
	followCollections()
}

// End ends a burst. The next collection takes place after the usual growth.
func End() {
	state.mu.Lock()
	defer state.mu.Unlock()
	if Active() {
		state.active.Store(false)
		debug.SetGCPercent(state.base)
	}
}

// EndCalm ends a burst that no call of Begin has continued for Calm.
func EndCalm(now time.Time) {
	if Active() && now.UnixNano()-state.last.Load() > int64(Calm) {
		End()
	}
}

// minLive is the smallest live heap that percent assumes: for a smaller heap, Headroom would be a huge percentage.
const minLive = 4 << 20

// percent returns the GOGC percentage with which a heap grows by base percent plus Headroom between two collections.
func percent(base int, live uint64) int {
	return base + int(Headroom*100/max(live, minLive))
}

// live returns the size of the objects that the last collection found in use.
func live() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	if sample[0].Value.Kind() != metrics.KindUint64 {
		return 0
	}
	return sample[0].Value.Uint64()
}

// collection is garbage whose finalizer runs after the next collection.
type collection struct{ _ [16]byte }

// followCollections adapts the percentage to the live heap after each collection, until the burst ends.
func followCollections() {
	runtime.SetFinalizer(new(collection), func(*collection) {
		state.mu.Lock()
		defer state.mu.Unlock()
		if Active() {
			debug.SetGCPercent(percent(state.base, live()))
			followCollections()
		}
	})
}
