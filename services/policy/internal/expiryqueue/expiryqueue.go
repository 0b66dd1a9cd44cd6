// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package expiryqueue finds the name that expires first, without visiting all names.
package expiryqueue

import (
	"container/heap"
	"time"
)

// Queue orders names by expiry time. When the expiry time of a name becomes earlier, the caller must call Note. When
// it becomes later, the caller need not: First then moves the name back. The zero value is ready.
type Queue struct {
	heap   dates
	queued map[string]time.Time // by name; other entries of the heap are outdated
	Visits int                  // number of names that First visited, for tests
}

type date struct {
	at   time.Time
	name string
}

// dates implements heap.Interface.
type dates []date

func (d dates) Len() int           { return len(d) }
func (d dates) Less(i, j int) bool { return d[i].at.Before(d[j].at) }
func (d dates) Swap(i, j int)      { d[i], d[j] = d[j], d[i] }
func (d *dates) Push(x any)        { *d = append(*d, x.(date)) } //nolint:forcetypeassert // only called from here
func (d *dates) Pop() any {
	last := len(*d) - 1
	x := (*d)[last]
	(*d)[last] = date{}
	*d = (*d)[:last]
	return x
}

// Note adds a name, or moves it to an earlier time.
func (g *Queue) Note(name string, at time.Time) {
	if old, ok := g.queued[name]; ok && !at.Before(old) {
		return
	}
	if g.queued == nil {
		g.queued = make(map[string]time.Time)
	}
	g.queued[name] = at
	heap.Push(&g.heap, date{at, name})
}

// First returns the name that expires first. when returns the current expiry time of a name, or false if the name no
// longer has one.
func (g *Queue) First(when func(name string) (time.Time, bool)) (name string, at time.Time, ok bool) {
	for len(g.heap) > 0 {
		top := g.heap[0]
		if at, ok := g.queued[top.name]; !ok || !at.Equal(top.at) {
			heap.Pop(&g.heap)
			continue
		}
		g.Visits++
		at, ok := when(top.name)
		if ok && !at.After(top.at) {
			return top.name, at, true
		}
		g.Drop()
		if ok {
			g.Note(top.name, at)
		}
	}
	return "", time.Time{}, false
}

// Drop removes the first name from the queue.
func (g *Queue) Drop() {
	delete(g.queued, g.heap[0].name)
	heap.Pop(&g.heap)
}
