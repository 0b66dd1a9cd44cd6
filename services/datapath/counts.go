// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"

	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/server"
)

// counts implements server.Counts.
type counts struct{ d *datapath }

// Packets implements server.Counts.
func (c counts) Packets() ([]event.Counter, error) {
	counters, err := c.d.Kernel.Events.Metrics()
	if err != nil {
		return nil, fmt.Errorf("read counters: %w", err)
	}
	return counters, nil
}

// EventsLost implements server.Counts.
func (c counts) EventsLost() (uint64, error) {
	lost, err := c.d.Kernel.Events.Lost()
	if err != nil {
		return 0, fmt.Errorf("read lost events: %w", err)
	}
	return lost, nil
}

// MapUsage implements server.Counts.
func (c counts) MapUsage() ([]server.MapUsage, error) {
	usage, err := c.d.Kernel.MapUsage()
	if err != nil {
		return nil, fmt.Errorf("read the usage of maps: %w", err)
	}
	var all []server.MapUsage
	for _, u := range usage {
		all = append(all, server.MapUsage{Name: u.Name, Entries: int64(u.Entries), MaxEntries: u.MaxEntries, Bytes: u.Bytes})
	}
	return all, nil
}

// Connections implements server.Counts.
func (c counts) Connections() (server.Connections, error) {
	k, err := c.d.Kernel.Connections.Counters()
	if err != nil {
		return server.Connections{}, fmt.Errorf("read the counters of connections: %w", err)
	}
	stopped, err := c.d.Kernel.Endpoints.PickUpStopped()
	if err != nil {
		return server.Connections{}, err
	}
	last := c.d.Collector.Last()
	return server.Connections{
		LiveIPv4: uint64(last.Live[0]), LiveIPv6: uint64(last.Live[1]), Created: k.Created, Revoked: k.Revoked, Expired: k.Expired,
		Evicted: last.Evicted, PickedUp: k.PickedUp, Reevaluated: k.Reevaluated, Related: k.Related, Unremembered: k.Unremembered,
		PickUpStopped: stopped, Collected: last.Took, EvictedAt: last.EvictedAt, OutsideSpent: last.OutsideSpent,
	}, nil
}
