// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"context"
	"maps"
	"slices"
	"sync"
)

// SlotEvents carry slots of which something has changed from who changes it to who
// reports it. A slot that was added again before it was taken is there once. All methods
// may be called concurrently, Next by one reader.
type SlotEvents struct {
	mu    sync.Mutex
	slots map[uint16]struct{} // guarded by mu
	wake  chan struct{}
}

// NewSlotEvents has none.
func NewSlotEvents() *SlotEvents {
	return &SlotEvents{slots: map[uint16]struct{}{}, wake: make(chan struct{}, 1)}
}

// Add adds slots. It does not wait.
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

// Next waits for slots and takes all that there are, sorted. It returns ctx's error if that
// ends first.
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
