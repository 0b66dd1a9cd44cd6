// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package flows

import (
	"slices"
	"time"

	"github.com/sluice-net/sluice/cmd/sluice/internal/observe"
)

// event is what one node reported, or that events of it are missing.
type event struct {
	node    string
	flow    observe.Event
	at      time.Time // of the event; that of the one before it, if it has none
	arrived time.Time
}

// clock gives events without a time, such as those that were lost, the time of the node's event before them.
type clock map[string]time.Time // node → time of its last event

func (c clock) set(e *event) {
	if e.at = e.flow.At(); e.at.IsZero() {
		e.at = c[e.node]
	}
	c[e.node] = e.at
}

// byTime orders events; those of the same time stay in the order in which they came.
func byTime(events []*event) {
	slices.SortStableFunc(events, func(a, b *event) int { return a.at.Compare(b.at) })
}

// merger orders the events of several nodes by their times. It holds each back for a moment, because the one before it
// may still be on its way from another node.
type merger struct {
	hold  time.Duration
	limit int // of events that are held back; the oldest go on then
	clock clock
	held  []*event // by time; of the same time in the order in which they came
}

// push takes an event that arrives now.
func (m *merger) push(e *event, now time.Time) {
	m.clock.set(e)
	e.arrived = now
	// A node's events come nearly in order, so the place is near the end.
	i := len(m.held)
	for i > 0 && e.at.Before(m.held[i-1].at) {
		i--
	}
	m.held = slices.Insert(m.held, i, e)
}

// due takes away the events that have been held back for long enough, and all that were before them.
func (m *merger) due(now time.Time) []*event {
	n := max(0, len(m.held)-m.limit)
	for i := len(m.held) - 1; i >= n; i-- {
		if now.Sub(m.held[i].arrived) >= m.hold {
			n = i + 1
		}
	}
	out := slices.Clone(m.held[:n])
	m.held = slices.Delete(m.held, 0, n)
	return out
}
