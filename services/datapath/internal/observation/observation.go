// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package observation is the subject of what the programs report: it gives events names, and
// remembers the last ones for those who read them.
package observation

import (
	"context"

	"github.com/sluice-net/sluice/kit/work"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/observe"
)

// Observation is the events of one node.
type Observation struct {
	// Ring has the last events, and repairs of attachments.
	Ring *observe.Ring

	events *event.Events
	names  event.Names
}

// Open reads nothing until the tasks run.
func Open(events *event.Events, names event.Names) *Observation {
	return &Observation{Ring: observe.NewRing(), events: events, names: names}
}

// Tasks are the background work.
func (o *Observation) Tasks() []work.Task {
	return []work.Task{{Name: "events", Run: func(ctx context.Context) error {
		return o.events.Observe(ctx, o.names, o.Ring)
	}}}
}

// Awaits is empty: events are no part of what an endpoint needs.
func (*Observation) Awaits() []work.Await { return nil }

// Warnings is empty: what was lost is counted.
func (*Observation) Warnings() []string { return nil }
