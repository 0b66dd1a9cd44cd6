// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/sluice-net/sluice/kit/keymutex"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Index holds the records of the node's endpoints in memory, indexed by endpoint ID, address,
// network namespace and host end, and the locks of their owners. It is created before the parts of
// policies and services that need endpoints, and only package lifecycle changes it. All methods may
// be called concurrently.
type Index struct {
	// locks has a lock for each owner. A call that changes an endpoint or its record holds the lock of the owner,
	// and takes it before mu.
	locks keymutex.Mutexes[workload.Owner]

	mu         sync.Mutex                                       // also guards fields of other types in this package
	records    map[workload.Owner]endpoint.Record               // guarded by mu; includes tombstones
	states     map[workload.Owner]endpoint.State                // guarded by mu; of live endpoints
	holders    map[netip.Addr]workload.Owner                    // guarded by mu; of live endpoints
	slots      map[uint16]workload.Owner                        // guarded by mu
	namespaces map[endpoint.NamespaceID]map[workload.Owner]bool // guarded by mu
	deleted    map[workload.Owner]bool                          // guarded by mu; they have no ID and no namespace
	byIndex    map[uint32]workload.Owner                        // guarded by mu; host ends of ready endpoints
	unreadable map[string]endpoint.Unreadable                   // guarded by mu; invalid record files, by name
}

// NewIndex returns an empty index.
func NewIndex() *Index {
	return &Index{
		records: map[workload.Owner]endpoint.Record{}, states: map[workload.Owner]endpoint.State{},
		holders: map[netip.Addr]workload.Owner{}, slots: map[uint16]workload.Owner{},
		namespaces: map[endpoint.NamespaceID]map[workload.Owner]bool{}, deleted: map[workload.Owner]bool{},
		byIndex: map[uint32]workload.Owner{}, unreadable: map[string]endpoint.Unreadable{},
	}
}

// view returns the public view of a record, without its policy.
func view(r endpoint.Record, s endpoint.State) endpoint.Endpoint {
	return endpoint.Endpoint{
		Spec: r.Spec, State: s, Slot: r.Slot, Identity: r.Identity, Given: r.LastGiven(), Ports: r.Ports(),
		Device: r.Device, Created: r.Created,
	}
}

// Get returns one endpoint as its record states, or ErrNotFound.
func (x *Index) Get(o workload.Owner) (endpoint.Endpoint, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	r, err := x.get(o)
	if err != nil {
		return endpoint.Endpoint{}, err
	}
	return view(r, x.states[o]), nil
}

// get returns the record of a live endpoint. mu is held.
func (x *Index) get(o workload.Owner) (endpoint.Record, error) {
	r, ok := x.records[o]
	if !ok || r.Phase == endpoint.PhaseDeleted {
		return endpoint.Record{}, fmt.Errorf("%s: %w", o, endpoint.ErrNotFound)
	}
	return r, nil
}

// List returns a consistent snapshot of all endpoints as their records state, sorted by ID and
// owner.
func (x *Index) List() []endpoint.Endpoint {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.list(view)
}

// list returns all live endpoints, converted by view. mu is held.
func (x *Index) list(view func(endpoint.Record, endpoint.State) endpoint.Endpoint) []endpoint.Endpoint {
	var es []endpoint.Endpoint
	for o, r := range x.records {
		if r.Phase != endpoint.PhaseDeleted {
			es = append(es, view(r, x.states[o]))
		}
	}
	slices.SortFunc(es, func(a, b endpoint.Endpoint) int {
		return cmp.Or(cmp.Compare(a.Slot, b.Slot), cmp.Compare(a.Spec.Owner.String(), b.Spec.Owner.String()))
	})
	return es
}

// SpecOfSlot returns the request of the endpoint with an ID.
func (x *Index) SpecOfSlot(slot uint16) (endpoint.Spec, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	o, ok := x.slots[slot]
	return x.records[o].Spec, ok
}

// LabelsOf returns the labels of an identity that an endpoint of this node has.
func (x *Index) LabelsOf(identity uint32) ([]label.Label, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, r := range x.records {
		if r.Phase != endpoint.PhaseDeleted && r.Identity.Number == identity && identity != 0 {
			return r.Identity.Labels, true
		}
	}
	return nil, false
}

// OwnerOf returns the owner of an endpoint by its Owner.Key.
func (x *Index) OwnerOf(key string) (workload.Owner, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for o := range x.records {
		if o.Key() == key {
			return o, true
		}
	}
	return workload.Owner{}, false
}

func (x *Index) record(o workload.Owner) (endpoint.Record, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	r, ok := x.records[o]
	return r, ok
}

// mayShare reports whether another ready endpoint is in the namespace of r.
func (x *Index) mayShare(r endpoint.Record) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	for o := range x.namespaces[r.Namespace] {
		if o != r.Spec.Owner && x.records[o].Phase == endpoint.PhaseReady {
			return true
		}
	}
	return false
}

// ownerOfLink returns the owner of the host end with an interface index.
func (x *Index) ownerOfLink(ifindex uint32) (workload.Owner, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	o, ok := x.byIndex[ifindex]
	return o, ok
}

// ownerOfAddr returns the owner of the endpoint that has an address.
func (x *Index) ownerOfAddr(a netip.Addr) (workload.Owner, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	o, ok := x.holders[a]
	return o, ok
}

// disconnecting reports whether a deletion of the owner has begun. If the caller holds the owner's
// mutex, the deletion has failed.
func (x *Index) disconnecting(o workload.Owner) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.states[o] == endpoint.Disconnecting
}

func (x *Index) live() []endpoint.Record {
	x.mu.Lock()
	defer x.mu.Unlock()
	var rs []endpoint.Record
	for _, r := range x.records {
		if r.Phase != endpoint.PhaseDeleted {
			rs = append(rs, r)
		}
	}
	slices.SortFunc(rs, func(a, b endpoint.Record) int {
		return cmp.Or(cmp.Compare(a.Slot, b.Slot), cmp.Compare(a.Spec.Owner.String(), b.Spec.Owner.String()))
	})
	return rs
}

func (x *Index) tombstones() []workload.Owner {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.Collect(maps.Keys(x.deleted))
}

// add replaces the owner's record. mu is held.
func (x *Index) add(r endpoint.Record, s endpoint.State) {
	o := r.Spec.Owner
	x.remove(o)
	x.records[o] = r
	if r.Phase == endpoint.PhaseDeleted {
		x.deleted[o] = true
		return
	}
	if r.Slot != 0 {
		x.slots[r.Slot] = o
	}
	if x.namespaces[r.Namespace] == nil {
		x.namespaces[r.Namespace] = map[workload.Owner]bool{}
	}
	x.namespaces[r.Namespace][o] = true
	x.states[o] = s
	for _, a := range r.Spec.Addrs {
		x.holders[a] = o
	}
	if r.Device.HostIndex != 0 {
		x.byIndex[r.Device.HostIndex] = o
	}
}

// remove removes everything about the owner. mu is held.
func (x *Index) remove(o workload.Owner) {
	r, ok := x.records[o]
	if !ok {
		return
	}
	delete(x.records, o)
	delete(x.states, o)
	delete(x.deleted, o)
	if x.slots[r.Slot] == o {
		delete(x.slots, r.Slot)
	}
	delete(x.namespaces[r.Namespace], o)
	if len(x.namespaces[r.Namespace]) == 0 {
		delete(x.namespaces, r.Namespace)
	}
	for _, a := range r.Spec.Addrs {
		if x.holders[a] == o {
			delete(x.holders, a)
		}
	}
	if x.byIndex[r.Device.HostIndex] == o {
		delete(x.byIndex, r.Device.HostIndex)
	}
}
