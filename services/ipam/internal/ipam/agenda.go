// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipam

import (
	"container/heap"
	"time"
)

// deadline is one key in an agenda.
type deadline[K any] struct {
	at    time.Time
	key   K
	index int // in the heap; -1 once removed
}

// agenda orders keys by time; adding and removing one costs O(log n).
type agenda[K any] struct{ heap deadlines[K] }

func (a *agenda[K]) add(at time.Time, key K) *deadline[K] {
	d := &deadline[K]{at: at, key: key}
	heap.Push(&a.heap, d)
	return d
}

func (a *agenda[K]) remove(d *deadline[K]) {
	if d != nil && d.index >= 0 {
		heap.Remove(&a.heap, d.index)
	}
}

// first returns the earliest, nil if there is none.
func (a *agenda[K]) first() *deadline[K] {
	if len(a.heap) == 0 {
		return nil
	}
	return a.heap[0]
}

// deadlines implements heap.Interface.
type deadlines[K any] []*deadline[K]

func (h deadlines[K]) Len() int           { return len(h) }
func (h deadlines[K]) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h deadlines[K]) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *deadlines[K]) Push(x any) {
	d := x.(*deadline[K])
	d.index = len(*h)
	*h = append(*h, d)
}

func (h *deadlines[K]) Pop() any {
	old := *h
	d := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	d.index = -1
	return d
}
