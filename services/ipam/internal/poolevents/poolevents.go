// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package poolevents tracks whether the ranges of this node have addresses for new pods,
// which sluice-controller reports as Events.
//
// The state becomes exhausted when an allocation finds no free address, and ends when each family has had a free
// address for a minute. The delay is needed because a node at its limit allocates each released address again at once.
// A node without free addresses is not exhausted until it has to refuse a pod.
package poolevents

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/model/podrange"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
)

// Times of a Tracker.
const (
	// freeFor is how long each family must have a free address before the state ends. It limits how often the state
	// changes.
	freeFor  = time.Minute
	interval = time.Second // pause between two reads of the figures while the pool is exhausted
)

// Tracker tracks the state.
type Tracker struct {
	summary func() *ipam.Summary
	now     func() time.Time

	mu      sync.Mutex
	note    podrange.Note // guarded by mu; empty if there was no shortage since the start
	free    time.Time     // guarded by mu; time since which each family has a free address; zero: not all have one
	changed chan struct{} // guarded by mu; closed at the next change
}

// New returns a Tracker. It reads the figures of the pools with summary.
func New(summary func() *ipam.Summary) *Tracker {
	return &Tracker{summary: summary, now: time.Now, changed: make(chan struct{})}
}

// Note returns the state; it is empty before the first shortage.
func (t *Tracker) Note() podrange.Note {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.note
}

// Exhausted reports whether the ranges are exhausted.
func (t *Tracker) Exhausted() bool { return t.Note().State == podrange.Exhausted }

// Changed returns a channel that is closed when the state changes.
func (t *Tracker) Changed() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.changed
}

// Answered records the result of an allocation.
func (t *Tracker) Answered(err error) {
	var e *ipam.ExhaustedError
	if !errors.As(err, &e) || e.Namespace != "" { // other namespaces still get addresses
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.free = time.Time{}
	if t.note.State != podrange.Exhausted {
		t.set(podrange.Exhausted, exhausted(e))
	}
}

// Adopt takes over the note of an earlier process of this node, unless this process has a newer one.
func (t *Tracker) Adopt(n podrange.Note) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.note.State == "" {
		t.note = n
		t.tell()
	}
}

func (t *Tracker) set(s podrange.State, message string) {
	t.note = podrange.Note{State: s, Since: t.now().UTC().Truncate(time.Second), Message: message}
	t.tell()
}

func (t *Tracker) tell() {
	close(t.changed)
	t.changed = make(chan struct{})
}

// Run waits for the end of each shortage until ctx ends; it then returns nil.
func (t *Tracker) Run(ctx context.Context) error {
	for {
		changed := t.Changed()
		var again <-chan time.Time
		if t.Exhausted() {
			again = time.After(interval)
		}
		select {
		case <-changed:
		case <-again:
			t.update()
		case <-ctx.Done():
			return nil
		}
	}
}

// update ends the state exhausted if its condition is no longer met.
func (t *Tracker) update() {
	sum, now := t.summary(), t.now()
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case !allHaveRoom(sum):
		t.free = time.Time{}
	case t.free.IsZero():
		t.free = now
	case t.note.State == podrange.Exhausted && now.Sub(t.free) >= freeFor:
		t.set(podrange.Available, available(sum))
	}
}

// allHaveRoom reports whether each family with a serving range has a free address.
func allHaveRoom(sum *ipam.Summary) bool {
	free := map[ipam.Family]uint64{}
	for _, p := range sum.Pools {
		if p.Serves() {
			// min, because the sum of large counts may exceed 2^64
			free[ipam.FamilyOf(p.Prefix.Addr())] += min(p.Free, 1)
		}
	}
	for _, n := range free {
		if n == 0 {
			return false
		}
	}
	return len(free) > 0
}

// maxRanges is the maximum number of ranges in a message.
const maxRanges = 8

// exhausted describes the full ranges, and what to do.
func exhausted(e *ipam.ExhaustedError) string {
	text := fmt.Sprintf("no %s address is left for new pods: %s", e.Family, ranges(e.Pools, func(f ipam.Figures) string {
		return fmt.Sprintf("%s has %d of %d addresses in use, %d leased, %d in quarantine and %d reserved",
			f.Prefix, f.Confirmed, f.Size, f.Leased, f.Quarantined, f.Reserved)
	}))
	for _, f := range e.Pools {
		if f.Quarantined > 0 {
			text += "; addresses in quarantine become free by themselves"
			break
		}
	}
	return text + `; run fewer pods here, or give nodes larger ranges (docs/ipam.md, "A node without free addresses")`
}

// available describes the free addresses.
func available(sum *ipam.Summary) string {
	var serving []ipam.Figures
	for _, f := range sum.Pools {
		if f.Serves() {
			serving = append(serving, f)
		}
	}
	return "addresses for new pods are available again: " + ranges(serving, func(f ipam.Figures) string {
		return fmt.Sprintf("%s has %d of %d addresses free", f.Prefix, f.Free, f.Size)
	})
}

func ranges(list []ipam.Figures, text func(ipam.Figures) string) string {
	var all []string
	for i, f := range list {
		if i == maxRanges {
			all = append(all, fmt.Sprintf("and %d more", len(list)-i))
			break
		}
		all = append(all, text(f))
	}
	return strings.Join(all, ", ")
}
