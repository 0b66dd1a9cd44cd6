// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"slices"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/record"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// object is an applied service or slice. It is immutable except for named, share and cut. There may be a hundred
// thousand objects.
type object struct {
	by       *managed.By
	remarks  *remarks // nil: there are none
	revision uint64
	updated  int64 // nanoseconds since 1970
	created  int64 // nanoseconds since 1970: creation time in the object, or time of its first acceptance
	service  *service.Service
	slice    *service.Slice

	named bool // named by its manager in this run
	// share is the number of the slice's backends that fit into the share of its tenant. It is valid only if cut is
	// set.
	share int
	cut   bool // some backends exceed the share
}

// remarks are messages to the author of an object.
type remarks struct {
	notes   []string
	dropped []string
}

func newRemarks(notes, dropped []string) *remarks {
	if len(notes)+len(dropped) == 0 {
		return nil
	}
	return &remarks{notes, dropped}
}

func (r *remarks) get() remarks {
	if r == nil {
		return remarks{}
	}
	return *r
}

// key returns the object's key.
func (x *object) key() service.ObjectKey {
	if x.slice != nil {
		return service.ObjectKey{Kind: service.KindSlice, Name: x.slice.Name}
	}
	return service.ObjectKey{Kind: service.KindService, Name: x.service.Name}
}

// of returns the name of the service that the object is, or belongs to.
func (x *object) of() service.Name {
	if x.slice != nil {
		return x.slice.Of()
	}
	return x.service.Name
}

// createdByAuthor returns the creation time in the object, in nanoseconds since 1970; 0: none.
func (x *object) createdByAuthor() int64 {
	if x.slice != nil {
		return x.slice.Created
	}
	return x.service.Created
}

// says reports whether two objects have the same content.
func (x *object) says(y *object) bool {
	switch {
	case x.service != nil && y.service != nil:
		return x.service.Equal(y.service)
	case x.slice != nil && y.slice != nil:
		return x.slice.Equal(y.slice)
	}
	return false
}

func (x *object) record() record.Record {
	return record.Record{
		Key: x.key(), Source: x.by.Source, Origin: x.by.Origin, Manager: x.by.Manager, Revision: x.revision,
		Updated: x.updated, Created: x.created,
		Notes: x.remarks.get().notes, Dropped: x.remarks.get().dropped, Service: x.service, Slice: x.slice,
	}
}

// joined is a service with its slices. Either may be missing.
type joined struct {
	name     service.Name
	object   *object   // nil: there is no Service object yet
	slices   []*object // sorted by name
	revision uint64    // revision of the last change of the service or of one of its slices
	updated  int64
	// localSince is the revision at which the service got a first ready endpoint on the node; 0: it has none. It is
	// set only for services with a health check port.
	localSince uint64
	// share is the number of units that the service's frontends may use, because the service exceeds the share of its
	// tenant; nil: there is no limit.
	share *int
}

// checked reports whether the service has a health check port.
func (j *joined) checked() bool {
	return j.object != nil && j.object.service.HasFrontends() && j.object.service.HealthCheckNodePort != 0
}

// whole returns the service with all its slices.
func (j *joined) whole() compile.View {
	v := compile.View{}
	if j.object == nil {
		return v
	}
	v.Service = j.object.service
	v.Slices = make([]*service.Slice, len(j.slices))
	for i, x := range j.slices {
		v.Slices[i] = x.slice
	}
	return v
}

// view returns the service without the backends that exceed the share.
func (j *joined) view() compile.View {
	v := j.whole()
	if !slices.ContainsFunc(j.slices, func(x *object) bool { return x.cut }) || v.Service == nil {
		return v
	}
	ports := compile.PortsOf(v.Service)
	v.Slices = v.Slices[:0]
	for _, x := range j.slices {
		if x.cut {
			v.Slices = append(v.Slices, ports.Cut(x.slice, x.share)...)
		} else {
			v.Slices = append(v.Slices, x.slice)
		}
	}
	return v
}

func byName(a, b *object) int { return a.slice.Name.Compare(b.slice.Name) }

// newObject returns the object of a decoded manifest.
func newObject(m *manifest.Object, by *managed.By) *object {
	x := &object{by: by, remarks: newRemarks(m.Notes, m.Dropped)}
	if m.Service != nil {
		x.service = m.Service.Clone()
	} else {
		x.slice = m.Slice.Clone()
	}
	return x
}

// refusing returns the object in the form that is used if it exceeds limits.services: its addresses refuse
// connections.
func (x *object) refusing() *object {
	why := ExceedsShare + ": it exceeds the tenant's share of limits.services: cluster IPs, load balancer addresses " +
		"and node ports refuse connections; external addresses are not served"
	r := x.remarks.get()
	notes := append(slices.Clone(r.notes), why)
	return &object{by: x.by, remarks: newRemarks(notes, r.dropped), service: x.service.Refusing()}
}

// refuses reports whether the object is a service that exceeds limits.services.
func (x *object) refuses() bool { return x.service != nil && x.service.ExceedsShare }

// same reports whether replacing x by y would change nothing.
func (x *object) same(y *object) bool {
	a, b := x.remarks.get(), y.remarks.get()
	return x.says(y) && *x.by == *y.by && slices.Equal(a.notes, b.notes) && slices.Equal(a.dropped, b.dropped)
}
