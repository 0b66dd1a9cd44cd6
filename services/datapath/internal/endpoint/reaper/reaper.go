// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package reaper removes the devices of deleted endpoints whose namespaces stay.
// Most are gone before it looks: a namespace takes its devices along, which costs
// the kernel a hundredth of deleting them one by one.
package reaper

import (
	"context"
	"log/slog"
	"math"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
)

// Reaper has the devices that wait for their removal.
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

// New returns a reaper that leaves a device for a delay before it removes it.
func New[Device comparable](
	remove func([]Device) error, delay time.Duration, now func() time.Time, l *slog.Logger,
) *Reaper[Device] {
	return &Reaper[Device]{
		remove: remove, delay: delay, now: now, log: l,
		wake: make(chan struct{}, 1), due: map[Device]time.Time{},
	}
}

// Add leaves a device to the reaper. Its name stays taken until it is removed.
func (r *Reaper[Device]) Add(d Device) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.due[d] = r.now().Add(r.delay)
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Waits says whether the device waits for its removal.
func (r *Reaper[Device]) Waits(d Device) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.due[d]
	return ok
}

// Any says whether any device waits.
func (r *Reaper[Device]) Any() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.due) > 0
}

// Run removes devices when they are due. It returns when ctx ends.
func (r *Reaper[Device]) Run(ctx context.Context) error {
	for {
		// devices that are almost due go with the others
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

// Everything, as what Reap shall take, is all that waits.
const Everything = time.Duration(math.MaxInt64)

// Reap removes the devices that are due within a time from now and says when
// to look again, 0 if nothing waits. When it returns, so has every removal
// that another call had begun.
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
		r.log.Warn("devices not removed, trying again", "count", len(due), log.Err(err))
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
