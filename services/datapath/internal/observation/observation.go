// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package observation is the part of the datapath that reports what the programs do: it resolves names in events, keeps
// the last ones for readers, describes tracked connections, and explains verdicts. It changes no connection by itself.
package observation

import (
	"context"
	"net/netip"

	"github.com/sluice-net/sluice/kit/work"
	"github.com/sluice-net/sluice/model/flow"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/conntrackview"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/dryrun"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/explain"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/observe"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policymap"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
)

// Maps are the handles of the maps and programs that are read.
type Maps struct {
	Events      *event.Events
	Endpoints   *endpointmap.Maps
	Addresses   *ipmap.Maps
	Nodes       *nodemap.Maps
	Tables      *policymap.Maps
	Connections *conntrack.Connections
	Services    *servicemap.Maps
	Replicas    *dryrun.Programs
}

// Options configure an Observation.
type Options struct {
	Maps  Maps
	Names event.Names
	// Worlds are the identities of addresses without an ipcache entry, for IPv4 and IPv6.
	Worlds [2]identity.Numeric
	// TunnelPorts are UDP ports of nodes that services do not use for external packets.
	TunnelPorts []uint16
}

// Observation manages the events of one node, and reads what the programs have stored.
type Observation struct {
	// Ring has the last events and repairs of attachments.
	Ring *observe.Ring
	// Explainer explains verdicts.
	Explainer *explain.Explainer
	// Tracked describes tracked connections.
	Tracked *conntrackview.Table

	events *event.Events
	names  event.Names
	maps   Maps
	worlds [2]identity.Numeric
}

// Open returns an Observation. It reads no events before its tasks run.
func Open(o Options) *Observation {
	m := o.Maps
	return &Observation{
		Ring: observe.NewRing(),
		Explainer: explain.New(explain.Maps{
			Endpoints: m.Endpoints, Addresses: m.Addresses, Nodes: m.Nodes, Tables: m.Tables, Connections: m.Connections,
			Replicas: m.Replicas, Services: m.Services, Worlds: o.Worlds, TunnelPorts: o.TunnelPorts,
		}),
		Tracked: &conntrackview.Table{
			Connections: m.Connections, Endpoints: m.Endpoints, Addresses: m.Addresses, Services: m.Services,
		},
		events: m.Events, names: o.Names, maps: m, worlds: o.Worlds,
	}
}

// EndOf returns the endpoint of this node with an address, the identity of the address, and the node ID of the other
// node that has it; 0: none. A result is zero if its lookup fails.
func (o *Observation) EndOf(a netip.Addr) (end flow.End, id uint32, node uint16) {
	slot, err := o.maps.Endpoints.SlotOf(a)
	if err != nil {
		return flow.End{}, 0, 0
	}
	if slot != endpointmap.NoID {
		if e, err := o.maps.Endpoints.At(slot); err == nil {
			spec, _ := o.names.Owners.SpecOfSlot(slot)
			return flow.End{Slot: slot, Owner: spec.Owner, Pod: spec.Pod}, uint32(e.Identity), 0
		}
		return flow.End{}, 0, 0
	}
	switch info, found, err := o.maps.Addresses.Match(a); {
	case err != nil:
		return flow.End{}, 0, 0
	case found:
		return flow.End{}, uint32(info.Identity), info.Node
	case a.Is6():
		return flow.End{}, uint32(o.worlds[1]), 0
	}
	return flow.End{}, uint32(o.worlds[0]), 0
}

// EventRing returns the last events.
func (o *Observation) EventRing() *observe.Ring { return o.Ring }

// Explain explains what happens to a connection; it returns explain.ErrNotLocal if neither end is an endpoint.
func (o *Observation) Explain(t conntrack.Tuple) (explain.Explanation, error) {
	return o.Explainer.Explain(t)
}

// ListConnections calls visit once for each tracked connection that matches the filter. The argument of visit is only
// valid during the call.
func (o *Observation) ListConnections(
	ctx context.Context, f conntrack.Filter, visit func(*conntrackview.Connection) error,
) error {
	return o.Tracked.List(ctx, f, visit)
}

// FlushConnections removes the connections that match the filter. With validateOnly it only counts them.
func (o *Observation) FlushConnections(
	ctx context.Context, f conntrack.Filter, validateOnly bool,
) (conntrack.Flushed, error) {
	return o.Tracked.Flush(ctx, f, validateOnly)
}

// PacketCounters returns the packets and bytes that the programs counted.
func (o *Observation) PacketCounters() ([]event.Counter, error) { return o.events.Metrics() }

// LostEvents counts the events that the kernel dropped.
func (o *Observation) LostEvents() (uint64, error) { return o.events.Lost() }

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
