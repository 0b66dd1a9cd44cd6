// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/policy/internal/compile"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// live is a table in use, with the data to keep it up to date.
type live struct {
	id      policytable.ID
	program *compile.Program
	table   *table.Table
	builder *table.Builder
	refs    int // number of directions of subjects that are bound to the table
	brings  map[*liveSelector][]uint16
	memo    map[string]policytable.Class
	// identityClasses and addressClasses are the peer classes that the identity side and the address side use.
	identityClasses map[policytable.Class]struct{}
	addressClasses  map[policytable.Class]struct{}
	// coarse is set if the table had too many address classes. Address classes with equal verdicts are then merged,
	// and a rule number means its run of consecutive rules with the same effect.
	coarse bool
	// defined is set if the table was emitted. sentClasses is the number of its classes that were emitted.
	defined     bool
	sentClasses int
	// unclassified contains the identity classes for which the table has no peer class. Their peers are treated as
	// unknown.
	unclassified map[*identityClass]struct{}
	noCapacity   error         // the error for the first class in unclassified
	tenant       shares.Tenant // tenant of the first subject
	used         bool          // tenant is set
	shared       bool          // subjects of several tenants use the table
	// missing is set if a class needs a joint rule that the program does not have.
	missing bool
	// unions are the sets of the joint rules that the peers need. lacking contains lists of rules, as text: those
	// whose joint rule is missing because its rule set exceeds the share of the table's tenant.
	unions  []union
	lacking map[string]struct{}
	named   []layer7.Digest // rule sets that the table uses; set while the table is defined
	// sets contains the rule sets of named, with their numbers when the table was defined.
	sets   map[layer7.Digest]namedSet
	payers []shares.Tenant // tenants of the table's subjects; each pays for the numbers of the rule sets
}

// function returns the intervals of a rule set. It sets missing if they need a joint rule that the program lacks.
func (l *live) function(numbers []uint16, ports []workload.NamedPort, unknown bool) []table.Interval {
	return l.program.Joined(numbers, ports, unknown, func(members []uint16) {
		if _, ok := l.lacking[fmt.Sprint(members)]; !ok {
			l.missing = true
		}
	})
}

// memoKey returns the key under which the class of a rule set with a peer's ports is stored.
func (l *live) memoKey(numbers []uint16, portsText string, unknown bool) string {
	key := make([]byte, 0, 1+2*len(numbers)+len(portsText))
	if unknown {
		key = append(key, 1)
	} else {
		key = append(key, 0)
	}
	for _, n := range numbers {
		key = binary.LittleEndian.AppendUint16(key, n)
	}
	if l.program.UsesNames(numbers) {
		key = append(key, portsText...)
	}
	return string(key)
}

// classFor returns the class of a rule set whose named ports are resolved with a peer's ports.
func (l *live) classFor(numbers []uint16, ports []workload.NamedPort, portsText string, unknown bool) (policytable.Class, error) {
	key := l.memoKey(numbers, portsText, unknown)
	if c, ok := l.memo[key]; ok {
		return c, nil
	}
	c, err := l.builder.Class(l.table, l.function(numbers, ports, unknown))
	if err != nil {
		return 0, err
	}
	l.memo[key] = c
	return c, nil
}

// matched returns the rules that apply to the peers of an identity class on the identity side.
func (l *live) matched(c *identityClass) []uint16 {
	var brought [][]uint16
	if len(c.selectors) <= len(l.brings) {
		for _, s := range c.selectors {
			if b, ok := l.brings[s]; ok {
				brought = append(brought, b)
			}
		}
	} else {
		for s, b := range l.brings {
			if _, ok := s.classes[c]; ok {
				brought = append(brought, b)
			}
		}
	}
	return l.program.Matched(brought, c.kind)
}

// classOf returns the peer class of an identity class on the identity side, given the rules that apply to it.
func (l *live) classOf(c *identityClass, matched []uint16) (policytable.Class, error) {
	class, err := l.classFor(matched, c.ports, c.portsText, c.kind == identity.KindUnknown)
	if err != nil {
		return 0, err
	}
	return class, l.useIdentity(class)
}

// inOrder sorts tables by id, so that the engine is deterministic.
func inOrder[V any](set map[*live]V) []*live {
	return slices.SortedFunc(maps.Keys(set), func(a, b *live) int { return cmp.Compare(a.id, b.id) })
}

func (l *live) useIdentity(c policytable.Class) error {
	if _, ok := l.identityClasses[c]; ok {
		return nil
	}
	if n := len(l.identityClasses) + 1; n > table.MaxIdentityClasses {
		return &table.ErrTooLarge{What: "identity classes", Got: n, Limit: table.MaxIdentityClasses}
	}
	l.identityClasses[c] = struct{}{}
	return nil
}

// leftovers reports whether the table has peer classes that no peer uses.
func (l *live) leftovers() bool {
	used := make(map[policytable.Class]struct{}, len(l.identityClasses))
	for _, c := range l.table.Default {
		used[c] = struct{}{}
	}
	for _, c := range l.table.Peers {
		used[c] = struct{}{}
	}
	return len(used) < len(l.identityClasses)
}

// build compiles programs into tables that are not in use yet. failed holds the programs that are too large.
func (e *Engine) build(programs []*compile.Program, payers map[compile.Hash]shares.Tenant) (
	built map[compile.Hash]*live, failed map[compile.Hash]error,
) {
	var sels []selector.Selector
	for _, p := range programs {
		sels = append(sels, p.Selectors...)
	}
	e.acquire(programs)
	built, failed = make(map[compile.Hash]*live, len(programs)), make(map[compile.Hash]error)
	for _, p := range programs {
		if err := e.large[p.Hash]; err != nil {
			failed[p.Hash] = err
			continue
		}
		l, err := e.compile(p, payers[p.Hash])
		if err != nil {
			e.remove(l)
			if failed[p.Hash] = err; !p.NeedsPodAddresses() && len(p.Names()) == 0 {
				if len(e.large) >= maxLarge {
					clear(e.large)
				}
				e.large[p.Hash] = err
			}
			continue
		}
		built[p.Hash] = l
	}
	if len(failed) > 0 {
		e.sweep(sels)
	}
	return built, failed
}

// sweep retires the selectors that no table uses.
func (e *Engine) sweep(sels []selector.Selector) {
	var unused []*liveSelector
	for _, s := range sels {
		if ls := e.selectors.byText[s.String()]; ls != nil && ls.refs == 0 && !slices.Contains(unused, ls) {
			unused = append(unused, ls)
		}
	}
	e.retire(unused)
}

// compile creates a table: its default classes, its rows, its prefixes. If it has too many address classes, classes
// with equal verdicts are merged. If it fails, it also returns the table, so that the caller can remove it.
//
// payer is the tenant that pays for the unions of rule sets.
func (e *Engine) compile(p *compile.Program, payer shares.Tenant) (*live, error) {
	e.counters.Tables++
	l, err := e.compileAs(p, payer, e.coarse)
	if errors.As(err, new(*manyClasses)) && !l.coarse {
		e.remove(l)
		l, err = e.compileAs(p, payer, true)
	}
	return l, err
}

// manyClasses is the error that the address side needs too many classes.
type manyClasses struct{ error }

func (m *manyClasses) Unwrap() error { return m.error }

func (e *Engine) compileAs(p *compile.Program, payer shares.Tenant, coarse bool) (*live, error) {
	e.lastTable++
	p = p.Plain()
	l := &live{
		coarse:  coarse,
		id:      e.lastTable,
		program: p, table: p.NewTable(), builder: table.NewBuilder(),
		brings: make(map[*liveSelector][]uint16, len(p.Selectors)), memo: make(map[string]policytable.Class),
		identityClasses: make(map[policytable.Class]struct{}), addressClasses: make(map[policytable.Class]struct{}),
		unclassified: make(map[*identityClass]struct{}),
	}
	for _, s := range p.Selectors {
		ls := e.selectors.byText[s.String()]
		ls.refs++
		ls.tables[l] = struct{}{}
		l.brings[ls] = p.Brings(s.String())
	}
	e.markTable(l)
	if err := e.join(l, payer); err != nil {
		return l, err
	}
	p = l.program
	named := p.NamesForEveryone()
	for k := range identity.Kinds {
		var brought [][]uint16
		for s, b := range l.brings {
			if s.defaults[k] {
				brought = append(brought, b)
			}
		}
		class, err := l.classFor(p.Matched(brought, k), nil, "", k == identity.KindUnknown)
		if err == nil {
			err = l.useIdentity(class)
		}
		if err != nil {
			return l, err
		}
		l.table.Default[k] = class
		// A class that matches fewer rules than the default peer of its kind needs a row, too.
		if len(brought) > 0 || named {
			e.wide[k][l] = struct{}{}
		}
	}
	// Write the rows last: only they depend on the existing peers.
	if _, err := e.prefixes(l); err != nil {
		return l, err
	}
	for _, r := range e.rowsOf(l) {
		if err := e.addRow(l, r.class, r.matched); err != nil {
			return l, err
		}
	}
	return l, nil
}

// row is an identity class that may need a row, with its rule set.
type row struct {
	class   *identityClass
	matched []uint16
	key     string
}

// rowsOf returns the identity classes that may need a row in a new table. Their order is fixed, so that the table's
// classes get the same numbers in every run.
func (e *Engine) rowsOf(l *live) []row {
	seen := make(map[*identityClass]struct{})
	for s := range l.brings {
		maps.Copy(seen, s.classes)
	}
	for k := range identity.Kinds {
		if _, ok := e.wide[k][l]; !ok {
			continue
		}
		for _, c := range e.classes {
			if c.kind == k {
				seen[c] = struct{}{}
			}
		}
	}
	rows := make([]row, 0, len(seen))
	for c := range seen {
		m := l.matched(c)
		rows = append(rows, row{c, m, l.memoKey(m, c.portsText, c.kind == identity.KindUnknown)})
	}
	slices.SortFunc(rows, func(a, b row) int {
		return cmp.Or(strings.Compare(a.key, b.key), cmp.Compare(a.class.number, b.class.number))
	})
	return rows
}

// places returns the single addresses that matter to a table.
func (e *Engine) places(l *live) []compile.Place {
	addrs := make(map[netip.Addr]struct{})
	if len(l.program.Names()) > 0 {
		for name, n := range e.learned.byName {
			if !name.For(l.program.SubjectNamespace()) || !l.program.Wants(name.Name()) {
				continue
			}
			for _, a := range n.addrs {
				addrs[a] = struct{}{}
			}
		}
	}
	if l.program.NeedsPodAddresses() {
		for a, n := range e.located {
			if p := e.peers[n]; p != nil && len(p.id.Ports) > 0 {
				addrs[a] = struct{}{}
			}
		}
	}
	out := make([]compile.Place, 0, len(addrs))
	for a := range addrs {
		out = append(out, e.place(l, a))
	}
	slices.SortFunc(out, func(a, b compile.Place) int { return a.Addr.Compare(b.Addr) })
	return out
}

// place returns the names and ports that are known for an address.
func (e *Engine) place(l *live, a netip.Addr) compile.Place {
	p := compile.Place{Addr: a}
	if len(l.program.Names()) > 0 {
		p.Names = e.learned.names(a, l.program.SubjectNamespace())
	}
	if l.program.NeedsPodAddresses() {
		if owner := e.peers[e.located[a]]; owner != nil {
			p.Ports = owner.id.Ports
		}
	}
	return p
}

// addressClass returns the class of a rule set on the address side.
func (l *live) addressClass(numbers []uint16, ports []workload.NamedPort) (policytable.Class, error) {
	text := workload.NamedPortsText(ports)
	var c policytable.Class
	var err error
	if l.coarse {
		key := "coarse " + l.memoKey(numbers, text, false)
		var known bool
		if c, known = l.memo[key]; !known {
			if c, err = l.builder.Class(l.table, l.program.Coarse(l.function(numbers, ports, false))); err == nil {
				l.memo[key] = c
			}
		}
	} else {
		c, err = l.classFor(numbers, ports, text, false)
	}
	if err != nil {
		return 0, &manyClasses{err}
	}
	if _, ok := l.addressClasses[c]; !ok {
		if n := len(l.addressClasses) + 1; n > table.MaxAddressClasses {
			return 0, &manyClasses{&table.ErrTooLarge{What: "address classes", Got: n, Limit: table.MaxAddressClasses}}
		}
		l.addressClasses[c] = struct{}{}
	}
	return c, nil
}

// updateAddresses updates the entries of single addresses in a live table. No other entry depends on the entry of a
// single address, because its prefix contains no other prefix.
func (e *Engine) updateAddresses(l *live, addrs map[netip.Addr]struct{}) error {
	for _, a := range slices.SortedFunc(maps.Keys(addrs), netip.Addr.Compare) {
		err := e.updateAddress(l, a)
		if errors.As(err, new(*manyClasses)) { // the limit may be exceeded only because of unused classes
			return e.rebuildPrefixes(l)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// updateAddress updates one address of a table.
func (e *Engine) updateAddress(l *live, a netip.Addr) error {
	place := e.place(l, a)
	var classes [identity.PeerScopes]policytable.Class
	for s := range identity.PeerScopes {
		numbers, ports := l.program.Where(a, s, []compile.Place{place})
		c, err := l.addressClass(l.program.WithEverywhere(s, numbers), ports)
		if err != nil {
			return err
		}
		classes[s] = c
	}
	prefix := netip.PrefixFrom(a, a.BitLen())
	outer, ok := l.table.Prefixes.Around(a)
	if !ok {
		outer = l.table.Address
	}
	now, present := l.table.Prefixes.Exact(prefix)
	switch {
	case classes == outer && present:
		l.table.Prefixes.Delete(prefix)
		e.counters.Prefixes++
		e.emitFor(l, policytable.DeletePrefix{Table: l.id, Prefix: prefix})
	case classes != outer && !present && l.table.Prefixes.Full(a):
		return &table.ErrTooLarge{What: "prefixes", Got: table.MaxPrefixes + 1, Limit: table.MaxPrefixes}
	case classes != outer && (!present || now != classes):
		l.table.Prefixes.Set(prefix, classes)
		e.counters.Prefixes++
		e.emitFor(l, policytable.SetPrefix{Table: l.id, Prefix: prefix, Classes: classes})
	}
	return nil
}

// prefixes computes the address side of a table and writes it into the table. It omits learned addresses that do not
// fit.
func (e *Engine) prefixes(l *live) (changed int, err error) {
	places := e.places(l)
	changed, err = e.prefixesWith(l, places)
	learned := slices.ContainsFunc(places, func(p compile.Place) bool { return len(p.Names) > 0 })
	if err == nil || !learned || !l.coarse && errors.As(err, new(*manyClasses)) { // merged classes may fit
		return changed, err
	}
	var names []netip.Addr
	for i := range places {
		if len(places[i].Names) > 0 {
			names = append(names, places[i].Addr)
			places[i].Names = nil
		}
	}
	if changed, err = e.prefixesWith(l, places); err != nil {
		return 0, err
	}
	for _, a := range names {
		if e.updateAddress(l, a) != nil {
			break
		}
	}
	return changed, nil
}

// prefixesWith is prefixes with given places.
func (e *Engine) prefixesWith(l *live, places []compile.Place) (changed int, err error) {
	clear(l.addressClasses)
	def, list, err := l.program.Prefixes(places, l.addressClass)
	if err != nil {
		return 0, err
	}
	var blocks table.Prefixes
	var set []compile.Prefix
	before := make(map[netip.Prefix][identity.PeerScopes]policytable.Class, l.table.Prefixes.Len())
	l.table.Prefixes.All(func(p netip.Prefix, v [identity.PeerScopes]policytable.Class) { before[p] = v })
	for _, b := range list {
		if blocks.Full(b.Prefix.Addr()) {
			return 0, &table.ErrTooLarge{What: "prefixes", Got: len(list), Limit: table.MaxPrefixes}
		}
		blocks.Set(b.Prefix, b.Classes)
		if v, ok := before[b.Prefix]; !ok || v != b.Classes {
			set = append(set, b)
		}
		delete(before, b.Prefix)
	}
	l.table.Address, l.table.Prefixes = def, blocks
	for _, b := range set {
		e.emitFor(l, policytable.SetPrefix{Table: l.id, Prefix: b.Prefix, Classes: b.Classes})
	}
	for _, p := range slices.SortedFunc(maps.Keys(before), netip.Prefix.Compare) {
		e.emitFor(l, policytable.DeletePrefix{Table: l.id, Prefix: p})
	}
	return len(set) + len(before), nil
}

// rebuildPrefixes updates the address side of a live table.
func (e *Engine) rebuildPrefixes(l *live) error {
	n, err := e.prefixes(l)
	if errors.As(err, new(*manyClasses)) && !l.coarse && e.replaceTable(l) {
		return nil
	}
	e.counters.Prefixes += n
	return err
}

// release drops bindings, and removes tables without bindings and their unused selectors.
func (e *Engine) release(list []*live) {
	var unused []*liveSelector
	for _, l := range list {
		if l.refs--; l.refs > 0 {
			if _, ok := e.redirecting[l]; ok && e.config.Tenant != nil {
				e.unpaid[l] = struct{}{}
			}
			continue
		}
		delete(e.tables, l.program.Hash)
		unused = append(unused, e.remove(l)...)
	}
	slices.SortFunc(unused, func(a, b *liveSelector) int { return cmp.Compare(a.id, b.id) })
	e.retire(slices.Compact(unused))
}

// renew replaces a table that has no capacity left by a new table with the same content, but without the classes that
// no peer uses. It is needed because class numbers are not reused within a table. It reports whether the table was
// replaced.
func (e *Engine) renew(l *live) bool { return l.leftovers() && e.replaceTable(l) }

// replaceTable recompiles a table and binds its subjects to the new one.
func (e *Engine) replaceTable(l *live) bool {
	var payer shares.Tenant
	if len(l.payers) > 0 {
		payer = l.payers[0]
	}
	next, err := e.compile(l.program, payer)
	if err != nil {
		e.remove(next)
		return false
	}
	next.refs, next.tenant, next.used, next.shared = l.refs, l.tenant, l.used, l.shared
	next.payers = l.payers
	if len(next.unclassified) > 0 {
		e.incomplete[next] = struct{}{}
	}
	e.tables[l.program.Hash] = next
	for _, n := range slices.Sorted(maps.Keys(e.subjects)) {
		s := e.subjects[n]
		for d := range s.bound {
			if s.bound[d] == l {
				s.bound[d] = next
				e.counters.Binds++
				e.define(next)
				e.emit(e.bindEvent(s, policytable.Direction(d), next))
			}
		}
	}
	l.refs = 0
	e.remove(l)
	return true
}

// maxMerged limits the source locations that are listed for merged rules.
const maxMerged = 16

// sources returns the source locations of each rule for subscribers. If a number means several rules, it returns
// the first locations of these rules together.
func (l *live) sources(of [][]policytable.Source) [][]policytable.Source {
	if l == nil {
		return of
	}
	if of = l.program.Spread(of); !l.coarse {
		return of
	}
	out := slices.Clone(of)
	for first := 1; first <= len(of); {
		last := int(l.program.Run(uint16(first)))
		var places []policytable.Source
		for n := first; n <= last && len(places) < maxMerged; n++ {
			places = append(places, of[n-1]...)
			if n < last && len(places) >= maxMerged {
				places = append(places, policytable.Source{Kind: "and", Name: fmt.Sprintf("%d more rules", last-n), Path: "with the same verdict"})
			}
		}
		out[first-1] = places
		first = last + 1
	}
	return out
}

// remove removes a table from all indexes and returns its unused selectors.
func (e *Engine) remove(l *live) (unused []*liveSelector) {
	e.freed++
	delete(e.incomplete, l)
	for c := range l.unclassified {
		delete(c.unclassifiedIn, l)
	}
	for n := range l.table.Peers {
		if c := e.byNumber[n]; c != nil {
			delete(c.rows, l)
		}
	}
	delete(e.redirecting, l)
	delete(e.unpaid, l)
	if l.defined {
		e.want(l, -1)
		e.emit(policytable.RetireTable{Table: l.id})
	}
	for _, t := range l.payers {
		e.sets.Release(t, l.named)
	}
	l.named, l.sets = nil, nil
	for _, u := range l.unions {
		e.sets.Cancel(u.payer, u.key)
	}
	l.unions = nil
	for k := range e.wide {
		delete(e.wide[k], l)
	}
	for s := range l.brings {
		delete(s.tables, l)
		if s.refs--; s.refs == 0 {
			unused = append(unused, s)
		}
	}
	return unused
}
