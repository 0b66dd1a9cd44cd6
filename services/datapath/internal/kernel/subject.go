// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"

	"github.com/sluice-net/sluice/kit/work"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
)

// Subject makes a Kernel a subject of the process: it has the background work on the maps that subjects share, the
// state of these maps, and dumps of all maps.
type Subject struct {
	*Kernel

	Collector *conntrack.Collector   // nil with ValidateOnly, which has no background work and no server
	NodeName  func(id uint16) string // "" if unknown
}

// Tasks returns the background work.
func (s Subject) Tasks() []work.Task {
	return []work.Task{{Name: "connections", Run: s.Collector.Run}, {Name: "shares", Run: s.DivideShares}}
}

// Awaits returns nil: the maps and programs are complete once they are open.
func (Subject) Awaits() []work.Await { return nil }

// Warnings returns nil: evictions and used-up budgets are in CountConnections.
func (Subject) Warnings() []string { return nil }

// Dump is like Kernel.Dump, but adds the names of nodes.
func (s Subject) Dump(name string, visit func(key, value string) error) error {
	return s.dump(name, s.NodeName, visit)
}

// SharedBounds returns the limits that endpoints share.
func (s Subject) SharedBounds() *bound.Bounds { return s.Bounds }

// Use returns how many connections an endpoint, or conntrack.Outside, has and may have; most 0: no limit.
func (s Subject) Use(slot endpointmap.ID, family int) (used, most int) {
	return s.Collector.Use(slot, family)
}

// Capacity returns the maximum number of connections; family 0 is IPv4.
func (s Subject) Capacity(family int) int { return s.Collector.Capacity(family) }

// CountConnections returns the counters of the programs, the result of the last collection, and the number of endpoints
// whose connections are not picked up.
func (s Subject) CountConnections() (c conntrack.Counters, last conntrack.Pass, pickUpStopped int, err error) {
	if c, err = s.Connections.Counters(); err != nil {
		return c, last, 0, fmt.Errorf("read the counters of connections: %w", err)
	}
	pickUpStopped, err = s.Endpoints.PickUpStopped()
	return c, s.Collector.Last(), pickUpStopped, err
}

// ListFrontends lists the frontends in the maps of services.
func (s Subject) ListFrontends() ([]servicemap.Frontend, error) { return s.Services.List() }

// CountFrontends counts the frontends and backends in the maps of services.
func (s Subject) CountFrontends() (servicemap.Counts, error) { return s.Services.Counts() }
