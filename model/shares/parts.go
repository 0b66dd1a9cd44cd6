// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package shares

import (
	"maps"
	"slices"
	"time"
)

// Part is one object's request for units of a limit.
type Part struct {
	Tenant Tenant
	Order  Order
	// Local marks an object from a file or a call. Local objects share the units that objects of the API server leave
	// on this node.
	Local bool
	Units int
	// Reserved is the number of elements that the object needs in addition to its units while it gets only a part of
	// them. They are taken from the limit.
	Reserved int
}

// Parts tracks the demand of objects on one limit, and how many units each object gets. Unlike an object of a Ledger,
// an object can use a part of its demand. Levels are computed as in a Ledger. A Parts is not safe for concurrent use.
type Parts[K comparable] struct {
	settings Settings
	limit    Limit
	objects  map[K]*part
	asked    map[Tenant]int
	got      map[Tenant]int
	total    int // asked
	used     int // got

	division *Division // last computation; nil before the first
	aside    int       // reserved elements in the last computation
	computed time.Time
	dirty    bool
}

type part struct {
	Part
	got int
}

// NewParts returns an empty Parts for a limit.
func NewParts[K comparable](s Settings, limit Limit) *Parts[K] {
	return &Parts[K]{
		settings: s, limit: limit, objects: make(map[K]*part), asked: make(map[Tenant]int), got: make(map[Tenant]int),
	}
}

// Limit returns the limit.
func (p *Parts[K]) Limit() Limit { return p.limit }

// Resize sets the size of the limit. The next Level divides it.
func (p *Parts[K]) Resize(size int) {
	if p.limit.Size != size {
		p.limit.Size, p.dirty = size, true
	}
}

// Put adds or replaces an object and returns how many units it gets until the next Level: the units that it had, and
// more if the last levels allow it.
func (p *Parts[K]) Put(k K, x Part) int {
	e := p.objects[k]
	had := 0
	if e != nil {
		had = min(e.got, x.Units)
		p.dirty = p.dirty || e.Tenant != x.Tenant || e.Order != x.Order || e.Local != x.Local || e.Units != x.Units
		p.count(e, -1)
	} else {
		p.dirty = true
	}
	e = &part{Part: x, got: had}
	p.objects[k] = e
	p.count(e, 1)
	if more := min(x.Units-had, p.available(x.Tenant)); more > 0 {
		e.got += more
		p.use(e.Tenant, more)
	}
	return e.got
}

// Delete removes an object if it exists.
func (p *Parts[K]) Delete(k K) {
	if e := p.objects[k]; e != nil {
		p.count(e, -1)
		delete(p.objects, k)
		p.dirty = true
	}
}

// Try calls f, which may call Put and Delete for the keys, and then undoes all changes.
func (p *Parts[K]) Try(keys []K, f func()) {
	before := make(map[K]*part, len(keys))
	for _, k := range keys {
		before[k] = p.objects[k]
	}
	dirty := p.dirty
	f()
	for k, old := range before {
		if e := p.objects[k]; e != nil {
			p.count(e, -1)
			delete(p.objects, k)
		}
		if old != nil {
			p.objects[k] = old
			p.count(old, 1)
		}
	}
	p.dirty = dirty
}

// Got returns how many units an object has.
func (p *Parts[K]) Got(k K) int {
	if e := p.objects[k]; e != nil {
		return e.got
	}
	return 0
}

func (p *Parts[K]) count(e *part, by int) {
	p.total += by * e.Units
	add(p.asked, e.Tenant, by*e.Units)
	p.use(e.Tenant, by*e.got)
}

func (p *Parts[K]) use(t Tenant, n int) {
	p.used += n
	add(p.got, t, n)
}

func add(m map[Tenant]int, t Tenant, n int) {
	if m[t] += n; m[t] == 0 {
		delete(m, t)
	}
}

// size returns the limit without the reserved elements.
func (p *Parts[K]) size() int { return max(0, p.limit.Size-p.aside) }

// available returns how many more units a tenant may use according to the last levels. The sums already include all
// demand.
func (p *Parts[K]) available(t Tenant) int { return p.interim().available(t, p.settings, firstOfParts) }

// firstOfParts returns the part of a tenant before the first computation of the levels.
func firstOfParts(tenants int) int { return max(1, tenants/firstPart) }

// SurelyFit reports whether Put would admit all units that tenants ask for in addition, in any order. If it returns
// false, only Try shows the result. It is much cheaper than Try.
func (p *Parts[K]) SurelyFit(more map[Tenant]int) bool {
	return p.interim().surelyFit(more, p.settings, firstOfParts)
}

// Lacks returns how many units an object that asks for some would need in addition to those that it has.
func (p *Parts[K]) Lacks(k K, units int) int { return max(0, units-p.Got(k)) }

func (p *Parts[K]) interim() interim {
	return interim{size: p.size(), total: p.total, used: p.used, asked: p.asked, got: p.got, division: p.division}
}

// Next returns when Level is due, or the zero time if nothing has changed since the last computation.
func (p *Parts[K]) Next() time.Time {
	if !p.dirty {
		return time.Time{}
	}
	return p.computed.Add(LevelInterval)
}

// Computed returns the time of the last computation of the levels; zero if there was none.
func (p *Parts[K]) Computed() time.Time { return p.computed }

// Due reports whether Level is due.
func (p *Parts[K]) Due(now time.Time) bool {
	return p.dirty && !now.Before(p.computed.Add(LevelInterval))
}

// Reassign updates the tenant of each object to tenantOf(k). Objects keep their units until the next Level.
func (p *Parts[K]) Reassign(tenantOf func(k K) Tenant) {
	for k, e := range p.objects {
		if t := tenantOf(k); t != e.Tenant {
			p.count(e, -1)
			e.Tenant, p.dirty = t, true
			p.count(e, 1)
		}
	}
}

// Plan is a computation of the levels that has not been applied yet.
type Plan[K comparable] struct {
	// Changed maps the objects whose number of units changes to their new number.
	Changed  map[K]int
	division Division
	aside    int
	now      time.Time
}

// maxAside limits the number of times that a division is recomputed because more elements must be reserved.
const maxAside = 4

// Plan computes the levels without applying them. It must be called only after every source of objects and the list
// of Namespaces were complete once.
func (p *Parts[K]) Plan(now time.Time) *Plan[K] {
	if p.interim().allFit() && p.used == p.total && p.limit.Size >= p.aside {
		return &Plan[K]{division: p.divideTenants(), now: now}
	}
	keys := make([]K, 0, len(p.objects))
	entries := make([]*part, 0, len(p.objects))
	most := 0 // upper limit of the reserved elements
	for k, e := range p.objects {
		keys, entries = append(keys, k), append(entries, e)
		most += e.Reserved
	}
	plan := &Plan[K]{Changed: make(map[K]int), now: now}
	var parts []int
	for round := 0; ; round++ {
		parts, plan.division = p.divide(entries, max(0, p.limit.Size-plan.aside))
		need := 0
		for i, e := range entries {
			if parts[i] < e.Units {
				need += e.Reserved
			}
		}
		if need <= plan.aside {
			break
		}
		if plan.aside = need; round == maxAside {
			plan.aside = most
		}
	}
	for i, e := range entries {
		if parts[i] != e.got {
			plan.Changed[keys[i]] = parts[i]
		}
	}
	return plan
}

// divideTenants divides the limit among the tenants if all demand fits.
func (p *Parts[K]) divideTenants() Division {
	asks := make([]Ask, 0, len(p.asked))
	for t, n := range p.asked {
		asks = append(asks, Ask{Tenant: t, Units: n})
	}
	d, _ := DivideParts(p.limit.Size, asks, p.settings, nil)
	return d
}

// divide divides size among the objects of API servers, and then the rest among the local objects.
func (p *Parts[K]) divide(entries []*part, size int) ([]int, Division) {
	parts := make([]int, len(entries))
	var out Division
	used := make(map[Tenant]int)
	for _, local := range []bool{false, true} {
		var asks []Ask
		var who []int
		for i, e := range entries {
			if e.Local == local {
				asks = append(asks, Ask{Tenant: e.Tenant, Order: e.Order, Units: e.Units})
				who = append(who, i)
			}
		}
		if local && len(asks) == 0 {
			break
		}
		d, got := DivideParts(size, asks, p.settings, used)
		for n, i := range who {
			parts[i] = got[n]
		}
		d.include(&out) // the shares of the API server's objects
		out = d
		for t, s := range d.Shares {
			used[t] = s.Admitted
		}
	}
	return parts, out
}

// Enforce applies a plan: each object gets its planned units, unless it asks for fewer by now.
func (p *Parts[K]) Enforce(plan *Plan[K]) {
	p.division, p.aside, p.computed, p.dirty = &plan.division, plan.aside, plan.now, false
	for k, n := range plan.Changed {
		if e := p.objects[k]; e != nil {
			n = min(n, e.Units)
			p.use(e.Tenant, n-e.got)
			e.got = n
		}
	}
}

// Of returns the tenant of an object, the tenant's share, and how many units the object asks for and gets.
func (p *Parts[K]) Of(k K) (t Tenant, s Share, asked, got int) {
	e := p.objects[k]
	if e == nil {
		return Tenant{}, Share{}, 0, 0
	}
	return e.Tenant, p.share(e.Tenant), e.Units, e.got
}

// Usage returns the usage of the limit.
func (p *Parts[K]) Usage() Usage {
	out := Usage{Limit: p.limit, Used: p.used, Asked: p.total}
	for _, t := range slices.SortedFunc(maps.Keys(p.asked), Tenant.Compare) {
		out.Tenants = append(out.Tenants, TenantUsage{Tenant: t, Share: p.share(t)})
	}
	return out
}

// Exceeds reports whether a tenant asks for more than it gets.
func (p *Parts[K]) Exceeds(t Tenant) bool { return p.asked[t] > p.got[t] }

// Refused returns how many of the requested units are not admitted.
func (p *Parts[K]) Refused() int { return p.total - p.used }

func (p *Parts[K]) share(t Tenant) Share {
	s := Share{Asked: p.asked[t], Admitted: p.got[t]}
	if p.division != nil {
		d := p.division.Shares[t]
		s.Guarantee, s.Allotment = d.Guarantee, d.Allotment
	}
	return s
}
