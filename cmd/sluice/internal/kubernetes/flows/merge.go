// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package flows

import (
	"slices"
	"time"

	"github.com/sluice-net/sluice/cmd/sluice/internal/observe"
)

// event is an event of a node, or a report of lost events.
type event struct {
	node    string
	flow    observe.Event
	at      time.Time // time of the event, or of the previous one if it has none
	arrived time.Time
}

// clock assigns a time to events that have none, such as lost events: the time of the node's previous event.
type clock map[string]time.Time // node → time of its last event

func (c clock) set(e *event) {
	if e.at = e.flow.At(); e.at.IsZero() {
		e.at = c[e.node]
	}
	c[e.node] = e.at
}

// byTime sorts events by time. The sort is stable.
func byTime(events []*event) {
	slices.SortStableFunc(events, func(a, b *event) int { return a.at.Compare(b.at) })
}

// merger sorts the events of several nodes by time. It holds each event back for a moment, because an earlier event
// of another node may still arrive.
type merger struct {
	hold  time.Duration
	limit int // maximum number of held events; beyond it, the oldest are released
	clock clock
	held  []*event // sorted by time, stable
}

// push adds an event that arrives now.
func (m *merger) push(e *event, now time.Time) {
	m.clock.set(e)
	e.arrived = now
	// A node's events arrive nearly in order, so the position is near the end.
	i := len(m.held)
	for i > 0 && e.at.Before(m.held[i-1].at) {
		i--
	}
	m.held = slices.Insert(m.held, i, e)
}

// due removes and returns the events that have been held long enough, and all earlier ones.
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
