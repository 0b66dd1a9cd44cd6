// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/compile"
)

// IdentityClasses is the number of identity classes that all tenants of a node share: four fifths of the datapath's
// capacity.
const IdentityClasses = 26_213

// SplitRows is the number of table rows that the classes of all tenants may have in tables of other tenants: an eighth
// of the rows that the datapath divides among tenants.
const SplitRows = 26_214

// Each selector may split an identity class in two: the peers that it matches, and the other peers. Each class may
// need a row in tables of every tenant. A class is charged to the tenant of the policies whose selectors it matches.
// If these policies belong to several tenants, the class is charged to the tenant whose selectors separate it from
// the largest number of other classes. Selectors of cluster-wide policies, and selectors that several tenants use,
// may split without a limit.
//
// If a tenant has used up its classes, its selectors split no further. A peer then gets the class that it would have
// without these selectors, marked with the tenant. All deny rules of the tenant's selectors apply to the peers of a
// marked class, and none of the allow rules.
//
// If tenants ask for more classes than exist, the engine divides the classes again at the end of the change. A tenant
// that has more classes than its part loses its newest classes, and their peers move into marked classes. Then the
// engine splits marked classes of tenants that have less than their part.
//
// A class also needs rows in tables of other tenants whose selectors match its peers. These rows are charged to the
// tenant of the class, and divided in the same way.

// splits counts identity classes by the tenant to which they are charged.
type splits struct {
	limit  int
	all    int
	system int // number of classes that no tenant's selectors split
	of     map[shares.Tenant]int
	// marks contains, for each tenant, the selector that marks its marked classes.
	marks      map[shares.Tenant]*liveSelector
	guarantees map[string]int // by tenant name, in percent
	// parts contains the demand of each tenant, and the number of classes that it may have.
	parts   *shares.Parts[shares.Tenant]
	waiting map[shares.Tenant]int // peers in marked classes at the last division
	changed bool                  // changed since the last division

	rows  *shares.Parts[shares.Tenant] // like parts, for rows of split classes in tables of other tenants
	split map[shares.Tenant]int        // number of these rows, by tenant of the class
	full  map[shares.Tenant]bool       // tenants that lost classes because they had too many rows
	seen  int                          // Counters.PeerRows at the last count of split
	// variants counts the classes that would be the same class without the selectors of one tenant. The key is that
	// class.
	variants map[string]int
}

// splitRow adds by to the count of split rows, if the table and the class belong to different tenants.
func (s *splits) splitRow(c *identityClass, table shares.Tenant, by int) {
	if c.payer == shares.System || table == c.payer || table == (shares.Tenant{}) {
		return
	}
	if s.split[c.payer] += by; s.split[c.payer] <= 0 {
		delete(s.split, c.payer)
	}
}

func newSplits(limit, rows int) *splits {
	s := &splits{
		limit: cmp.Or(limit, IdentityClasses), of: make(map[shares.Tenant]int), marks: make(map[shares.Tenant]*liveSelector),
		guarantees: make(map[string]int), waiting: make(map[shares.Tenant]int),
		split: make(map[shares.Tenant]int), full: make(map[shares.Tenant]bool),
		variants: make(map[string]int),
	}
	settings := shares.Settings{Guarantees: s.guarantees}
	s.parts = shares.NewParts[shares.Tenant](settings, shares.Limit{Name: "identity-classes", Size: s.limit})
	s.rows = shares.NewParts[shares.Tenant](settings, shares.Limit{Name: "split-rows", Size: cmp.Or(rows, SplitRows)})
	s.parts.Enforce(s.parts.Plan(time.Time{}))
	s.rows.Enforce(s.rows.Plan(time.Time{}))
	return s
}

// ask sets the demand of a tenant, and returns how many units it may have.
func ask(p *shares.Parts[shares.Tenant], t shares.Tenant, units int) int {
	return p.Put(t, shares.Part{Tenant: t, Units: units}) // effective at once: no kernel map is involved
}

// divide divides units among the tenants that ask for them.
func divide(p *shares.Parts[shares.Tenant], asked map[shares.Tenant]int) {
	for _, u := range p.Usage().Tenants {
		if asked[u.Tenant] == 0 {
			p.Delete(u.Tenant)
		}
	}
	for t, n := range asked {
		ask(p, t, n)
	}
	p.Enforce(p.Plan(time.Time{}))
}

// hasRoom reports whether a tenant may have another class. Even before the next division, a tenant may have as many
// classes as any division would grant it. The next division then takes classes from other tenants.
func (s *splits) hasRoom(t shares.Tenant) bool {
	n := s.of[t]
	if s.full[t] || n >= ask(s.parts, t, n+1+s.waiting[t]) && n >= certain(s.limit, len(s.of)) {
		return false
	}
	rows := s.split[t]
	return rows < ask(s.rows, t, rows+1) || rows < certain(s.rows.Limit().Size, len(s.split))
}

// certain returns the number of units that a tenant gets in any division, given the number of other tenants.
func certain(limit, tenants int) int { return limit * 9 / 20 / (tenants + 1) }

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

// payer returns the tenant to which a class is charged, or System if the class has no selectors of tenants. Marks are
// considered only if the class has no other selectors of tenants.
func (s *splits) payer(kind identity.Kind, ports string, list []*liveSelector) (t shares.Tenant, marked bool) {
	t, mark := shares.System, shares.System
	most := -1
	for i, ls := range list {
		switch {
		case ls.tenant == shares.System:
		case ls.mark:
			mark = ls.tenant
		case t == shares.System:
			t = ls.tenant
		case ls.tenant != t && !slices.ContainsFunc(list[:i], func(x *liveSelector) bool { return x.tenant == ls.tenant && !x.mark }):
			if most < 0 {
				most = s.variants[rest(kind, ports, list, t)]
			}
			n := s.variants[rest(kind, ports, list, ls.tenant)]
			order := cmp.Or(cmp.Compare(n, most), cmp.Compare(s.of[ls.tenant], s.of[t]), t.Compare(ls.tenant))
			if order > 0 {
				t, most = ls.tenant, n
			}
		}
	}
	if t == shares.System && mark != shares.System {
		return mark, true
	}
	return t, false
}

// rest returns the key of the class that a class would be without the selectors of a tenant.
func rest(kind identity.Kind, ports string, list []*liveSelector, t shares.Tenant) string {
	others := make([]*liveSelector, 0, len(list))
	for _, ls := range list {
		if ls.tenant != t {
			others = append(others, ls)
		}
	}
	return t.String() + "\x00" + classKey(kind, ports, others)
}

// note charges a class to the tenant that splits it, and counts it in variants.
func (s *splits) note(c *identityClass) {
	c.payer, _ = s.payer(c.kind, c.portsText, c.selectors)
	s.count(c.payer, 1)
	var tenants []shares.Tenant
	for _, ls := range c.selectors {
		if ls.tenant != shares.System && !ls.mark && !slices.Contains(tenants, ls.tenant) {
			tenants = append(tenants, ls.tenant)
		}
	}
	if len(tenants) < 2 {
		return
	}
	for _, t := range tenants {
		key := rest(c.kind, c.portsText, c.selectors, t)
		s.variants[key]++
		c.variants = append(c.variants, key)
	}
}

// forget removes a class from the counts.
func (s *splits) forget(c *identityClass) {
	s.count(c.payer, -1)
	for _, key := range c.variants {
		if s.variants[key]--; s.variants[key] == 0 {
			delete(s.variants, key)
		}
	}
	c.variants = nil
}

// admit returns the class of a peer that matches the selectors. If the tenant to which the class is charged may not
// have another class, admit replaces the selectors of this tenant by its mark. If the class does not exist yet, the
// returned class is nil.
func (e *Engine) admit(p *member, list []*liveSelector) ([]*liveSelector, string, *identityClass) {
	for {
		key := classKey(p.id.Kind, p.ports, list)
		c := e.classes[key]
		if c != nil || e.splits == nil {
			return list, key, c
		}
		t, marked := e.splits.payer(p.id.Kind, p.ports, list)
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

// markedBy makes deny rules of the table match the peers of marked classes: the rules with selectors of the tenant
// that the mark belongs to.
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

// markTable adds the marks of all tenants whose selectors the new table contains.
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

// tenant records the guarantee of a tenant and returns the tenant.
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

// share assigns a selector to several tenants, so that it splits without a limit.
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

// useTable records that a subject uses a table.
func (e *Engine) useTable(l *live, s *subject) {
	t, _ := e.config.Tenant(s.namespace)
	if !l.used { // a Preparation may have compiled it before it had a subject
		l.tenant, l.used = t, true
	} else if t != l.tenant {
		e.shareTable(l)
	}
}

// shareTable assigns the selectors of a table to several tenants, because subjects of several tenants use the table.
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

// peers returns the peers of the classes that a selector matches, sorted by identity number.
func (s *liveSelector) peers() []*member {
	all := make(map[*member]struct{})
	for c := range s.classes {
		maps.Copy(all, c.members)
	}
	return byNumber(all)
}

// reclassify moves a peer into the class that it should have now.
func (e *Engine) reclassify(p *member) {
	if err := e.addPeer(p); err != nil {
		e.suspend(p)
	}
}

// divideClasses divides the identity classes if something has changed since the last division, and reports whether it
// did. It withdraws the newest classes of tenants that have more than their part.
func (e *Engine) divideClasses() bool {
	s := e.splits
	if s == nil || !s.changed || len(s.marks) == 0 && s.all <= s.limit/2 {
		return false // all demand fits
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
	divide(s.parts, asked)
	var over []shares.Tenant
	for t, n := range s.of {
		if n > s.parts.Got(t) {
			over = append(over, t)
		}
	}
	e.withdrawClasses(over, func(t shares.Tenant) bool { return s.of[t] > s.parts.Got(t) })
	return true
}

// divideRows divides the rows of split classes in tables of other tenants, if many rows were written since the last
// division. It withdraws the newest classes of tenants that have more than their part. The selectors of these tenants
// split no class until the tenants have less than half of their part.
func (e *Engine) divideRows() {
	s := e.splits
	if s == nil {
		return
	}
	all, limit := 0, s.rows.Limit().Size
	for _, l := range e.tables {
		all += len(l.table.Peers)
	}
	few := all <= limit/2 && len(s.full) == 0
	written := e.counters.PeerRows + e.counters.PeerDeletes
	if few || written-s.seen < 1+limit/64 {
		return
	}
	s.seen = written
	clear(s.split)
	for _, c := range e.byNumber {
		if c.payer == shares.System {
			continue
		}
		for l := range c.rows {
			s.splitRow(c, l.tenant, 1)
		}
	}
	divide(s.rows, s.split)
	var over []shares.Tenant
	for t, n := range s.split {
		if n > s.rows.Got(t) {
			over, s.full[t] = append(over, t), true
		}
	}
	e.withdrawClasses(over, func(t shares.Tenant) bool { return s.split[t] > s.rows.Got(t) })
	most := limit - limit/10
	for t := range s.full {
		if _, share, _, _ := s.rows.Of(t); s.split[t] <= min(cmp.Or(share.Allotment, most), most)/2 {
			delete(s.full, t)
			s.changed = true
		}
	}
}

// withdrawClasses withdraws the newest classes of tenants until they have no more than their part.
func (e *Engine) withdrawClasses(over []shares.Tenant, above func(shares.Tenant) bool) {
	if len(over) == 0 {
		return
	}
	classes := make(map[shares.Tenant][]*identityClass)
	for _, c := range e.byNumber {
		if slices.Contains(over, c.payer) {
			classes[c.payer] = append(classes[c.payer], c)
		}
	}
	slices.SortFunc(over, shares.Tenant.Compare)
	for _, t := range over {
		newest := classes[t]
		slices.SortFunc(newest, func(a, b *identityClass) int { return cmp.Compare(b.number, a.number) })
		for _, c := range newest {
			if !above(t) {
				break
			}
			e.withdrawClass(c)
		}
	}
}

// withdrawClass moves the peers of a class into the class that they have without the selectors of one tenant: the
// tenant to which the class is charged.
func (e *Engine) withdrawClass(c *identityClass) {
	splits := func(ls *liveSelector) bool { return ls.tenant == c.payer && !ls.mark }
	if !slices.ContainsFunc(c.selectors, splits) {
		return // already marked, or the selectors now belong to several tenants
	}
	sels := marking(c.selectors, e.mark(c.payer))
	for _, p := range byNumber(c.members) {
		if err := e.classify(p, sels); err != nil {
			e.suspend(p)
		}
	}
}

// retryMarked splits marked classes whose tenant may have more classes again.
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

// Splits returns the number of identity classes that are charged to each tenant, and the number of peers in marked
// classes.
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

// SplitRows returns the number of rows that the classes of tenants have in tables of other tenants.
func (e *Engine) SplitRows() (u shares.Usage, ok bool) {
	if e.splits == nil {
		return u, false
	}
	u.Limit = e.splits.rows.Limit()
	for _, t := range slices.SortedFunc(maps.Keys(e.splits.split), shares.Tenant.Compare) {
		n := e.splits.split[t]
		_, share, _, _ := e.splits.rows.Of(t)
		share.Asked, share.Admitted, share.Allotment = n, n, max(n, share.Allotment)
		if e.splits.full[t] {
			share.Asked++ // the tenant has lost classes and wants more
		}
		u.Used, u.Asked = u.Used+n, u.Asked+share.Asked
		u.Tenants = append(u.Tenants, shares.TenantUsage{Tenant: t, Share: share})
	}
	return u, true
}

// recount counts all classes and rows again, because namespaces have moved to other tenants.
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
	clear(e.splits.variants)
	for _, n := range slices.Sorted(maps.Keys(e.byNumber)) {
		c := e.byNumber[n]
		c.variants = nil
		e.splits.note(c)
	}
	for _, p := range byNumber(marked) {
		e.reclassify(p)
	}
}
