// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package probe

import "time"

// pace lets something happen once per gap, and burst times in a row after a rest.
type pace struct {
	gap   time.Duration
	burst int
	last  time.Time // when it would have happened last, had it happened gap by gap
}

// take lets it happen if now is not before the time that it returns.
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

// queue has paths, the one that is due first in front. It implements heap.Interface.
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
