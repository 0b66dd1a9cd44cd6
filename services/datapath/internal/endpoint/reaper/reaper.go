// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package reaper removes the devices of deleted endpoints whose network namespaces remain. Most
// devices vanish with their namespace before the reaper runs, which costs the kernel a hundredth of
// deleting them one by one.
package reaper

import (
	"context"
	"log/slog"
	"math"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
)

// Reaper holds the devices that are scheduled for removal.
type Reaper[Device comparable] struct {
	remove func([]Device) error
	delay  time.Duration
	now    func() time.Time
	log    *slog.Logger
	wake   chan struct{}

	removing sync.Mutex // held while devices are removed; before mu

	mu  sync.Mutex
	due map[Device]time.Time // guarded by mu
}

// New returns a reaper that removes devices after a delay.
func New[Device comparable](
	remove func([]Device) error, delay time.Duration, now func() time.Time, l *slog.Logger,
) *Reaper[Device] {
	return &Reaper[Device]{
		remove: remove, delay: delay, now: now, log: l,
		wake: make(chan struct{}, 1), due: map[Device]time.Time{},
	}
}

// Add schedules the removal of a device. Its name stays taken until then.
func (r *Reaper[Device]) Add(d Device) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.due[d] = r.now().Add(r.delay)
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Waits reports whether the device is scheduled for removal.
func (r *Reaper[Device]) Waits(d Device) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.due[d]
	return ok
}

// Any reports whether any device is scheduled for removal.
func (r *Reaper[Device]) Any() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.due) > 0
}

// Run removes devices when they are due. It returns when ctx ends.
func (r *Reaper[Device]) Run(ctx context.Context) error {
	for {
		// Remove devices that are almost due together with the others.
		wait := r.Reap(r.delay / 4)
		var timer <-chan time.Time
		if wait > 0 {
			timer = time.After(wait)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer:
		case <-r.wake:
		}
	}
}

// Everything as the argument of Reap removes all scheduled devices.
const Everything = time.Duration(math.MaxInt64)

// Reap removes the devices that are due within a duration from now, and returns how long to wait
// until the next is due, 0 if none is scheduled. It also waits for removals that concurrent calls
// have started.
func (r *Reaper[Device]) Reap(within time.Duration) time.Duration {
	r.removing.Lock()
	defer r.removing.Unlock()
	now := r.now()
	var due []Device
	var next time.Duration
	r.mu.Lock()
	for d, at := range r.due {
		if left := at.Sub(now); left <= within {
			due = append(due, d)
			delete(r.due, d)
		} else if next == 0 || left < next {
			next = left
		}
	}
	r.mu.Unlock()
	if len(due) == 0 {
		return next
	}
	if err := r.remove(due); err != nil {
		r.log.Warn("cannot remove devices; retrying", "count", len(due), log.Err(err))
		r.mu.Lock()
		for _, d := range due {
			r.due[d] = now.Add(r.delay)
		}
		r.mu.Unlock()
		if next == 0 || next > r.delay {
			next = r.delay
		}
	}
	return next
}
