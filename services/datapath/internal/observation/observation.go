// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package observation is the part of the datapath about events of the programs: it resolves names in events, and keeps
// the last ones for readers.
package observation

import (
	"context"

	"github.com/sluice-net/sluice/kit/work"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/observe"
)

// Observation manages the events of one node.
type Observation struct {
	// Ring has the last events and repairs of attachments.
	Ring *observe.Ring

	events *event.Events
	names  event.Names
}

// Open returns an Observation. It reads no events before its tasks run.
func Open(events *event.Events, names event.Names) *Observation {
	return &Observation{Ring: observe.NewRing(), events: events, names: names}
}

// Tasks returns the background work.
func (o *Observation) Tasks() []work.Task {
	return []work.Task{{Name: "events", Run: func(ctx context.Context) error {
		return o.events.Observe(ctx, o.names, o.Ring)
	}}}
}

// Awaits returns nil: endpoints do not depend on events.
func (*Observation) Awaits() []work.Await { return nil }

// Warnings returns nil: lost events are only counted.
func (*Observation) Warnings() []string { return nil }
