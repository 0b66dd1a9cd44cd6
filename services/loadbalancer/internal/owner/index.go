// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"cmp"
	"iter"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// index holds the accepted objects, grouped by service, and derived data: which service has which frontend, the
// distinct backends, and the counts for limits and status. It belongs to the loop.
type index struct {
	// node computes frontends. Its zone, and the unit in which it counts frontends, may change.
	node    compile.Node
	tenants Tenants

	revision uint64 // of the content of the objects
	services map[service.Name]*joined
	slices   map[service.Name]*object
	count    int                      // services whose object exists and is within limits.services
	orphans  int                      // slices whose service is missing
	checked  map[service.Name]*joined // services with health check ports
	claims   claims                   // of all services
	backends backends                 // of all services
}

func newIndex(node *compile.Node, tenants Tenants) *index {
	return &index{
		node: *node, tenants: tenants,
		services: make(map[service.Name]*joined), slices: make(map[service.Name]*object),
		checked: make(map[service.Name]*joined), claims: newClaims(), backends: newBackends(),
	}
}

// object returns the object with a key, or nil.
func (ix *index) object(k service.ObjectKey) *object {
	if k.Kind == service.KindSlice {
		return ix.slices[k.Name]
	}
	if j := ix.services[k.Name]; j != nil {
		return j.object
	}
	return nil
}

// objects calls f for every object.
func (ix *index) objects(f func(*object)) {
	for _, j := range ix.services {
		if j.object != nil {
			f(j.object)
		}
	}
	for _, x := range ix.slices {
		f(x)
	}
}

// managed adapts the objects for the rules of package managed.
func (ix *index) managed(s *sources) *managed.Objects[service.ObjectKey] {
	return &managed.Objects[service.ObjectKey]{
		By: func(k service.ObjectKey) (managed.By, bool) {
			x := ix.object(k)
			if x == nil {
				return managed.By{}, false
			}
			return *x.by, true
		},
		All: func(yield func(service.ObjectKey, managed.By) bool) {
			ix.objects(func(x *object) { yield(x.key(), *x.by) }) // Prune takes all
		},
		Configured: s.configured,
		Compare:    service.ObjectKey.Compare,
	}
}

// service returns the service of a name with its slices, or nil. The Service object itself may be missing.
func (ix *index) service(name service.Name) *joined { return ix.services[name] }

// all yields all services with their slices. The Service objects themselves may be missing.
func (ix *index) all() iter.Seq[*joined] { return maps.Values(ix.services) }

// withHealthChecks yields the services with health check ports.
func (ix *index) withHealthChecks() iter.Seq[*joined] { return maps.Values(ix.checked) }

// restore sets the state of an earlier run: the revision of the objects, and the zone of the node if a source
// delivers it.
func (ix *index) restore(revision uint64, zone string) {
	ix.revision = revision
	if ix.node.Zone == "" {
		ix.node.Zone = zone
	}
}

// countElements sets the unit in which shares count frontends.
func (ix *index) countElements(elements bool) { ix.node.CountElements = elements }

// counts are the totals of an index.
type counts struct {
	services, slices, orphans, healthChecks int
	frontends, contested                    int // contested: claimed by several services
	backends                                int // distinct
}

func (ix *index) counts() counts {
	return counts{
		services: ix.count, slices: len(ix.slices), orphans: ix.orphans, healthChecks: len(ix.checked),
		frontends: len(ix.claims.winners), contested: len(ix.claims.contested), backends: ix.backends.once.n,
	}
}

// tenant returns the tenant of a service or a slice.
func (ix *index) tenant(n service.Name) shares.Tenant {
	if n == (service.Name{Namespace: "default", Name: "kubernetes"}) {
		return shares.System
	}
	return ix.tenants.Of(n.Namespace)
}

// keys returns the keys of the frontends that the datapath needs for a service.
func (ix *index) keys(j *joined) []frontend.Key {
	if j.object == nil {
		return nil
	}
	return ix.node.KeysWithin(j.object.service, j.share)
}

// frontends returns the frontends of a service within its share. They include frontends that belong to an older
// service, so callers must check the claims.
func (ix *index) frontends(j *joined) []*frontend.Frontend {
	fs := ix.node.Within(j.view(), j.share, nil)
	tenant := ix.tenant(j.name)
	for _, f := range fs {
		f.Tenant = tenant
	}
	return fs
}

// held returns the frontends that belong to a service.
func (ix *index) held(j *joined) []*frontend.Frontend {
	return slices.DeleteFunc(ix.frontends(j), func(f *frontend.Frontend) bool { return ix.claims.winner(f.Key) != j })
}

// joinedOf returns the service of that name, and creates it if it is missing.
func (ix *index) joinedOf(name service.Name) *joined {
	j := ix.services[name]
	if j == nil {
		j = &joined{name: name}
		ix.services[name] = j
	}
	return j
}

// put sets an object.
func (ix *index) put(x *object) {
	if old := ix.object(x.key()); old != nil {
		ix.drop(old)
	}
	j := ix.joinedOf(x.of())
	if x.service != nil {
		j.object = x
	} else {
		ix.slices[x.slice.Name] = x
		at, _ := slices.BinarySearchFunc(j.slices, x, byName)
		j.slices = slices.Insert(j.slices, at, x)
	}
	if x.revision > j.revision {
		j.revision, j.updated = x.revision, x.updated
	}
}

// drop removes an existing object. Empty services stay until dropEmpty.
func (ix *index) drop(x *object) {
	j := ix.services[x.of()]
	if x.service != nil {
		j.object = nil
		return
	}
	delete(ix.slices, x.slice.Name)
	if at, ok := slices.BinarySearchFunc(j.slices, x, byName); ok {
		j.slices = slices.Delete(j.slices, at, at+1)
	}
}

// changed returns the services that an edit affects, in their future state.
func (ix *index) changed(e *edit) map[service.Name]*joined {
	out := make(map[service.Name]*joined, len(e.gone)+len(e.puts)/2)
	of := func(name service.Name) *joined {
		j := out[name]
		if j == nil {
			j = &joined{name: name}
			if now := ix.services[name]; now != nil {
				*j = *now
				j.slices = slices.Clone(now.slices)
			}
			out[name] = j
		}
		return j
	}
	without := func(x *object) {
		j := of(x.of())
		if x.service != nil {
			j.object = nil
		} else if at, ok := slices.BinarySearchFunc(j.slices, x, byName); ok {
			j.slices = slices.Delete(j.slices, at, at+1)
		}
	}
	for _, k := range e.gone {
		without(ix.object(k))
	}
	for _, x := range e.puts {
		if old := ix.object(x.key()); old != nil {
			without(old)
		}
		j := of(x.of())
		if x.service != nil {
			j.object = x
			continue
		}
		at, _ := slices.BinarySearchFunc(j.slices, x, byName)
		j.slices = slices.Insert(j.slices, at, x)
	}
	return out
}

// plan computes what an edit changes: the revisions of its objects, and the future state of the services. An object
// without a creation time gets the time now. It returns the numbers of services and slices after the edit.
func (ix *index) plan(e *edit, now int64) (services, count int) {
	services, count = ix.count, len(ix.slices)
	for _, k := range e.gone {
		e.content = true
		if k.Kind == service.KindService {
			if !ix.object(k).refuses() {
				services--
			}
		} else {
			count--
		}
	}
	for _, x := range e.puts {
		old := ix.object(x.key())
		switch {
		case old == nil && x.service != nil:
			services++
		case old == nil:
			count++
		}
		x.revision, x.updated, x.created = ix.revision+1, now, cmp.Or(x.created, now)
		if old != nil {
			x.created = old.created
		}
		if at := x.createdByAuthor(); at != 0 {
			x.created = at
		}
		if old != nil && old.says(x) {
			x.revision, x.updated = old.revision, old.updated // only its source or its notes have changed
			continue
		}
		e.content = true
	}
	e.after = ix.changed(e)
	e.touched = make(map[service.Name]struct{}, len(e.after))
	for name := range e.after {
		e.touched[name] = struct{}{}
	}
	if e.levels != nil {
		for name := range e.levels.touched {
			e.touched[name] = struct{}{}
		}
		e.content = true
	}
	if e.zone != nil {
		ix.addHinted(e)
	}
	return services, count
}

// addHinted adds to an edit the services whose frontends depend on the zone.
func (ix *index) addHinted(e *edit) {
	for name, j := range ix.services {
		if j.object == nil || !j.hasZoneHints() {
			continue
		}
		e.touched[name] = struct{}{}
		e.content = true
	}
}

// enter adds the claims, backends and counts of a service.
func (ix *index) enter(j *joined) {
	for _, k := range ix.keys(j) {
		ix.claims.add(k, j)
	}
	for _, at := range ix.node.Backends(j.view()) {
		ix.backends.add(at)
	}
	ix.tally(j, 1)
}

// leave is the inverse of enter.
func (ix *index) leave(j *joined) {
	for _, k := range ix.keys(j) {
		ix.claims.remove(k, j)
	}
	for _, at := range ix.node.Backends(j.view()) {
		ix.backends.remove(at)
	}
	ix.tally(j, -1)
}

// tally adds a service to the counts of limits and status, or subtracts it.
func (ix *index) tally(j *joined, by int) {
	switch {
	case j.object == nil:
		ix.orphans += by * len(j.slices)
	case !j.object.refuses():
		ix.count += by
	}
	switch {
	case !j.checked():
	case by < 0:
		delete(ix.checked, j.name)
	default:
		ix.checked[j.name] = j
		if len(ix.node.LocalReady(j.view())) == 0 {
			j.localSince = 0
		} else if j.localSince == 0 {
			j.localSince = j.revision
		}
	}
}

// apply replaces the objects of a planned edit. The services that it touches have left the index, and enter it
// afterwards.
func (ix *index) apply(e *edit, now int64) {
	if e.content {
		ix.revision++
		e.Revision = ix.revision
	}
	if e.zone != nil {
		ix.node.Zone = *e.zone
	}
	if e.zone != nil || e.levels != nil {
		for name := range e.touched {
			if j := ix.services[name]; j != nil {
				j.revision, j.updated = ix.revision, now
			}
		}
	}
	for _, k := range e.gone {
		x := ix.object(k)
		j := ix.services[x.of()]
		ix.drop(x)
		j.revision, j.updated = ix.revision, now
	}
	for _, x := range e.puts {
		if old := ix.object(x.key()); old != nil && old.of() != x.of() { // the slice has moved to another service
			j := ix.services[old.of()]
			j.revision, j.updated = ix.revision, now
		}
		ix.put(x)
	}
}

// dropEmpty drops a service that has neither its object nor slices.
func (ix *index) dropEmpty(j *joined) {
	if j.object == nil && len(j.slices) == 0 {
		delete(ix.services, j.name)
	}
}
