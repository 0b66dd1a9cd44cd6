// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Report answers callers: it lists the endpoints with their policies and states, publishes their changes, and
// summarises the work of the other parts. It has the lookups of the Index, too.
type Report struct {
	*registry
	relabeller  *Relabeller
	allocations *Allocations
	reconciler  *Reconciler
}

// List returns a consistent snapshot of all endpoints, sorted by ID and owner.
func (p *Report) List() []endpoint.Endpoint {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.list(p.endpoint)
}

// HolderOf returns the endpoint that has an address.
func (p *Report) HolderOf(a netip.Addr) (endpoint.Endpoint, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	o, ok := p.holders[a]
	if !ok {
		return endpoint.Endpoint{}, false
	}
	r, err := p.get(o)
	if err != nil {
		return endpoint.Endpoint{}, false
	}
	return p.endpoint(r, p.states[o]), true
}

// Hub distributes the changes of endpoints.
func (p *Report) Hub() *watch.Hub[workload.Owner, endpoint.Endpoint] { return p.hub }

// FollowPolicies notifies watchers when the policy of endpoints changes, until ctx ends. events
// delivers their IDs.
func (p *Report) FollowPolicies(ctx context.Context, events *endpoint.SlotEvents) error {
	for {
		slots, err := events.Next(ctx)
		if err != nil {
			return err
		}
		p.policyChanged(slots)
	}
}

// policyChanged publishes the endpoints of some IDs to watchers.
func (p *Report) policyChanged(slots []uint16) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range slots {
		if o, ok := p.slots[s]; ok {
			p.hub.Upsert(o, p.endpoint(p.records[o], p.states[o]))
		}
	}
}

// Counts is a summary of the endpoints and of the work on them.
type Counts struct {
	ByState         map[endpoint.State]int
	PendingReleases int
	// Repairs of attachments, of other properties of host ends, and of state that belongs to no
	// endpoint.
	Repairs, DeviceRepairs, NodeRepairs uint64
	// BadRecords lists the unreadable record files, each with what to do about it, sorted, followed
	// by the devices that have no traffic because of them.
	BadRecords []string
	// Unrepaired lists the differences of host ends and of the node that the last check found and
	// did not repair, one line each, sorted.
	Unrepaired []string
	// Relabels counts changes of identities. PendingRelabels counts those still to be made; Waiting
	// has a reason for each, one line each.
	Relabels        uint64
	PendingRelabels int
	Waiting         []string
}

// Counts returns the summary.
func (p *Report) Counts() Counts {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := Counts{
		ByState: map[endpoint.State]int{}, Repairs: p.reconciler.hostEnds.repairs.Load(),
		DeviceRepairs: p.reconciler.hostEnds.deviceRepairs.Load(), NodeRepairs: p.reconciler.nodeState.repairs.Load(),
	}
	for _, u := range p.unreadable {
		n.BadRecords = append(n.BadRecords, fmt.Sprintf("record of an endpoint cannot be read: %v; %s", u.Err, wayOut))
	}
	slices.Sort(n.BadRecords)
	if len(n.BadRecords) > 0 {
		for _, line := range p.reconciler.closedDevices {
			n.BadRecords = append(n.BadRecords, line+" has no traffic, because its record cannot be read")
		}
	}
	for o, r := range p.records {
		if r.Phase == endpoint.PhaseDeleted {
			n.PendingReleases++
		} else {
			n.ByState[p.endpoint(r, p.states[o]).State]++
		}
	}
	for o, u := range p.unrepaired {
		for _, d := range u.left {
			line := fmt.Sprintf("%s: %s", o, d)
			if d.IsNoDevice() {
				line += "; the device was deleted; delete and create the container again to restore its network"
			}
			n.Unrepaired = append(n.Unrepaired, line)
		}
	}
	for _, d := range p.reconciler.nodeState.unrepaired.left {
		n.Unrepaired = append(n.Unrepaired, "node: "+d.String())
	}
	for _, err := range p.allocations.unclaimed {
		n.Unrepaired = append(n.Unrepaired,
			fmt.Sprintf("%v; the endpoint keeps its traffic, but creating another one with its addresses fails", err))
	}
	slices.Sort(n.Unrepaired)
	n.Relabels, n.Waiting = p.relabeller.relabels.Load(), p.relabeller.waiting()
	n.PendingRelabels = len(p.relabeller.wishes) + len(p.differing)
	return n
}
