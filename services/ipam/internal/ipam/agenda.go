// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipam

import (
	"container/heap"
	"net/netip"
	"time"
)

// deadline is a key in an agenda with its time.
type deadline[K any] struct {
	at    time.Time
	key   K
	index int // index in the heap; -1 once removed
}

// agenda orders keys by time. Adding or removing a key takes O(log n).
type agenda[K any] struct {
	heap deadlines[K]
	// less orders keys with equal times; nil leaves their order open.
	less func(a, b K) bool
}

// ofAddresses returns an agenda in which the lower of two addresses with the same time comes first.
func ofAddresses() agenda[netip.Addr] { return agenda[netip.Addr]{less: netip.Addr.Less} }

func (a *agenda[K]) add(at time.Time, key K) *deadline[K] {
	d := &deadline[K]{at: at, key: key}
	heap.Push(a, d)
	return d
}

func (a *agenda[K]) remove(d *deadline[K]) {
	if d != nil && d.index >= 0 {
		heap.Remove(a, d.index)
	}
}

// has reports whether a deadline is in the agenda.
func (a *agenda[K]) has(d *deadline[K]) bool {
	return d != nil && d.index >= 0 && d.index < len(a.heap) && a.heap[d.index] == d
}

// first returns the earliest deadline, or nil if the agenda is empty.
func (a *agenda[K]) first() *deadline[K] {
	if len(a.heap) == 0 {
		return nil
	}
	return a.heap[0]
}

type deadlines[K any] []*deadline[K]

// Len implements heap.Interface.
func (a *agenda[K]) Len() int { return len(a.heap) }

// Less implements heap.Interface.
func (a *agenda[K]) Less(i, j int) bool {
	x, y := a.heap[i], a.heap[j]
	return x.at.Before(y.at) || a.less != nil && x.at.Equal(y.at) && a.less(x.key, y.key)
}

// Swap implements heap.Interface.
func (a *agenda[K]) Swap(i, j int) {
	a.heap[i], a.heap[j] = a.heap[j], a.heap[i]
	a.heap[i].index, a.heap[j].index = i, j
}

// Push implements heap.Interface.
func (a *agenda[K]) Push(x any) {
	d := x.(*deadline[K])
	d.index = len(a.heap)
	a.heap = append(a.heap, d)
}

// Pop implements heap.Interface.
func (a *agenda[K]) Pop() any {
	last := len(a.heap) - 1
	d := a.heap[last]
	a.heap[last] = nil
	a.heap = a.heap[:last]
	d.index = -1
	return d
}
