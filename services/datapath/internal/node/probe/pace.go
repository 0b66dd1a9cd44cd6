// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package probe

import "time"

// pace is a rate limiter: one event per gap, with bursts of up to burst events.
type pace struct {
	gap   time.Duration
	burst int
	last  time.Time // theoretical time of the last event
}

// take consumes one event if now is not before the returned time.
func (p *pace) take(now time.Time) (free time.Time) {
	if free = p.last.Add(-p.gap * time.Duration(p.burst-1)); now.Before(free) {
		return free
	}
	if p.last.Before(now) {
		p.last = now
	}
	p.last = p.last.Add(p.gap)
	return now
}

// queue holds paths, ordered by the time of the next probe. It implements heap.Interface.
type queue []*path

// Len implements heap.Interface.
func (q queue) Len() int { return len(q) }

// Less implements heap.Interface.
func (q queue) Less(i, j int) bool { return q[i].due.Before(q[j].due) }

// Swap implements heap.Interface.
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

// Push implements heap.Interface.
func (q *queue) Push(x any) {
	p := x.(*path)
	p.index = len(*q)
	*q = append(*q, p)
}

// Pop implements heap.Interface.
func (q *queue) Pop() any {
	last := len(*q) - 1
	p := (*q)[last]
	p.index, (*q)[last] = -1, nil
	*q = (*q)[:last]
	return p
}
