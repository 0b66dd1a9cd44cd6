// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package shares

import (
	"cmp"
	"container/heap"
	"slices"
	"strings"
	"time"
)

// Order is the order in which a tenant's objects are admitted: oldest first. The other fields make the order total.
type Order struct {
	Created              time.Time
	Namespace, Name, UID string
	// Index orders the parts of one object that have separate asks, such as the frontends of a Service.
	Index int
}

// Compare orders objects by creation time, namespace, name, uid and index.
func (o Order) Compare(p Order) int {
	return cmp.Or(o.Created.Compare(p.Created), strings.Compare(o.Namespace, p.Namespace),
		strings.Compare(o.Name, p.Name), strings.Compare(o.UID, p.UID), cmp.Compare(o.Index, p.Index))
}

// Ask is the demand of one object on one limit.
type Ask struct {
	Tenant Tenant
	Order  Order
	Units  int
}

// Share is a tenant's part of a limit, in units of the limit.
type Share struct {
	Asked     int
	Admitted  int
	Guarantee int
	// Allotment is the most that the tenant may use: all that it asked for, or its guarantee plus the level of its
	// group.
	Allotment int
}

// Division is the result of dividing a limit.
type Division struct {
	// Admitted reports for each ask, by index, whether the object is admitted.
	Admitted []bool
	Shares   map[Tenant]Share
	// Tenants is the part of the limit that all tenants except system share.
	Tenants int
	// Levels are the maximums of tenants without a guarantee, by group: labelled tenants, and namespaces without the
	// label.
	Levels [2]int
}

const (
	groupLabelled = iota
	groupOthers
	groups
)

func (t Tenant) group() int {
	if t.labelled() {
		return groupLabelled
	}
	return groupOthers
}

// Divide divides a limit among the tenants that ask for it. The result depends only on the arguments, and not on the
// order of asks.
//
// System gets what it asks for, up to half of the limit. The other tenants share the rest, except for the last tenth of
// the limit, which is kept for system. Guarantees are served next. Labelled tenants, and namespaces without the label,
// each get half of the remainder, plus what the other group does not use. Within a group, the level L is the largest
// number for which the sum of min(asked, L) fits. A tenant that asks for more gets its oldest objects up to L. The
// remaining units go to the oldest objects that fit, including objects of tenants whose objects are all larger than L.
//
// used holds the units that earlier divisions of the same limit admitted, by tenant; Divide does not take them away.
// Objects of an API server are divided first and separately, with used nil, so that all nodes with the same limit
// compute the same result.
func Divide(limit int, asks []Ask, s Settings, used map[Tenant]int) Division {
	return divide(limit, asks, nil, s, used)
}

// DivideParts divides a limit like Divide, but an object can use a part of its ask: an ask of n units is treated as n
// consecutive asks of one unit. parts holds the units that each ask gets.
func DivideParts(limit int, asks []Ask, s Settings, used map[Tenant]int) (d Division, parts []int) {
	parts = make([]int, len(asks))
	return divide(limit, asks, parts, s, used), parts
}

func divide(limit int, asks []Ask, parts []int, s Settings, used map[Tenant]int) Division {
	d := Division{Admitted: make([]bool, len(asks)), Shares: make(map[Tenant]Share)}
	tenants := make(map[Tenant]*tenant)
	for i, a := range asks {
		t := tenants[a.Tenant]
		if t == nil {
			t = &tenant{id: a.Tenant}
			tenants[a.Tenant] = t
		}
		t.asks = append(t.asks, i)
		t.asked += a.Units
	}
	usedBySystem, usedByOthers := used[System], 0
	for t, n := range used {
		if t != System {
			usedByOthers += n
		}
	}

	free := max(0, limit-usedBySystem-usedByOthers)
	system := 0
	if t := tenants[System]; t != nil {
		system = min(t.asked, max(0, limit/2-usedBySystem), free)
		t.served = system
	}
	whole := limit - max(limit/10, usedBySystem+system) // shared by the other tenants, including used
	d.Tenants = max(0, whole)
	left := max(0, whole-usedByOthers)
	for id, t := range tenants {
		if percent := s.Guarantees[id.name]; id.kind == KindLabelled && percent > 0 {
			t.guarantee = d.Tenants * percent / 100
			t.served = min(t.asked, max(0, t.guarantee-used[id]))
		}
	}
	// Guarantees add up to at most 80 %, but earlier divisions may have used guaranteed units: serve tenants in order
	// until no units are left.
	members := make([]*tenant, 0, len(tenants))
	for _, t := range tenants {
		members = append(members, t)
	}
	slices.SortFunc(members, func(a, b *tenant) int { return a.id.Compare(b.id) })
	for _, t := range members {
		if t.id != System {
			t.served = min(t.served, left)
			left -= t.served
		}
	}

	var asked [groups]int
	for _, t := range members {
		asked[t.id.group()] += t.asked - t.served
	}
	halves := [groups]int{left - left/2, left / 2}
	var grants [groups]int
	for g := range groups {
		grants[g] = min(asked[g], max(halves[g], left-asked[1-g]))
	}
	for g := range groups {
		var of []*tenant
		for _, t := range members {
			if t.id.group() == g {
				of = append(of, t)
			}
		}
		all := left - grants[1-g] // what the group could get if it asked for more
		d.Levels[g] = level(of, all)
		admit(of, asks, d.Admitted, parts, grants[g], d.Levels[g])
	}
	for _, t := range members {
		d.Shares[t.id] = Share{Asked: t.asked, Admitted: t.got, Guarantee: t.guarantee, Allotment: t.allotment}
	}
	return d
}

// include adds the shares of an earlier division of the same limit.
func (d *Division) include(earlier *Division) {
	for t, had := range earlier.Shares {
		s, ok := d.Shares[t]
		s.Asked, s.Admitted, s.Allotment = s.Asked+had.Asked, s.Admitted+had.Admitted, s.Allotment+had.Allotment
		if !ok {
			s.Guarantee = had.Guarantee
		}
		d.Shares[t] = s
	}
}

type tenant struct {
	id        Tenant
	asks      []int // indexes
	asked     int
	guarantee int
	served    int // served before the level applies: system's half, or the guarantee
	allotment int
	got       int
	own       int            // the part of served that no other tenant may use
	next      int            // index into asks of the first undecided ask
	take      func(i, n int) // admits n units of an ask
}

// level returns the largest L for which the sum of min(asked - served, L) is at most free. If all asks fit, it returns
// the most that one additional tenant could get, or the largest ask if that is more.
func level(of []*tenant, free int) int {
	rest := make([]int, 0, len(of))
	for _, t := range of {
		rest = append(rest, t.asked-t.served)
	}
	slices.Sort(rest)
	for i, r := range rest {
		if l := free / (len(rest) - i); l < r {
			return l
		}
		free -= r
	}
	most := free
	if len(rest) > 0 {
		most = max(most, rest[len(rest)-1])
	}
	return most
}

// admit admits objects of a group's tenants into the free units, beyond the units served before. parts is nil if
// objects are admitted only as a whole.
func admit(of []*tenant, asks []Ask, admitted []bool, parts []int, free, level int) {
	waiting := &byOldest{asks: asks}
	for _, t := range of {
		t.allotment = t.served + min(t.asked-t.served, level)
		if t.id == System {
			t.own = t.served // no other tenant may use an unused remainder
		} else {
			free += t.served
		}
		take := func(i, n int) {
			if parts != nil {
				parts[i] += n
			}
			admitted[i] = parts == nil || parts[i] == asks[i].Units
			t.got += n
			free -= max(0, n-t.own)
			t.own = max(0, t.own-n)
		}
		if t.allotment == t.asked {
			for _, i := range t.asks {
				take(i, asks[i].Units)
			}
			continue
		}
		slices.SortFunc(t.asks, func(a, b int) int { return asks[a].Order.Compare(asks[b].Order) })
		for ; t.next < len(t.asks); t.next++ {
			i := t.asks[t.next]
			if asks[i].Units > t.allotment && (parts == nil || t.allotment == 0) {
				continue // skip: too large even alone
			}
			if t.got+asks[i].Units > t.allotment {
				if parts != nil {
					take(i, t.allotment-t.got)
				}
				t.take = take
				waiting.of = append(waiting.of, t)
				break
			}
			take(i, asks[i].Units)
		}
		if t.got == 0 && t.next == len(t.asks) {
			// Each object is larger than the level, which may be 0: its objects can only use remaining units.
			t.next, t.take = 0, take
			waiting.of = append(waiting.of, t)
		}
	}
	heap.Init(waiting)
	for waiting.Len() > 0 {
		oldest := waiting.of[0]
		i := oldest.asks[oldest.next]
		need := asks[i].Units
		if parts != nil {
			need -= parts[i]
		}
		fits := need <= free+oldest.own
		switch {
		case fits:
			oldest.take(i, need)
		case parts != nil:
			oldest.take(i, free+oldest.own)
		}
		// A tenant without any object tries the next one: its oldest may be larger than everything that is left.
		ends := !fits && (parts != nil || oldest.got > 0)
		if oldest.next++; ends || oldest.next == len(oldest.asks) {
			heap.Pop(waiting)
		} else {
			heap.Fix(waiting, 0)
		}
	}
}

// byOldest is a heap of tenants by their next object.
type byOldest struct {
	asks []Ask
	of   []*tenant
}

// Len implements heap.Interface.
func (h *byOldest) Len() int { return len(h.of) }

// Less implements heap.Interface.
func (h *byOldest) Less(i, j int) bool {
	a, b := h.of[i], h.of[j]
	order := h.asks[a.asks[a.next]].Order.Compare(h.asks[b.asks[b.next]].Order)
	return cmp.Or(order, a.id.Compare(b.id)) < 0
}

// Swap implements heap.Interface.
func (h *byOldest) Swap(i, j int) { h.of[i], h.of[j] = h.of[j], h.of[i] }

// Push implements heap.Interface.
func (h *byOldest) Push(x any) { h.of = append(h.of, x.(*tenant)) }

// Pop implements heap.Interface.
func (h *byOldest) Pop() any {
	last := h.of[len(h.of)-1]
	h.of = h.of[:len(h.of)-1]
	return last
}
