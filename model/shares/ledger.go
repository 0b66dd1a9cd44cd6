// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package shares

import (
	"maps"
	"slices"
	"time"
)

// LevelInterval is the shortest interval between two computations of the levels.
const LevelInterval = 10 * time.Second

// firstPart is the divisor before the first computation of the levels: each tenant may use 1/firstPart of what all
// tenants share.
const firstPart = 8

// maxRounds limits the number of times that the limits are divided again because objects that another limit refuses
// leave units free.
const maxRounds = 8

// Limit is a limit that tenants share.
type Limit struct {
	Name string // as in docs/reference/bounds.md, for example "policies"
	Size int
}

// Object is the demand of an object on every limit of a ledger.
type Object struct {
	Tenant Tenant
	Order  Order
	// Local marks an object from a file or a call. Local objects share the units that objects of the API server leave
	// on this node.
	Local bool
	// Units are the demands on the limits, in the order of NewLedger.
	Units []int
}

// Ledger tracks the demand of one process's objects on its limits, and decides which objects are admitted. An object
// is admitted if it fits into every limit that it needs. If it is refused, its demand on the other limits does not
// count.
//
// Level computes the levels, and only from complete listings. Before that, and between two computations, Put admits
// objects according to the last levels. A Ledger is not safe for concurrent use.
type Ledger[K comparable] struct {
	settings Settings
	limits   []Limit
	objects  map[K]*entry

	asked    []map[Tenant]int // per limit, for all objects
	admitted []map[Tenant]int
	total    []int // asked, by limit
	used     []int // admitted

	divisions []Division // last computation; nil before the first
	computed  time.Time
	dirty     bool
}

type entry struct {
	Object
	refused int // 1 + index of the refusing limit; 0: admitted
}

// NewLedger returns an empty ledger for limits that objects need together.
func NewLedger[K comparable](s Settings, limits ...Limit) *Ledger[K] {
	l := &Ledger[K]{settings: s, limits: slices.Clone(limits), objects: make(map[K]*entry)}
	l.total, l.used = make([]int, len(limits)), make([]int, len(limits))
	for range limits {
		l.asked = append(l.asked, make(map[Tenant]int))
		l.admitted = append(l.admitted, make(map[Tenant]int))
	}
	return l
}

// Put adds or replaces an object and reports whether it is admitted. A refused object
// stays in the ledger, and may be admitted by a later Level.
func (l *Ledger[K]) Put(k K, o Object) bool {
	l.remove(k)
	e := l.add(k, o)
	for i, n := range o.Units {
		if !l.fits(i, o.Tenant, n) {
			e.refused = i + 1
			break
		}
	}
	l.use(e, 1)
	return e.refused == 0
}

// Restore adds an object that was admitted or refused before the process started. The decision holds until the next
// Level.
func (l *Ledger[K]) Restore(k K, o Object, admitted bool) {
	l.remove(k)
	e := l.add(k, o)
	if !admitted {
		e.refused = 1
	}
	l.use(e, 1)
}

// add adds a new object without a decision.
func (l *Ledger[K]) add(k K, o Object) *entry {
	e := &entry{Object: o}
	l.objects[k] = e
	for i, n := range o.Units {
		l.asked[i][o.Tenant] += n
		l.total[i] += n
	}
	l.dirty = true
	return e
}

// Delete removes an object if it exists.
func (l *Ledger[K]) Delete(k K) {
	if l.remove(k) {
		l.dirty = true
	}
}

func (l *Ledger[K]) remove(k K) bool {
	e := l.objects[k]
	if e == nil {
		return false
	}
	l.use(e, -1)
	for i, n := range e.Units {
		l.total[i] -= n
		if l.asked[i][e.Tenant] -= n; l.asked[i][e.Tenant] == 0 {
			delete(l.asked[i], e.Tenant)
		}
	}
	delete(l.objects, k)
	return true
}

// use adds an admitted object to the sums, or removes it if by is -1.
func (l *Ledger[K]) use(e *entry, by int) {
	if e.refused != 0 {
		return
	}
	for i, n := range e.Units {
		l.used[i] += by * n
		if l.admitted[i][e.Tenant] += by * n; l.admitted[i][e.Tenant] == 0 {
			delete(l.admitted[i], e.Tenant)
		}
	}
}

// fits reports whether a tenant may use n more units of a limit according to the last levels. asked already includes
// all objects.
func (l *Ledger[K]) fits(limit int, t Tenant, n int) bool {
	return n == 0 || n <= l.interim(limit).available(t, l.settings, firstOfObjects)
}

// SurelyFit reports whether Put would admit new objects with these units of one limit, in any order. If it returns
// false, only Put shows the result.
func (l *Ledger[K]) SurelyFit(limit int, more map[Tenant]int) bool {
	return l.interim(limit).surelyFit(more, l.settings, firstOfObjects)
}

func (l *Ledger[K]) interim(limit int) interim {
	u := interim{
		size: l.limits[limit].Size, total: l.total[limit], used: l.used[limit],
		asked: l.asked[limit], got: l.admitted[limit],
	}
	if l.divisions != nil {
		u.division = &l.divisions[limit]
	}
	return u
}

// firstOfObjects returns the part of a tenant before the first computation of the levels.
func firstOfObjects(tenants int) int {
	if tenants < firstPart {
		return tenants // too small to divide
	}
	return tenants / firstPart
}

// Next returns when Level is due, or the zero time if nothing has changed since the last computation.
func (l *Ledger[K]) Next() time.Time {
	if !l.dirty {
		return time.Time{}
	}
	return l.computed.Add(LevelInterval)
}

// Reassign updates the tenant of each object to tenantOf(k). Admissions change only at the next Level.
func (l *Ledger[K]) Reassign(tenantOf func(k K) Tenant) {
	for k, e := range l.objects {
		if t := tenantOf(k); t != e.Tenant {
			o, admitted := e.Object, e.refused == 0
			o.Tenant = t
			l.Restore(k, o, admitted)
		}
	}
}

// Level recomputes the levels and returns the objects that lose their admission and the objects that gain it. The
// caller must withdraw the former before it applies the latter. It must be called only after every source of objects
// and the list of Namespaces were complete once.
func (l *Ledger[K]) Level(now time.Time) (withdrawn, admitted []K) {
	l.computed, l.dirty = now, false
	keys := make([]K, 0, len(l.objects))
	entries := make([]*entry, 0, len(l.objects))
	for k, e := range l.objects {
		keys, entries = append(keys, k), append(entries, e)
	}
	refused, divisions := l.divide(entries)
	l.divisions = divisions
	for i, e := range entries {
		if (refused[i] == 0) == (e.refused == 0) {
			e.refused = refused[i]
			continue
		}
		l.use(e, -1)
		if e.refused = refused[i]; e.refused != 0 {
			withdrawn = append(withdrawn, keys[i])
		} else {
			admitted = append(admitted, keys[i])
		}
		l.use(e, 1)
	}
	return withdrawn, admitted
}

// divide divides every limit: first among the objects of API servers, then the rest among the local objects. refused
// holds 1 + the index of the limit that refuses the object, or 0.
func (l *Ledger[K]) divide(entries []*entry) (refused []int, divisions []Division) {
	refused = make([]int, len(entries))
	used := make([]map[Tenant]int, len(l.limits))
	for _, local := range []bool{false, true} {
		var of []int
		for i, e := range entries {
			if e.Local == local {
				of = append(of, i)
			}
		}
		if local && len(of) == 0 {
			break
		}
		next := l.divideAmong(entries, of, refused, used)
		for i := range divisions { // for the API server's objects
			next[i].include(&divisions[i])
		}
		divisions = next
		for i := range used {
			used[i] = make(map[Tenant]int)
			for t, s := range divisions[i].Shares {
				used[i][t] = s.Admitted
			}
		}
	}
	return refused, divisions
}

// divideAmong divides one limit after another among the objects that no other limit refuses, until nothing changes.
func (l *Ledger[K]) divideAmong(entries []*entry, of, refused []int, used []map[Tenant]int) []Division {
	divisions := make([]Division, len(l.limits))
	for round := 0; ; round++ {
		changed := false
		for limit := range l.limits {
			var asks []Ask
			var who []int
			for _, i := range of {
				// In the last round no refused object is admitted again, so that the result fits into every limit.
				r := refused[i]
				if entries[i].Units[limit] > 0 && (r == 0 || r == limit+1 && round < maxRounds) {
					asks = append(asks, Ask{Tenant: entries[i].Tenant, Order: entries[i].Order, Units: entries[i].Units[limit]})
					who = append(who, i)
				}
			}
			divisions[limit] = Divide(l.limits[limit].Size, asks, l.settings, used[limit])
			for n, i := range who {
				r := 0
				if !divisions[limit].Admitted[n] {
					r = limit + 1
				}
				changed = changed || r != refused[i]
				refused[i] = r
			}
		}
		if !changed || round == maxRounds {
			break
		}
	}
	// Units of objects that a later limit refused are not in use.
	for limit := range divisions {
		for t, s := range divisions[limit].Shares {
			s.Admitted, s.Asked = 0, 0
			divisions[limit].Shares[t] = s
		}
		for _, i := range of {
			t := entries[i].Tenant
			s := divisions[limit].Shares[t]
			if s.Asked += entries[i].Units[limit]; refused[i] == 0 {
				s.Admitted += entries[i].Units[limit]
			}
			divisions[limit].Shares[t] = s
		}
	}
	return divisions
}

// Admitted reports whether the object exists and is admitted.
func (l *Ledger[K]) Admitted(k K) bool {
	e := l.objects[k]
	return e != nil && e.refused == 0
}

// Object returns an object as it was added, and whether it is admitted. ok is false if it does not exist.
func (l *Ledger[K]) Object(k K) (o Object, admitted, ok bool) {
	e := l.objects[k]
	if e == nil {
		return Object{}, false, false
	}
	return e.Object, e.refused == 0, true
}

// Free reports whether the given number of units of each limit is free.
func (l *Ledger[K]) Free(units []int) bool {
	for i, n := range units {
		if n > l.limits[i].Size-l.used[i] {
			return false
		}
	}
	return true
}

// Refused returns the limit that refuses an object, and the share of the object's tenant. ok is false if the object
// is admitted or does not exist.
func (l *Ledger[K]) Refused(k K) (limit Limit, tenant Tenant, share Share, ok bool) {
	e := l.objects[k]
	if e == nil || e.refused == 0 {
		return Limit{}, Tenant{}, Share{}, false
	}
	limit = l.limits[e.refused-1]
	return limit, e.Tenant, l.share(e.refused-1, e.Tenant), true
}

// Usage is the usage of one limit by all tenants.
type Usage struct {
	Limit   Limit
	Used    int // admitted
	Asked   int
	Tenants []TenantUsage // in the order of Tenant.Compare
}

// TenantUsage is the usage of a limit by one tenant.
type TenantUsage struct {
	Tenant Tenant
	Share
}

// Usage returns the usage of every limit, in the order of NewLedger.
func (l *Ledger[K]) Usage() []Usage {
	out := make([]Usage, len(l.limits))
	for i, limit := range l.limits {
		out[i] = Usage{Limit: limit, Used: l.used[i], Asked: l.total[i]}
		for _, t := range slices.SortedFunc(maps.Keys(l.asked[i]), Tenant.Compare) {
			out[i].Tenants = append(out[i].Tenants, TenantUsage{Tenant: t, Share: l.share(i, t)})
		}
	}
	return out
}

// share returns a tenant's present share and its allotment according to the last levels.
func (l *Ledger[K]) share(limit int, t Tenant) Share {
	s := Share{Asked: l.asked[limit][t], Admitted: l.admitted[limit][t]}
	if l.divisions != nil {
		d := l.divisions[limit].Shares[t]
		s.Guarantee, s.Allotment = d.Guarantee, d.Allotment
	}
	return s
}
