// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policyhistory"
)

// slot is the policy state of an endpoint in the kernel.
type slot struct {
	nodetable.Binding
	audit bool // as it is in the kernel
}

// subject is an identity of endpoints.
type subject struct {
	users int       // endpoints, and creations in progress
	until time.Time // when it is dropped, if it has no users
	// ready: both tables are in the kernel, and were received in this subscription or adopted at
	// the start.
	ready           bool
	egress, ingress nodetable.ID
	revision        uint64
	rules           [2][][]policytable.Source
	proxies         [2]map[uint16]uint16
	refusal         string
	lacks           bool // the kernel has only part of a table's rules
	dirty           bool // the tables that the subject is bound to have changed
}

// endpoints holds the node's endpoints by ID, and their identities: the subjects whose tables this
// process subscribes to. A subject without endpoints stays for a while. The lock of the Applier
// guards it.
type endpoints struct {
	now      func() time.Time
	linger   time.Duration
	slots    map[uint16]*slot
	subjects map[uint32]*subject
	wake     chan struct{} // has a token when the subscription may have changed
}

func newEndpoints(now func() time.Time, linger time.Duration) *endpoints {
	return &endpoints{
		now: now, linger: linger, slots: map[uint16]*slot{}, subjects: map[uint32]*subject{},
		wake: make(chan struct{}, 1),
	}
}

// subject returns the subject of an identity, and creates it if needed. A new one has the tables of
// an endpoint that waits for its policy.
func (e *endpoints) subject(id uint32) (s *subject, fresh bool) {
	if s := e.subjects[id]; s != nil {
		return s, false
	}
	s = &subject{egress: nodetable.Pending, ingress: nodetable.Pending}
	e.subjects[id] = s
	e.subscriptionChanged()
	return s, true
}

// use keeps a subject until the matching release.
func (s *subject) use() {
	s.users++
	s.until = time.Time{}
}

// release ends one use of a subject.
func (e *endpoints) release(s *subject) {
	if s.users--; s.users == 0 {
		s.until = e.now().Add(e.linger)
		e.subscriptionChanged()
	}
}

// subscriptionChanged wakes the goroutine that updates the subscription.
func (e *endpoints) subscriptionChanged() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// wanted returns the current subscription.
func (e *endpoints) wanted() (subjects map[uint32]struct{}, locations map[netip.Addr]uint32) {
	now := e.now()
	subjects, locations = map[uint32]struct{}{}, map[netip.Addr]uint32{}
	for id, s := range e.subjects {
		if s.users == 0 && !now.Before(s.until) {
			delete(e.subjects, id)
			continue
		}
		subjects[id] = struct{}{}
	}
	e.letGo(subjects)
	for _, at := range e.slots {
		for _, addr := range at.Addrs {
			locations[addr] = at.Identity
		}
	}
	return subjects, locations
}

// letGo drops subjects without endpoints, the oldest first, until the number of subjects is within the limit of a
// subscription.
func (e *endpoints) letGo(subjects map[uint32]struct{}) {
	if len(subjects) <= maxSubjects {
		return
	}
	var idle []uint32
	for id, s := range e.subjects {
		if s.users == 0 {
			idle = append(idle, id)
		}
	}
	slices.SortFunc(idle, func(x, y uint32) int { return e.subjects[x].until.Compare(e.subjects[y].until) })
	for _, id := range idle[:min(len(idle), len(subjects)-maxSubjects)] {
		delete(e.subjects, id)
		delete(subjects, id)
	}
}

// gone marks a subject that the service has removed. Endpoints with this identity keep their
// tables.
func (e *endpoints) gone(id uint32) {
	s := e.subjects[id]
	if s == nil {
		return
	}
	s.ready, s.dirty, s.refusal, s.lacks = false, false, "", false
	if s.users == 0 && s.until.IsZero() {
		delete(e.subjects, id)
	}
}

// slotsOf returns the IDs of the endpoints of a subject, sorted.
func (e *endpoints) slotsOf(id uint32) (list []uint16) {
	for n, at := range e.slots {
		if at.Identity == id {
			list = append(list, n)
		}
	}
	slices.Sort(list)
	return list
}

// evaluatedBy returns the IDs of the endpoints that a table evaluates.
func (e *endpoints) evaluatedBy(t nodetable.ID) (list []uint16) {
	for n, at := range e.slots {
		if at.Egress == t || at.Ingress == t {
			list = append(list, n)
		}
	}
	return list
}

// used returns the tables that evaluate an endpoint, or are ready for one, with the IDs of the
// endpoints that they evaluate, once for each direction.
func (e *endpoints) used() map[nodetable.ID][]uint16 {
	out := map[nodetable.ID][]uint16{}
	for n, at := range e.slots {
		out[at.Egress] = append(out[at.Egress], n)
		out[at.Ingress] = append(out[at.Ingress], n)
	}
	for _, s := range e.subjects {
		for _, t := range []nodetable.ID{s.egress, s.ingress} {
			if _, there := out[t]; s.ready && !there {
				out[t] = nil
			}
		}
	}
	return out
}

func (e *endpoints) policyOf(n uint16) policyhistory.Policy {
	at := e.slots[n]
	p := policyhistory.Policy{Egress: at.Egress, Ingress: at.Ingress, Epoch: at.Epoch, Audit: at.audit}
	if s := e.subjects[at.Identity]; s != nil {
		p.Refusal = s.refusal
		if (s.ready || s.refusal != "") && s.egress == at.Egress && s.ingress == at.Ingress {
			p.Rules, p.Proxies = s.rules, s.proxies
			if s.ready {
				p.Revision = s.revision
			}
		}
	}
	return p
}
