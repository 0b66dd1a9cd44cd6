// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"cmp"
	"crypto/sha256"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

func (e *Engine) emit(ev policytable.Step) {
	if e.config.Events != nil {
		e.config.Events(ev)
	}
}

// bindEvent returns the step that binds a direction of a subject to a table.
func (e *Engine) bindEvent(s *subject, d policytable.Direction, l *live) policytable.BindSubject {
	b := policytable.BindSubject{Subject: s.number, Direction: d, Table: l.tableID(), Rules: l.sources(s.sources[d])}
	if e.config.Tenant != nil {
		s.tenant, s.guarantee = e.config.Tenant(s.namespace)
		b.Tenant, b.Guarantee = s.tenant, s.guarantee
	}
	return b
}

// TenantsChanged emits the bindings of subjects again if their namespaces now belong to other tenants.
func (e *Engine) TenantsChanged() {
	e.recount()
	if e.config.Tenant == nil {
		return
	}
	defer e.renumber()
	for l := range e.redirecting {
		e.unpaid[l] = struct{}{}
	}
	if e.config.Events == nil {
		return
	}
	for _, n := range slices.Sorted(maps.Keys(e.subjects)) {
		s := e.subjects[n]
		if t, guarantee := e.config.Tenant(s.namespace); t == s.tenant && guarantee == s.guarantee {
			continue
		}
		for d, l := range s.bound {
			if s.told[d] {
				e.emit(e.bindEvent(s, policytable.Direction(d), l))
			}
		}
	}
}

// emitFor emits a change of a table, if subscribers know the table.
func (e *Engine) emitFor(l *live, ev policytable.Step) {
	if e.config.Events != nil && l.defined {
		e.grown(l)
		e.config.Events(ev)
	}
}

// grown emits the classes that were added to a table.
func (e *Engine) grown(l *live) {
	t := l.table
	if len(t.Classes) > l.sentClasses {
		e.config.Events(policytable.GrowTable{Table: l.id, Classes: t.Ranges(l.sentClasses)})
		l.sentClasses = len(t.Classes)
	}
}

// define emits a table before a subject is bound to it.
func (e *Engine) define(l *live) {
	if l.defined {
		return
	}
	l.defined = true
	l.missing = l.missing || e.divided(l) // a Preparation may have compiled it when the tenants had other shares
	e.nameSets(l)
	e.want(l, 1)
	if e.config.Events != nil {
		l.sentClasses = len(l.table.Classes)
		e.emit(l.definition())
	}
}

// definition returns the step that defines the table. Readers of the step may modify it.
func (l *live) definition() policytable.DefineTable {
	d := l.table.Definition(l.id, l.structure())
	d.Content.Rules = slices.Clone(d.Content.Rules)
	return d
}

func (l *live) tableID() policytable.ID {
	if l == nil {
		return policytable.AllowAll
	}
	return l.id
}

// text returns a text that identifies the selector across runs of the process.
func (s *liveSelector) text() string {
	if s.mark {
		return "mark of " + s.tenant.String()
	}
	return s.String()
}

// identityStep returns the step that sets the entry of an identity, or removes it if the entry is not Known.
func identityStep(n identity.Numeric, w table.Entry) policytable.SetIdentity {
	if !w.Known {
		return policytable.SetIdentity{Identity: n}
	}
	return policytable.SetIdentity{Identity: n, IdentityClass: w.IdentityClass, Kind: w.Kind, Scope: w.Scope}
}

// stableKey returns a hash of the properties of the class: kind, named ports and the texts of its selectors.
func (c *identityClass) stableKey() policytable.ClassKey {
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
	return policytable.ClassKey(h.Sum(nil)[:16])
}

// Snapshot passes the steps that build the whole state to report, for a new subscriber. Identity classes, identities,
// tables and subjects come one kind after the other, each in ascending order of its numbers.
func (e *Engine) Snapshot(report func(policytable.Step)) {
	for _, n := range slices.Sorted(maps.Keys(e.byNumber)) {
		report(policytable.DefineIdentityClass{IdentityClass: n, Key: e.byNumber[n].stableKey()})
	}
	for _, n := range slices.Sorted(maps.Keys(e.peers)) {
		if e.peers[n].class != nil {
			report(identityStep(n, e.Entry(n)))
		}
	}
	tables := slices.SortedFunc(maps.Values(e.tables), func(a, b *live) int { return cmp.Compare(a.id, b.id) })
	for _, l := range tables {
		if l.defined { // otherwise no subject is bound to it yet
			report(l.definition())
		}
	}
	for _, n := range slices.Sorted(maps.Keys(e.subjects)) {
		s := e.subjects[n]
		for d, l := range s.bound {
			report(e.bindEvent(s, policytable.Direction(d), l))
		}
	}
}
