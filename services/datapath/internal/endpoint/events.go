// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"context"
	"maps"
	"slices"
	"sync"
)

// SlotEvents passes the IDs of changed endpoints to a reporter. Duplicates are merged until the
// reader takes them. All methods may be called concurrently, but Next only by one reader.
type SlotEvents struct {
	mu    sync.Mutex
	slots map[uint16]struct{} // guarded by mu
	wake  chan struct{}
}

// NewSlotEvents returns an empty SlotEvents.
func NewSlotEvents() *SlotEvents {
	return &SlotEvents{slots: map[uint16]struct{}{}, wake: make(chan struct{}, 1)}
}

// Add adds endpoint IDs. It does not block.
func (e *SlotEvents) Add(slots []uint16) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range slots {
		e.slots[s] = struct{}{}
	}
	if len(e.slots) > 0 {
		select {
		case e.wake <- struct{}{}:
		default:
		}
	}
}

// Next waits for endpoint IDs and takes all of them, sorted. It returns ctx's error if ctx ends
// first.
func (e *SlotEvents) Next(ctx context.Context) ([]uint16, error) {
	select {
	case <-e.wake:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	slots := slices.Sorted(maps.Keys(e.slots))
	clear(e.slots)
	return slots, nil
}
