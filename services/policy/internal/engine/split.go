// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/compile"
)

// IdentityClasses is how many identity classes a node has for all tenants: four fifths of the
// numbers of the datapath.
const IdentityClasses = 26_213

// Selectors split identity classes, and each class may need a row in tables of every tenant.
// A class counts for the tenant of the policies whose selectors it matches. If these belong to
// several tenants, it counts for the tenant that has most classes already. Selectors of
// cluster-wide policies, and selectors that several tenants use, split without a limit.
//
// The selectors of a tenant without room for another class do not split any further. Instead,
// the peer comes into the class that it has without these selectors, marked with the tenant.
// All deny rules of these selectors match the peers of a marked class, and no allow rule does.
//
// At the end of a change in which tenants ask for more classes than there are, the engine
// divides the classes anew. A tenant above its part loses its newest classes, whose peers come
// into marked classes. Tenants below their part then split the peers that were marked for them.

// splits counts the identity classes by the tenants whose selectors split them.
type splits struct {
	limit  int
	all    int
	system int // of classes that no tenant's selectors split
	of     map[shares.Tenant]int
	// marks are the selectors in classes of peers that selectors of a tenant do not split.
	marks      map[shares.Tenant]*liveSelector
	guarantees map[string]int // of tenants, in percent
	// parts has what each tenant asks for, and how much of it the tenant may have.
	parts   *shares.Parts[shares.Tenant]
	waiting map[shares.Tenant]int // peers of marked classes, at the last division
	changed bool                  // since the last division
}

func newSplits(limit int) *splits {
	s := &splits{
		limit: cmp.Or(limit, IdentityClasses), of: make(map[shares.Tenant]int), marks: make(map[shares.Tenant]*liveSelector),
		guarantees: make(map[string]int), waiting: make(map[shares.Tenant]int),
	}
	s.parts = shares.NewParts[shares.Tenant](
		shares.Settings{Guarantees: s.guarantees}, shares.Limit{Name: "identity-classes", Size: s.limit})
	s.parts.Enforce(s.parts.Plan(time.Time{}))
	return s
}

// ask sets how many classes a tenant asks for, and returns how many it may have.
func (s *splits) ask(t shares.Tenant, units int) int {
	return s.parts.Put(t, shares.Part{Tenant: t, Units: units}) // in place: it is no map of the kernel
}

// hasRoom reports whether a tenant may have another class. Between two divisions, a tenant also
// has what no division would refuse it: other tenants lose the classes afterwards.
func (s *splits) hasRoom(t shares.Tenant) bool {
	n := s.of[t]
	return n < s.ask(t, n+1+s.waiting[t]) || n < s.limit*9/20/(len(s.of)+1)
}

func (s *splits) count(t shares.Tenant, by int) {
	s.all += by
	s.changed = true
	if t == shares.System {
		s.system += by
		return
	}
	if s.of[t] += by; s.of[t] == 0 {
		delete(s.of, t)
	}
}

// payer returns the tenant for which a class counts: System if no selector of a tenant splits
// it. Marks count only if they are the only selectors of tenants.
func (s *splits) payer(list []*liveSelector) (t shares.Tenant, marked bool) {
	t, mark := shares.System, shares.System
	for _, ls := range list {
		switch {
		case ls.tenant == shares.System:
		case ls.mark:
			mark = ls.tenant
		case t == shares.System || s.of[ls.tenant] > s.of[t] || s.of[ls.tenant] == s.of[t] && ls.tenant.Compare(t) < 0:
			t = ls.tenant
		}
	}
	if t == shares.System && mark != shares.System {
		return mark, true
	}
	return t, false
}

// admit returns the class of a peer that matches selectors. Without room for a new class it
// replaces selectors by marks. The class is nil if there is none yet.
func (e *Engine) admit(p *member, list []*liveSelector) ([]*liveSelector, string, *identityClass) {
	for {
		key := classKey(p.id.Kind, p.ports, list)
		c := e.classes[key]
		if c != nil || e.splits == nil {
			return list, key, c
		}
		t, marked := e.splits.payer(list)
		if t == shares.System || marked || e.splits.hasRoom(t) {
			return list, key, nil
		}
		list = marking(list, e.mark(t))
	}
}

// marking replaces the selectors of a tenant by its mark.
func marking(list []*liveSelector, mark *liveSelector) []*liveSelector {
	out := make([]*liveSelector, 0, len(list)+1)
	for _, ls := range list {
		if ls.tenant != mark.tenant {
			out = append(out, ls)
		}
	}
	out = append(out, mark)
	slices.SortFunc(out, func(a, b *liveSelector) int { return cmp.Compare(a.id, b.id) })
	return out
}

// mark returns the mark of a tenant.
func (e *Engine) mark(t shares.Tenant) *liveSelector {
	if m := e.splits.marks[t]; m != nil {
		return m
	}
	e.selectors.lastID++
	m := &liveSelector{
		id: e.selectors.lastID, tenant: t, mark: true,
		tables: make(map[*live]struct{}), classes: make(map[*identityClass]struct{}),
	}
	e.splits.marks[t] = m
	for _, ls := range e.selectors.byText {
		if ls.tenant == t {
			for l := range ls.tables {
				l.markedBy(m)
			}
		}
	}
	return m
}

// markedBy makes the deny rules of a tenant's selectors match the peers of marked classes.
func (l *live) markedBy(m *liveSelector) {
	if _, ok := l.brings[m]; ok {
		return
	}
	var denies []uint16
	for ls, numbers := range l.brings {
		if ls.tenant == m.tenant {
			denies = append(denies, l.program.Denies(numbers)...)
		}
	}
	slices.Sort(denies)
	l.brings[m] = slices.Compact(denies)
	m.tables[l] = struct{}{}
	m.refs++
}

// markTable adds the marks of the tenants whose selectors a new table has.
func (e *Engine) markTable(l *live) {
	if e.splits == nil || len(e.splits.marks) == 0 {
		return
	}
	for _, ls := range slices.Collect(maps.Keys(l.brings)) {
		if m := e.splits.marks[ls.tenant]; m != nil && !ls.mark {
			l.markedBy(m)
		}
	}
}

// tenantOf returns the tenant of the policy of the first rule that has a selector.
func (e *Engine) tenantOf(p *compile.Program, text string) shares.Tenant {
	ns := p.Namespace(text)
	if ns == "" {
		return shares.System
	}
	return e.splits.tenant(e.config.Tenant(ns))
}

// tenant returns a tenant and notes its guarantee.
func (s *splits) tenant(t shares.Tenant, guarantee int) shares.Tenant {
	if t.HasLabel() {
		if guarantee > 0 {
			s.guarantees[t.Name()] = guarantee
		} else {
			delete(s.guarantees, t.Name())
		}
	}
	return t
}

// share makes a selector belong to several tenants: it splits without a limit.
func (e *Engine) share(ls *liveSelector) {
	m := e.splits.marks[ls.tenant]
	ls.tenant = shares.System
	if m == nil {
		return
	}
	for _, p := range m.peers() {
		e.reclassify(p)
	}
}

// useTable notes that a subject gets a table.
func (e *Engine) useTable(l *live, s *subject) {
	t, _ := e.config.Tenant(s.namespace)
	if l.refs == 0 {
		l.tenant = t
	} else if t != l.tenant {
		e.shareTable(l)
	}
}

// shareTable makes the selectors of a table that subjects of several tenants have belong to
// all of them.
func (e *Engine) shareTable(l *live) {
	if l.shared {
		return
	}
	l.shared = true
	for _, s := range l.program.Selectors {
		if ls := e.selectors.byText[s.String()]; ls != nil && ls.tenant != shares.System {
			e.share(ls)
		}
	}
}

// peers lists the peers of the classes that a selector matches, by number.
func (s *liveSelector) peers() []*member {
	all := make(map[*member]struct{})
	for c := range s.classes {
		maps.Copy(all, c.members)
	}
	return byNumber(all)
}

// reclassify finds the class of a peer anew.
func (e *Engine) reclassify(p *member) {
	if err := e.addPeer(p); err != nil {
		e.suspend(p)
	}
}

// divideClasses divides the identity classes anew, if something has changed since the last
// division, and reports whether it did. It withdraws the newest classes of tenants above their part.
func (e *Engine) divideClasses() bool {
	s := e.splits
	if s == nil || !s.changed || len(s.marks) == 0 && s.all <= s.limit/2 {
		return false // what tenants ask for fits
	}
	s.changed = false
	clear(s.waiting)
	for t, m := range s.marks {
		for c := range m.classes {
			s.waiting[t] += len(c.members)
		}
	}
	asked := map[shares.Tenant]int{shares.System: s.system}
	for _, of := range []map[shares.Tenant]int{s.of, s.waiting} {
		for t, n := range of {
			asked[t] += n
		}
	}
	for _, u := range s.parts.Usage().Tenants {
		if asked[u.Tenant] == 0 {
			s.parts.Delete(u.Tenant)
		}
	}
	for t, n := range asked {
		s.ask(t, n)
	}
	s.parts.Enforce(s.parts.Plan(time.Time{}))
	over := make(map[shares.Tenant][]*identityClass)
	for t, n := range s.of {
		if n > s.parts.Got(t) {
			over[t] = nil
		}
	}
	if len(over) == 0 {
		return true
	}
	for _, c := range e.byNumber {
		if _, ok := over[c.payer]; ok {
			over[c.payer] = append(over[c.payer], c)
		}
	}
	for _, t := range slices.SortedFunc(maps.Keys(over), shares.Tenant.Compare) {
		newest := over[t]
		slices.SortFunc(newest, func(a, b *identityClass) int { return cmp.Compare(b.number, a.number) })
		for _, c := range newest {
			if s.of[t] <= s.parts.Got(t) {
				break
			}
			e.withdrawClass(c)
		}
	}
	return true
}

// withdrawClass moves the peers of a class to the class that they have without the selectors of
// the tenant for which it counts.
func (e *Engine) withdrawClass(c *identityClass) {
	splits := func(ls *liveSelector) bool { return ls.tenant == c.payer && !ls.mark }
	if !slices.ContainsFunc(c.selectors, splits) {
		return // it is marked, or the selectors have become those of several tenants
	}
	sels := marking(c.selectors, e.mark(c.payer))
	for _, p := range byNumber(c.members) {
		if err := e.classify(p, sels); err != nil {
			e.suspend(p)
		}
	}
}

// retryMarked splits classes for which there is room again.
func (e *Engine) retryMarked() {
	if e.splits == nil {
		return
	}
	for _, t := range slices.SortedFunc(maps.Keys(e.splits.marks), shares.Tenant.Compare) {
		m := e.splits.marks[t]
		if m.refs > 0 && !e.splits.hasRoom(t) {
			continue
		}
		for _, p := range m.peers() {
			if m.refs > 0 && !e.splits.hasRoom(t) {
				break
			}
			e.reclassify(p)
		}
	}
}

// Splits returns how many identity classes the tenants' selectors split, and how many peers
// are in classes that they do not split any further.
func (e *Engine) Splits() (u shares.Usage, marked int) {
	if e.splits == nil {
		return u, 0
	}
	u.Limit = shares.Limit{Name: "identity-classes", Size: e.splits.limit}
	waiting := make(map[shares.Tenant]int)
	for t, m := range e.splits.marks {
		waiting[t] = len(m.peers())
		marked += waiting[t]
	}
	u.Used, u.Asked = e.splits.all, e.splits.all+marked
	tenants := maps.Clone(e.splits.of)
	system := e.splits.system
	u.Tenants = append(u.Tenants, shares.TenantUsage{
		Tenant: shares.System, Share: shares.Share{Asked: system, Admitted: system, Allotment: system},
	})
	for t := range waiting {
		tenants[t] += 0
	}
	for _, t := range slices.SortedFunc(maps.Keys(tenants), shares.Tenant.Compare) {
		n := tenants[t]
		_, share, _, _ := e.splits.parts.Of(t)
		share.Asked, share.Admitted, share.Allotment = n+waiting[t], n, max(n, share.Allotment)
		u.Tenants = append(u.Tenants, shares.TenantUsage{Tenant: t, Share: share})
	}
	return u, marked
}

// recount counts everything by the tenants that namespaces have now.
func (e *Engine) recount() {
	if e.splits == nil {
		return
	}
	marked := make(map[*member]struct{})
	for _, m := range e.splits.marks {
		for _, p := range m.peers() {
			marked[p] = struct{}{}
		}
	}
	for text, ls := range e.selectors.byText {
		ls.tenant = shares.System
		first := true
		for l := range ls.tables {
			switch t := e.tenantOf(l.program, text); {
			case first:
				ls.tenant, first = t, false
			case t != ls.tenant:
				ls.tenant = shares.System
			}
		}
	}
	e.splits.all, e.splits.system = 0, 0
	clear(e.splits.of)
	for _, c := range e.classes {
		c.payer, _ = e.splits.payer(c.selectors)
		e.splits.count(c.payer, 1)
	}
	for _, p := range byNumber(marked) {
		e.reclassify(p)
	}
}
