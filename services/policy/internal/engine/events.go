// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"cmp"
	"crypto/sha256"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/compile"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// Event is one step of what the engine does to its tables, with the name that
// it has in the stream and in the datapath. A reader that carries the steps out
// in their order has the same tables: after every single one, each
// verdict is that of before the change or that of after it.
type Event interface{ event() }

// TableID numbers tables in the order in which they were made; it is never
// used twice by an engine.
type TableID uint64

// AllowAll is the table of directions in which nothing is enforced. It is
// never defined.
const AllowAll TableID = 0

// ClassKey is the stable name of an identity class: it depends on what the class is,
// and not on when the engine met it.
type ClassKey [16]byte

type (
	// DefineIdentityClass gives an identity class its name, before it is used.
	DefineIdentityClass struct {
		IdentityClass table.IdentityClass
		Key           ClassKey
	}
	// RetireIdentityClass says that no identity has the class and no table a row.
	RetireIdentityClass struct{ IdentityClass table.IdentityClass }

	// SetIdentity stores the entry of an identity; an entry that is not Known
	// forgets it.
	SetIdentity struct {
		Identity identity.Numeric
		Entry    table.Entry
	}

	// DefineTable brings a whole table. It belongs to the receiver.
	DefineTable struct {
		Table   TableID
		Hash    compile.Hash
		Content *table.Table
	}
	// GrowTable appends classes to a table.
	GrowTable struct {
		Table   TableID
		Classes [][]table.Interval
	}
	// RetireTable says that no direction is bound to the table any more.
	RetireTable struct{ Table TableID }

	// SetPeer inserts a row; it replaces none.
	SetPeer struct {
		Table         TableID
		IdentityClass table.IdentityClass
		Class         table.Class
	}
	// DeletePeer deletes a row.
	DeletePeer struct {
		Table         TableID
		IdentityClass table.IdentityClass
	}

	// SetPrefix inserts or replaces a prefix.
	SetPrefix struct {
		Table   TableID
		Prefix  netip.Prefix
		Classes [identity.PeerScopes]table.Class
	}
	// DeletePrefix deletes a prefix.
	DeletePrefix struct {
		Table  TableID
		Prefix netip.Prefix
	}

	// BindSubject points a direction of a subject at a table. The sources are
	// the source locations of each rule, number 1 first.
	BindSubject struct {
		Subject   identity.Numeric
		Direction rule.Direction
		Table     TableID
		Sources   [][]rule.Source
		// Tenant is the tenant of the subject, which has a guarantee of so many percent.
		Tenant    shares.Tenant
		Guarantee int
	}
	// RemoveSubject says that the node has no such subject any more.
	RemoveSubject struct{ Subject identity.Numeric }
)

func (DefineIdentityClass) event() {}
func (RetireIdentityClass) event() {}
func (SetIdentity) event()         {}
func (DefineTable) event()         {}
func (GrowTable) event()           {}
func (RetireTable) event()         {}
func (SetPeer) event()             {}
func (DeletePeer) event()          {}
func (SetPrefix) event()           {}
func (DeletePrefix) event()        {}
func (BindSubject) event()         {}
func (RemoveSubject) event()       {}

func (e *Engine) emit(ev Event) {
	if e.config.Events != nil {
		e.config.Events(ev)
	}
}

// bindEvent says which table a direction of a subject is bound to.
func (e *Engine) bindEvent(s *subject, d rule.Direction, l *live) BindSubject {
	b := BindSubject{Subject: s.number, Direction: d, Table: l.tableID(), Sources: l.sources(s.sources[d])}
	if e.config.Tenant != nil {
		s.tenant, s.guarantee = e.config.Tenant(s.namespace)
		b.Tenant, b.Guarantee = s.tenant, s.guarantee
	}
	return b
}

// TenantsChanged reports the tables of subjects whose namespaces belong to other tenants now.
func (e *Engine) TenantsChanged() {
	e.recount()
	if e.config.Tenant == nil || e.config.Events == nil {
		return
	}
	for _, n := range slices.Sorted(maps.Keys(e.subjects)) {
		s := e.subjects[n]
		if t, guarantee := e.config.Tenant(s.namespace); t == s.tenant && guarantee == s.guarantee {
			continue
		}
		for d, l := range s.bound {
			if s.told[d] {
				e.emit(e.bindEvent(s, rule.Direction(d), l))
			}
		}
	}
}

// emitFor reports a change of a table that its readers know.
func (e *Engine) emitFor(l *live, ev Event) {
	if e.config.Events != nil && l.defined {
		e.grown(l)
		e.config.Events(ev)
	}
}

// grown reports the classes that a table has gained.
func (e *Engine) grown(l *live) {
	t := l.table
	if len(t.Classes) > l.sentClasses {
		e.config.Events(GrowTable{Table: l.id, Classes: t.Lists(l.sentClasses)})
		l.sentClasses = len(t.Classes)
	}
}

// define reports a table before a subject is bound to it.
func (e *Engine) define(l *live) {
	if l.defined {
		return
	}
	l.defined = true
	if e.config.Events != nil {
		l.sentClasses = len(l.table.Classes)
		e.emit(l.definition())
	}
}

func (l *live) definition() DefineTable {
	t := &table.Table{
		Header: l.table.Header, Rules: slices.Clone(l.table.Rules), Classes: slices.Clone(l.table.Classes),
		Nodes: slices.Clone(l.table.Nodes), Peers: maps.Clone(l.table.Peers),
		Listed: l.table.Listed,
	}
	l.table.Prefixes.All(t.Prefixes.Set)
	return DefineTable{Table: l.id, Hash: l.program.Hash, Content: t}
}

func (l *live) tableID() TableID {
	if l == nil {
		return AllowAll
	}
	return l.id
}

// text identifies the selector in every run.
func (s *liveSelector) text() string {
	if s.mark {
		return "mark of " + s.tenant.String()
	}
	return s.String()
}

// classKey is the hash of what makes the class: kind, named ports and the texts
// of the selectors.
func (c *identityClass) stableKey() ClassKey {
	texts := make([]string, len(c.selectors))
	for i, s := range c.selectors {
		texts[i] = s.text()
	}
	slices.Sort(texts)
	h := sha256.New()
	h.Write([]byte{byte(c.kind)})
	h.Write([]byte(c.portsText))
	for _, t := range texts {
		h.Write([]byte{0})
		h.Write([]byte(t))
	}
	return ClassKey(h.Sum(nil)[:16])
}

// Snapshot reports everything there is, for a reader that begins now. The order
// depends on nothing but the numbers.
func (e *Engine) Snapshot(report func(Event)) {
	for _, n := range slices.Sorted(maps.Keys(e.byNumber)) {
		report(DefineIdentityClass{IdentityClass: n, Key: e.byNumber[n].stableKey()})
	}
	for _, n := range slices.Sorted(maps.Keys(e.peers)) {
		if e.peers[n].class != nil {
			report(SetIdentity{Identity: n, Entry: e.Entry(n)})
		}
	}
	tables := slices.SortedFunc(maps.Values(e.tables), func(a, b *live) int { return cmp.Compare(a.id, b.id) })
	for _, l := range tables {
		if l.defined { // else no subject is bound to it yet
			report(l.definition())
		}
	}
	for _, n := range slices.Sorted(maps.Keys(e.subjects)) {
		s := e.subjects[n]
		for d, l := range s.bound {
			report(e.bindEvent(s, rule.Direction(d), l))
		}
	}
}
