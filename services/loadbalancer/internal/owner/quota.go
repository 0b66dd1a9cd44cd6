// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/source"
)

// waiting is an object that waits for capacity in the share of its tenant.
type waiting struct {
	manifest.Object
	source  string
	created int64 // time of its first delivery, if the object has no creation time
}

// quota divides limits.services and limits.endpointSlices among tenants. Objects of an API server that exceed the share
// of their tenant wait. It belongs to the loop.
type quota struct {
	index    *index
	sources  *sources
	ledger   *shares.Ledger[service.ObjectKey]
	waiting  map[service.ObjectKey]waiting
	levelled bool // the levels were computed once
}

func newQuota(config *Config, ix *index, s *sources) *quota {
	return &quota{
		index: ix, sources: s, waiting: make(map[service.ObjectKey]waiting),
		ledger: shares.NewLedger[service.ObjectKey](config.Shares,
			shares.Limit{Name: LimitServices, Size: config.Limits.Services},
			shares.Limit{Name: LimitSlices, Size: config.Limits.Slices}),
	}
}

// restore counts the objects at the start.
func (q *quota) restore() {
	q.index.objects(func(x *object) { q.ledger.Restore(x.key(), q.counted(x, x.created), !x.refuses()) })
}

// counted returns the object's entry in the limits of services and slices.
func (q *quota) counted(x *object, created int64) shares.Object {
	k := x.key()
	o := shares.Object{
		Tenant: q.index.tenant(k.Name), Local: !source.Of(x.by.Source).Shared, Units: []int{1, 0},
		Order: shares.Order{Created: time.Unix(0, created), Namespace: k.Namespace, Name: k.Name.Name},
	}
	if x.slice != nil {
		o.Units = []int{0, 1}
	}
	return o
}

// count admits a new object of an API server. If there is no capacity in the share of its tenant, count returns the
// reason for which the object must wait.
func (q *quota) count(m *manifest.Object, x *object, now time.Time) (why string) {
	k := x.key()
	created := cmp.Or(x.createdByAuthor(), q.waiting[k].created, now.UnixNano())
	q.waiting[k] = waiting{*m, x.by.Source, created} // until it is applied
	if q.ledger.Put(k, q.counted(x, created)) {
		return ""
	}
	return q.whyWaiting(k)
}

func (q *quota) whyWaiting(k service.ObjectKey) string {
	limit, tenant, share, _ := q.ledger.Refused(k)
	return fmt.Sprintf("%s: %s asks for %d of %d (limits.%s) and has %d", ExceedsShare, tenant, share.Asked, limit.Size,
		limit.Name, share.Admitted)
}

// waitingSince returns when the source first delivered a waiting object; 0: the object is not waiting.
func (q *quota) waitingSince(k service.ObjectKey) int64 { return q.waiting[k].created }

// stopWaiting drops the version of an object that waits for capacity, because a newer version arrived that is
// unreadable. The object stays in the counts.
func (q *quota) stopWaiting(k service.ObjectKey) { delete(q.waiting, k) }

// keepWaiting drops the waiting objects that a listing does not contain.
func (q *quota) keepWaiting(listed map[service.ObjectKey]struct{}) {
	for k := range q.waiting {
		if _, ok := listed[shadowed(k)]; !ok {
			q.uncount(k)
		}
	}
}

// uncount removes an object from the counts.
func (q *quota) uncount(k service.ObjectKey) {
	q.ledger.Delete(k)
	delete(q.waiting, k)
}

// tryCount returns an error if the objects of a file or a call do not fit into the share of their tenant.
func (q *quota) tryCount(e *edit) error {
	if q.surelyFit(e) {
		return nil
	}
	var tried []service.ObjectKey
	for _, k := range e.gone {
		q.ledger.Delete(k)
	}
	defer func() {
		for _, k := range tried {
			q.ledger.Delete(k)
		}
		for _, k := range e.gone {
			x := q.index.object(k)
			q.ledger.Restore(k, q.counted(x, x.created), true)
		}
	}()
	for _, x := range e.puts {
		k := x.key()
		if q.index.object(k) != nil || q.ledger.Admitted(k) {
			continue
		}
		tried = append(tried, k)
		if !q.ledger.Put(k, q.counted(x, x.created)) {
			return fmt.Errorf("%w: %s: %s", failure.ErrLimit, k, q.whyWaiting(k))
		}
	}
	return nil
}

// surelyFit is a cheap check before tryCount. True means that the new objects of an edit fit into the shares of their
// tenants. False means that tryCount must decide.
func (q *quota) surelyFit(e *edit) bool {
	var more [2]map[shares.Tenant]int // services and slices, as in newQuota
	for limit := range more {
		more[limit] = make(map[shares.Tenant]int)
	}
	for _, x := range e.puts {
		k := x.key()
		if q.index.object(k) != nil {
			continue
		}
		limit := 0
		if x.slice != nil {
			limit = 1
		}
		more[limit][q.index.tenant(k.Name)]++
	}
	return q.ledger.SurelyFit(0, more[0]) && q.ledger.SurelyFit(1, more[1])
}

// recount updates the counts after an edit was applied.
func (q *quota) recount(e *edit) {
	for _, k := range e.gone {
		q.uncount(k)
	}
	for _, m := range e.waits {
		x := newObject(&m.Object, &managed.By{Source: m.source})
		q.ledger.Restore(m.Key, q.counted(x, m.created), false)
		q.waiting[m.Key] = m
		q.sources.refuse(Refused{Key: m.Key, Source: m.source, Origin: m.Key.String(), Err: q.whyWaiting(m.Key)})
	}
	for _, x := range e.puts {
		k := x.key()
		if x.refuses() {
			continue // it waits
		}
		q.ledger.Restore(k, q.counted(x, x.created), true)
		if m, waited := q.waiting[k]; waited {
			delete(q.waiting, k)
			q.sources.accept(m.source, k.String())
		}
	}
}

// due reports whether computing levels now could change them.
func (q *quota) due() bool { return (!q.levelled || len(q.waiting) > 0) && !q.ledger.Next().IsZero() }

// usage returns the tenants' use of the limits.
func (q *quota) usage() []shares.Usage { return q.ledger.Usage() }

// reassign updates the tenants of all objects.
func (q *quota) reassign() {
	q.ledger.Reassign(func(k service.ObjectKey) shares.Tenant { return q.index.tenant(k.Name) })
}

// level computes the levels of services and slices. It adds the objects that thereby lose or get capacity to an edit.
// undo reverts the levels.
func (q *quota) level(e *edit, now time.Time) (undo func()) {
	if q.levelled && len(q.waiting) == 0 {
		return func() {} // everything fits
	}
	q.levelled = true
	withdrawn, admitted := q.ledger.Level(now)
	var changed []func()
	for _, k := range withdrawn {
		x := q.index.object(k)
		if x == nil || !source.Of(x.by.Source).Waits {
			continue
		}
		if x.refuses() {
			continue
		}
		if x.slice != nil {
			e.gone = append(e.gone, k)
		} else {
			e.puts = append(e.puts, x.refusing())
		}
		m := manifest.Object{Key: k, Service: x.service, Slice: x.slice, Notes: x.remarks.get().notes}
		e.waits = append(e.waits, waiting{m, x.by.Source, x.created})
		counted := q.counted(x, x.created)
		changed = append(changed, func() { q.ledger.Restore(k, counted, true) })
	}
	for _, k := range admitted {
		m, ok := q.waiting[k]
		if !ok {
			continue
		}
		x := newObject(&m.Object, &managed.By{Source: m.source})
		if other := q.index.object(k); other != nil && (!other.refuses() || other.by.Source != m.source) {
			continue // another source has the object by now
		}
		e.puts = append(e.puts, x)
		counted := q.counted(x, m.created)
		changed = append(changed, func() { q.ledger.Restore(k, counted, false) })
	}
	slices.SortFunc(e.gone, service.ObjectKey.Compare)
	slices.SortFunc(e.puts, func(a, b *object) int { return a.key().Compare(b.key()) })
	return func() {
		for _, f := range changed {
			f()
		}
	}
}
