// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"cmp"
	"encoding/binary"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/policy/internal/compile"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// member is a known identity in its identity class.
type member struct {
	id    peer.Identity
	ports string // canonical text of the named ports
	class *identityClass
}

// identityClass is a set of peers that have the same kind and the same named ports, and match the same selectors of the
// tables in use.
type identityClass struct {
	key       string
	number    policytable.IdentityClass
	kind      identity.Kind
	ports     []workload.NamedPort
	portsText string
	selectors []*liveSelector // by id
	members   map[*member]struct{}
	rows      map[*live]struct{} // tables with a row of this class
	// unclassifiedIn contains the tables that treat the peers of the class as unknown. It may be nil.
	unclassifiedIn map[*live]struct{}
	payer          shares.Tenant // the tenant to which the class is charged
	variants       []string      // keys in splits.variants
}

// liveSelector is a selector that tables use.
type liveSelector struct {
	selector.Selector
	id      int
	refs    int // number of tables that use it
	tables  map[*live]struct{}
	classes map[*identityClass]struct{}
	// defaults tells for each kind of peer whether the selector matches the default peer of that kind.
	defaults [identity.Kinds]bool
	tenant   shares.Tenant // tenant of its policies; System: cluster-wide, or several tenants
	mark     bool          // the selector marks classes of a tenant without capacity, see splits
}

// selectorIndex finds the selectors that can match a label set without visiting all selectors. Each selector is
// indexed under the one of its requirements that the fewest peers meet.
type selectorIndex struct {
	byText   map[string]*liveSelector
	byLabel  map[string][]*liveSelector // key=value or key
	residual []*liveSelector            // have only negative requirements
	lastID   int
	defaults [identity.Kinds]label.Set
}

func newSelectorIndex(cluster string) selectorIndex {
	ix := selectorIndex{byText: make(map[string]*liveSelector), byLabel: make(map[string][]*liveSelector)}
	// The default peer is a pod of which only two facts are known: its cluster, and that it has a namespace. A
	// selector that matches this pod needs no row of its own.
	ix.defaults[identity.KindInCluster] = label.NewSet(
		label.Kubernetes(label.KeyNamespace, ""), label.Kubernetes(label.KeyCluster, cluster))
	ix.defaults[identity.KindWorld4] = label.NewSet(label.Reserved(identity.NameWorldIPv4))
	ix.defaults[identity.KindWorld6] = label.NewSet(label.Reserved(identity.NameWorldIPv6))
	ix.defaults[identity.KindHost] = label.NewSet(label.Reserved(identity.NameHost))
	ix.defaults[identity.KindRemoteNode] = label.NewSet(label.Reserved(identity.NameRemoteNode))
	ix.defaults[identity.KindKubeAPIServer] = label.NewSet(label.Reserved(identity.NameWorldIPv4), label.Reserved(identity.NameKubeAPIServer))
	return ix
}

// indexKeys returns the keys under which a selector is indexed. They come from its most selective requirement.
func indexKeys(s selector.Selector) []string {
	var exists string
	for _, r := range s.Requirements() {
		if r.Op == selector.Exists && exists == "" {
			exists = r.Key
		}
	}
	var best []string
	rank := 1 << 30
	for _, r := range s.Requirements() {
		if r.Op != selector.In {
			continue
		}
		cost := len(r.Values) * 4
		// A label that nearly every pod has is not selective.
		if r.Key == label.KeyCluster {
			cost += 1 << 20
		}
		if r.Key == label.KeyNamespace {
			cost += 2
		}
		if cost < rank {
			rank = cost
			best = best[:0]
			for _, v := range r.Values {
				best = append(best, r.Key+"="+v)
			}
		}
	}
	if best == nil && exists != "" {
		best = []string{exists}
	}
	return best
}

// matching returns the live selectors that match labels, sorted by id.
func (e *Engine) matching(labels label.Set) []*liveSelector {
	var out []*liveSelector
	try := func(list []*liveSelector) {
		for _, s := range list {
			e.counters.Evaluations++
			if s.Matches(labels) {
				out = append(out, s)
			}
		}
	}
	for _, l := range labels.All() {
		if l.Source != label.SourceGenerated {
			try(e.selectors.byLabel[l.Key+"="+l.Value])
			try(e.selectors.byLabel[l.Key])
		}
	}
	try(e.selectors.residual)
	slices.SortFunc(out, func(a, b *liveSelector) int { return cmp.Compare(a.id, b.id) })
	return slices.Compact(out)
}

func classKey(kind identity.Kind, ports string, selectors []*liveSelector) string {
	b := make([]byte, 0, 2+len(ports)+3*len(selectors))
	b = append(b, byte(kind))
	b = append(b, ports...)
	b = append(b, 0)
	for _, s := range selectors {
		b = binary.AppendUvarint(b, uint64(s.id))
	}
	return string(b)
}

// newClass creates an empty identity class without rows.
func (e *Engine) newClass(key string, kind identity.Kind, ports []workload.NamedPort, portsText string, selectors []*liveSelector) *identityClass {
	e.lastClass++
	c := &identityClass{
		key: key, number: e.lastClass, kind: kind, ports: ports, portsText: portsText, selectors: selectors,
		members: make(map[*member]struct{}), rows: make(map[*live]struct{}),
	}
	e.classes[key] = c
	e.byNumber[c.number] = c
	for _, s := range selectors {
		s.classes[c] = struct{}{}
	}
	if e.splits != nil {
		e.splits.note(c)
	}
	if e.config.Events != nil {
		e.emit(policytable.DefineIdentityClass{IdentityClass: c.number, Key: c.stableKey()})
	}
	return c
}

// setRow writes the row of a class into a table; deleteRow removes it.
func (e *Engine) setRow(l *live, c *identityClass, class policytable.Class) {
	l.table.Peers[c.number] = class
	c.rows[l] = struct{}{}
	if e.splits != nil {
		e.splits.splitRow(c, l.tenant, 1)
	}
	e.counters.PeerRows++
	e.emitFor(l, policytable.SetPeer{Table: l.id, Row: policytable.Row{IdentityClass: c.number, Class: class}})
}

func (e *Engine) deleteRow(l *live, c *identityClass) {
	delete(l.table.Peers, c.number)
	if e.splits != nil {
		e.splits.splitRow(c, l.tenant, -1)
	}
	e.counters.PeerDeletes++
	e.freed++
	e.emitFor(l, policytable.DeletePeer{Table: l.id, IdentityClass: c.number})
}

// setEntry updates the entry of a peer in the array of identities.
func (e *Engine) setEntry(n identity.Numeric) {
	e.counters.IdentityRows++
	if e.config.Events != nil {
		e.emit(identityStep(n, e.Entry(n)))
	}
}

// dropClass removes a class that has no members, and its rows.
func (e *Engine) dropClass(c *identityClass) {
	for _, l := range inOrder(c.rows) {
		e.deleteRow(l, c)
	}
	for l := range c.unclassifiedIn {
		if delete(l.unclassified, c); len(l.unclassified) == 0 {
			delete(e.incomplete, l)
		}
	}
	for _, s := range c.selectors {
		delete(s.classes, c)
	}
	if e.splits != nil {
		e.splits.forget(c)
	}
	delete(e.classes, c.key)
	delete(e.byNumber, c.number)
	e.emit(policytable.RetireIdentityClass{IdentityClass: c.number})
}

// enter moves a peer into a class. Tables refer to the class and not to the peer, so this single write is enough for
// all tables to know the peer.
func (e *Engine) enter(p *member, c *identityClass) {
	before := p.class
	p.class = c
	c.members[p] = struct{}{}
	e.setEntry(p.id.Number)
	if before != nil && before != c {
		delete(before.members, p)
		if len(before.members) == 0 {
			e.dropClass(before)
		}
	}
}

// addPeer puts a peer into an identity class. If a table has no capacity for another peer class, this table treats
// the peer as unknown. If a table has no capacity for another row, all tables treat the peer as unknown.
func (e *Engine) addPeer(p *member) error {
	return e.classify(p, e.matching(p.id.Labels))
}

// classify is addPeer for a peer whose matching selectors are known.
func (e *Engine) classify(p *member, sels []*liveSelector) error {
	sels, key, c := e.admit(p, sels)
	return e.assignClass(p, sels, key, c)
}

// assignClass moves a peer into class c. If c is nil, it creates a class with the given selectors.
func (e *Engine) assignClass(p *member, sels []*liveSelector, key string, c *identityClass) error {
	if c != nil && c == p.class {
		return nil
	}
	if c == nil {
		c = e.newClass(key, p.id.Kind, p.id.Ports, p.ports, sels)
		if err := e.addRows(c); err != nil {
			e.dropClass(c)
			return err
		}
	}
	e.enter(p, c)
	delete(e.waiting, p)
	return nil
}

// addRows writes the rows of a new class into the affected tables.
func (e *Engine) addRows(c *identityClass) error {
	concerned := make(map[*live]struct{})
	for _, s := range c.selectors {
		maps.Copy(concerned, s.tables)
	}
	maps.Copy(concerned, e.wide[c.kind])
	for _, l := range inOrder(concerned) {
		if err := e.addRow(l, c, l.matched(c)); err != nil {
			return err
		}
	}
	return nil
}

// addRow writes the row of a class into a table if it differs from the default of the class's kind. matched is the
// rule set of the class in the table.
func (e *Engine) addRow(l *live, c *identityClass, matched []uint16) error {
	class, err := l.classOf(c, matched)
	if err != nil {
		if l.refs > 0 && e.renew(l) {
			return nil
		}
		class = l.table.Default[identity.KindUnknown]
		e.leaveUnclassified(l, c)
		l.noCapacity = cmp.Or(l.noCapacity, err)
	}
	if class == l.table.Default[c.kind] {
		return nil
	}
	if n := len(l.table.Peers); n >= table.MaxPeers {
		return &table.ErrTooLarge{What: "peer rows", Got: n + 1, Limit: table.MaxPeers}
	}
	e.setRow(l, c, class)
	return nil
}

// leaveUnclassified records that a table treats the peers of an identity class as unknown, because it has no capacity
// for another peer class.
func (e *Engine) leaveUnclassified(l *live, c *identityClass) {
	if c.unclassifiedIn == nil {
		c.unclassifiedIn = make(map[*live]struct{})
	}
	c.unclassifiedIn[l], l.unclassified[c] = struct{}{}, struct{}{}
	if l.refs > 0 {
		e.incomplete[l] = struct{}{}
	}
}

// retryIncomplete recompiles the tables that have no capacity for the peer classes of some peers, if they still
// contain peer classes that no peer uses.
func (e *Engine) retryIncomplete() {
	for _, l := range inOrder(e.incomplete) {
		if l.refs > 0 {
			e.renew(l)
		}
	}
}

// applyIdentities adds and removes peers.
func (e *Engine) applyIdentities(c Change, dirty map[*subject]struct{}) {
	for _, n := range c.RemoveIdentities {
		p := e.peers[n]
		if p == nil {
			continue
		}
		e.index(p, false)
		delete(e.peers, n)
		delete(e.waiting, p)
		e.setEntry(n)
		if p.class != nil {
			delete(p.class.members, p)
			if len(p.class.members) == 0 {
				e.dropClass(p.class)
			}
		}
	}
	for _, id := range c.AddIdentities {
		text, _ := id.Labels.Value(label.SourceGenerated, workload.KeyNamedPorts)
		p := e.peers[id.Number]
		if p == nil {
			p = &member{id: id, ports: text}
			e.peers[id.Number] = p
		} else {
			if p.id.Labels.String() == id.Labels.String() {
				continue
			}
			e.index(p, false)
			p.id, p.ports = id, text
		}
		// The identity was absent for a while, or its labels have changed.
		if s := e.subjects[id.Number]; s != nil {
			e.enlist(s, false)
			e.enlist(s, true)
			dirty[s] = struct{}{}
		}
		e.index(p, true)
		if err := e.addPeer(p); err != nil {
			e.suspend(p)
		}
	}
}

// suspend makes all tables treat a peer as unknown until its row fits.
func (e *Engine) suspend(p *member) {
	if c := p.class; c != nil {
		p.class = nil
		delete(c.members, p)
		e.setEntry(p.id.Number)
		if len(c.members) == 0 {
			e.dropClass(c)
		}
	}
	e.waiting[p] = struct{}{}
}

// Waiting returns the number of identities that are treated as unknown because a table has no capacity for them.
func (e *Engine) Waiting() int {
	classes := make(map[*identityClass]struct{})
	for l := range e.incomplete {
		maps.Copy(classes, l.unclassified)
	}
	n := len(e.waiting)
	for c := range classes {
		n += len(c.members)
	}
	_, marked := e.Splits()
	return n + marked
}

func (e *Engine) retryWaiting() {
	for _, p := range byNumber(e.waiting) {
		if e.peers[p.id.Number] != p || p.class != nil || e.addPeer(p) == nil {
			delete(e.waiting, p)
		}
	}
}

// index adds a peer to the index of labels, or removes it.
func (e *Engine) index(p *member, add bool) {
	entry := func(key string) {
		if add {
			include(e.byLabel, key, p)
		} else {
			exclude(e.byLabel, key, p)
		}
	}
	for _, l := range p.id.Labels.All() {
		if l.Source != label.SourceGenerated {
			entry(l.Key + "=" + l.Value)
			entry(l.Key)
		}
	}
}

// candidates calls f for each peer that a selector may match.
func (e *Engine) candidates(s selector.Selector, f func(*member)) {
	entries := indexKeys(s)
	if entries == nil {
		for _, p := range e.peers {
			f(p)
		}
		return
	}
	for _, key := range entries {
		for p := range e.byLabel[key] {
			f(p)
		}
	}
}

// acquire adds selectors to the live ones, and splits the identity classes whose peers they distinguish. A new class
// gets the rows of the old class before a peer moves into it, so no verdict changes.
func (e *Engine) acquire(programs []*compile.Program) {
	gained := make(map[*member][]*liveSelector)
	var shared []*liveSelector
	for _, p := range programs {
		for _, s := range p.Selectors {
			ls, tenant := e.selectors.byText[s.String()], shares.System
			if e.splits != nil && (ls == nil || ls.tenant != shares.System) {
				tenant = e.tenantOf(p, s.String())
			}
			switch {
			case ls == nil:
				e.gain(s, tenant, gained)
			case ls.tenant != tenant && e.splits != nil:
				shared = append(shared, ls)
			}
		}
	}
	for _, p := range byNumber(gained) {
		// The ids of new selectors are larger than all others, so the list stays sorted.
		all := append(slices.Clone(p.class.selectors), gained[p]...)
		if e.splits == nil {
			e.move(p, all)
			continue
		}
		for _, s := range p.class.selectors {
			if s.mark && slices.ContainsFunc(gained[p], func(g *liveSelector) bool { return g.tenant == s.tenant }) {
				all = marking(all, s)
			}
		}
		admitted, _, c := e.admit(p, all)
		switch {
		case c == p.class:
		case slices.ContainsFunc(admitted, func(s *liveSelector) bool { return s.mark }):
			// The selectors that the class already had still distinguish its peers.
			kept := slices.Clone(p.class.selectors)
			for _, s := range admitted {
				if s.mark || slices.Contains(gained[p], s) {
					kept = append(kept, s)
				}
			}
			slices.SortFunc(kept, func(a, b *liveSelector) int { return cmp.Compare(a.id, b.id) })
			kept = slices.Compact(kept)
			key := classKey(p.id.Kind, p.ports, kept)
			if err := e.assignClass(p, kept, key, e.classes[key]); err != nil {
				e.suspend(p)
			}
		default:
			e.move(p, admitted)
		}
	}
	for _, ls := range shared {
		if ls.tenant != shares.System {
			e.share(ls)
		}
	}
}

// gain adds a selector to the live ones, and records the peers that it matches.
func (e *Engine) gain(s selector.Selector, tenant shares.Tenant, gained map[*member][]*liveSelector) {
	e.selectors.lastID++
	ls := &liveSelector{
		Selector: s, id: e.selectors.lastID, tenant: tenant,
		tables: make(map[*live]struct{}), classes: make(map[*identityClass]struct{}),
	}
	for k := range ls.defaults {
		ls.defaults[k] = s.Matches(e.selectors.defaults[k])
	}
	e.selectors.byText[s.String()] = ls
	if entries := indexKeys(s); entries == nil {
		e.selectors.residual = append(e.selectors.residual, ls)
	} else {
		for _, key := range entries {
			e.selectors.byLabel[key] = append(e.selectors.byLabel[key], ls)
		}
	}
	e.candidates(s, func(p *member) {
		e.counters.Evaluations++
		if p.class != nil && s.Matches(p.id.Labels) {
			if n := len(gained[p]); n == 0 || gained[p][n-1] != ls {
				gained[p] = append(gained[p], ls)
			}
		}
	})
}

// move moves a peer into the class with these selectors. Compared with the peer's current class, only selectors that
// no table uses any more may be missing.
func (e *Engine) move(p *member, sels []*liveSelector) {
	old := p.class
	key := classKey(old.kind, old.portsText, sels)
	c := e.classes[key]
	if c == nil {
		c = e.newClass(key, old.kind, old.ports, old.portsText, sels)
		for _, l := range inOrder(old.rows) {
			e.setRow(l, c, l.table.Peers[old.number])
		}
		for l := range old.unclassifiedIn {
			e.leaveUnclassified(l, c)
		}
	}
	e.enter(p, c)
}

// byNumber returns peers sorted by identity number.
func byNumber[V any](set map[*member]V) []*member {
	return slices.SortedFunc(maps.Keys(set), func(a, b *member) int { return cmp.Compare(a.id.Number, b.id.Number) })
}

// retire removes selectors that no table uses, and merges the identity classes that differ only in them.
func (e *Engine) retire(list []*liveSelector) {
	affected := make(map[*identityClass]struct{})
	gone := make(map[*liveSelector]struct{})
	for _, s := range list {
		if s.refs > 0 {
			continue
		}
		gone[s] = struct{}{}
		maps.Copy(affected, s.classes)
		if s.mark {
			delete(e.splits.marks, s.tenant)
			continue
		}
		delete(e.selectors.byText, s.String())
		drop := func(l []*liveSelector) []*liveSelector {
			return slices.DeleteFunc(l, func(x *liveSelector) bool { return x == s })
		}
		if entries := indexKeys(s.Selector); entries == nil {
			e.selectors.residual = drop(e.selectors.residual)
		} else {
			for _, key := range entries {
				if rest := drop(e.selectors.byLabel[key]); len(rest) > 0 {
					e.selectors.byLabel[key] = rest
				} else {
					delete(e.selectors.byLabel, key)
				}
			}
		}
	}
	order := func(a, b *identityClass) int { return cmp.Compare(a.number, b.number) }
	for _, c := range slices.SortedFunc(maps.Keys(affected), order) {
		sels := slices.DeleteFunc(slices.Clone(c.selectors), func(s *liveSelector) bool { _, ok := gone[s]; return ok })
		for _, p := range byNumber(c.members) {
			e.move(p, sels)
		}
	}
}
