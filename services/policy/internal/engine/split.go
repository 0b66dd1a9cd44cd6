// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"cmp"
	"maps"
	"slices"

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

// splits counts the identity classes by the tenants whose selectors split them.
type splits struct {
	limit  int
	all    int
	of     map[shares.Tenant]int
	others int // of namespaces without the tenant label, together
	// marks are the selectors in classes of peers that selectors of a tenant do not split.
	marks map[shares.Tenant]*liveSelector
}

func newSplits(limit int) *splits {
	return &splits{
		limit: cmp.Or(limit, IdentityClasses), of: make(map[shares.Tenant]int), marks: make(map[shares.Tenant]*liveSelector),
	}
}

// hasRoom reports whether a tenant may have another class: it has a sixteenth of them, and
// beyond it half of the free ones. Namespaces without the label have half of them together.
func (s *splits) hasRoom(t shares.Tenant) bool {
	if !t.HasLabel() && s.others >= s.limit/2 {
		return false
	}
	own := s.limit / 16
	return s.of[t] < own || s.of[t]-own < (s.limit-s.all)/2
}

func (s *splits) count(t shares.Tenant, by int) {
	s.all += by
	if t == shares.System {
		return
	}
	if s.of[t] += by; s.of[t] == 0 {
		delete(s.of, t)
	}
	if !t.HasLabel() {
		s.others += by
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
	t, _ := e.config.Tenant(ns)
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
	system := e.splits.all
	for _, n := range tenants {
		system -= n
	}
	u.Tenants = append(u.Tenants, shares.TenantUsage{
		Tenant: shares.System, Share: shares.Share{Asked: system, Admitted: system, Allotment: system},
	})
	for t := range waiting {
		tenants[t] += 0
	}
	for _, t := range slices.SortedFunc(maps.Keys(tenants), shares.Tenant.Compare) {
		n := tenants[t]
		u.Tenants = append(u.Tenants, shares.TenantUsage{
			Tenant: t, Share: shares.Share{Asked: n + waiting[t], Admitted: n, Allotment: e.splits.allotment(t)},
		})
	}
	return u, marked
}

// allotment is how many classes a tenant may have at present.
func (s *splits) allotment(t shares.Tenant) int {
	n, own := s.of[t], s.limit/16
	// It may have more until half of the free ones are what it has beyond its own.
	rest := max(0, s.limit-s.all-2*(n-own))
	most := max(own, n+(rest+2)/3)
	if !t.HasLabel() {
		most = min(most, n+max(0, s.limit/2-s.others))
	}
	return most
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
	e.splits.all, e.splits.others = 0, 0
	clear(e.splits.of)
	for _, c := range e.classes {
		c.payer, _ = e.splits.payer(c.selectors)
		e.splits.count(c.payer, 1)
	}
	for _, p := range byNumber(marked) {
		e.reclassify(p)
	}
}
