// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// registry holds the endpoints in memory as callers see them: records, their policies, and the differences that repairs
// could not remove. It is the only writer of the Index, and publishes each change.
type registry struct {
	*Index
	policies endpoint.Policies // nil: everything is allowed
	hub      *watch.Hub[workload.Owner, endpoint.Endpoint]

	unrepaired map[workload.Owner]unrepaired // guarded by mu; of host ends
	// Endpoints whose identity in the maps may differ from the record, with the error of the last
	// attempt to change it.
	differing map[workload.Owner]error // guarded by mu
}

func newRegistry(x *Index, p endpoint.Policies) *registry {
	return &registry{
		Index: x, policies: p,
		hub:        watch.NewHub[workload.Owner, endpoint.Endpoint](watch.Options[endpoint.Endpoint]{Loading: true}),
		unrepaired: map[workload.Owner]unrepaired{}, differing: map[workload.Owner]error{},
	}
}

// Get returns one endpoint, or ErrNotFound.
func (g *registry) Get(o workload.Owner) (endpoint.Endpoint, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	r, err := g.get(o)
	if err != nil {
		return endpoint.Endpoint{}, err
	}
	return g.endpoint(r, g.states[o]), nil
}

// endpoint returns the public view of a record, with the tables that evaluate it. mu is held,
// unless the state is not Ready.
func (g *registry) endpoint(r endpoint.Record, s endpoint.State) endpoint.Endpoint {
	e := view(r, s)
	if g.policies != nil && r.Slot != 0 {
		e.Policy, _ = g.policies.Of(r.Slot)
		if s == endpoint.Ready && e.Policy.Pending {
			e.State = endpoint.WaitingForPolicy
		}
	}
	if s == endpoint.Ready && g.unrepaired[r.Spec.Owner].noDevice() {
		e.State = endpoint.Damaged
	}
	return e
}

// asItIs returns the current public view of a record.
func (g *registry) asItIs(r endpoint.Record) endpoint.Endpoint {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.endpoint(r, g.states[r.Spec.Owner])
}

// awaits records what a creation is waiting for, as the state of the endpoint.
func (g *registry) awaits(o workload.Owner, s endpoint.State) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if r, ok := g.records[o]; ok && r.Phase == endpoint.PhaseCreating {
		g.states[o] = s
		g.hub.Upsert(o, g.endpoint(r, s))
	}
}

// set is the only place that changes an endpoint in memory.
func (g *registry) set(r endpoint.Record, s endpoint.State) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.setLocked(r, s)
}

func (g *registry) setLocked(r endpoint.Record, s endpoint.State) {
	o := r.Spec.Owner
	g.add(r, s)
	if r.Phase == endpoint.PhaseDeleted {
		delete(g.unrepaired, o)
		delete(g.differing, o)
		g.hub.Delete(o)
		return
	}
	g.hub.Upsert(o, g.endpoint(r, s))
}

// forget removes everything about the owner from memory.
func (g *registry) forget(o workload.Owner) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.remove(o)
	delete(g.unrepaired, o)
	g.hub.Delete(o)
}

// setUnrepaired stores the differences that a check of the endpoint's host end left.
func (g *registry) setUnrepaired(o workload.Owner, left []endpoint.Difference) {
	g.mu.Lock()
	defer g.mu.Unlock()
	before := g.unrepaired[o].noDevice()
	r, ok := g.records[o]
	if ok && len(left) > 0 {
		g.unrepaired[o] = g.unrepaired[o].next(left)
	} else {
		delete(g.unrepaired, o)
	}
	if ok && r.Phase != endpoint.PhaseDeleted && g.unrepaired[o].noDevice() != before {
		g.hub.Upsert(o, g.endpoint(r, g.states[o]))
	}
}

func (g *registry) differs(o workload.Owner) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	_, ok := g.differing[o]
	return ok
}

// setDiffers records whether the identity in the maps may differ from the record.
func (g *registry) setDiffers(o workload.Owner, differs bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.differing[o]; !differs {
		delete(g.differing, o)
	} else if !ok {
		g.differing[o] = nil
	}
}
