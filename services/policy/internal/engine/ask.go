// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// Draft is a copy of an engine's inputs at one moment. It shares no mutable state with the engine, so another
// goroutine can answer queries from it while the engine continues.
type Draft struct {
	config   Config
	change   Change // has no subjects
	subjects []identity.Numeric
}

// Draft returns a copy of the engine's inputs. It only copies references to policies, identities and addresses.
func (e *Engine) Draft() Draft {
	d := Draft{config: e.config, subjects: make([]identity.Numeric, 0, len(e.subjects))}
	d.config.Events, d.config.RuleSets = nil, nil // they belong to the original engine
	d.change.UpsertPolicies = make([]policy.Object, 0, len(e.objects))
	for _, o := range e.objects {
		d.change.UpsertPolicies = append(d.change.UpsertPolicies, *o)
	}
	d.change.AddIdentities = make([]peer.Identity, 0, len(e.peers))
	for _, p := range e.peers {
		d.change.AddIdentities = append(d.change.AddIdentities, p.id)
	}
	for name, l := range e.learned.byName {
		d.change.Learn = append(d.change.Learn, Name{name, slices.Clone(l.addrs)})
	}
	for a, n := range e.located {
		d.change.Locate = append(d.change.Locate, Location{a, n})
	}
	for n := range e.subjects {
		d.subjects = append(d.subjects, n)
	}
	return d
}

// Identities returns the identities that the engine knew when the draft was made. The caller must not change them.
func (d Draft) Identities() []peer.Identity { return d.change.AddIdentities }

// Fork creates an independent engine with the same policies, peers, learned names and locations, and with the given
// subjects instead of the node's. It compiles only the tables of these subjects. Fork is for queries about identities
// that are not subjects on this node. Its tables and identity classes have other numbers than in the original engine.
func (d Draft) Fork(extra []peer.Identity, subjects ...identity.Numeric) (*Engine, error) {
	c := d.change
	c.AddIdentities = slices.Concat(extra, c.AddIdentities)
	c.AddSubjects = subjects
	out := New(d.config)
	return out, out.Apply(c)
}

// Copy is Fork with all subjects of the original engine.
func (d Draft) Copy() (*Engine, error) {
	out, err := d.Fork(nil, d.subjects...)
	if err != nil {
		return nil, fmt.Errorf("copy the engine: %w", err)
	}
	return out, nil
}

// Try returns the error that Apply would return for the change. It also returns the error that Apply would return
// later, when an endpoint on this node gets an identity that the policies select. It compiles all tables from
// scratch.
func (d Draft) Try(c Change) error {
	other, err := d.Copy()
	if err != nil {
		return err
	}
	c.Refuse = true
	if err := other.Apply(c); err != nil {
		return err
	}
	return d.trySelected(other, c)
}

// Wants reports whether a table has a rule for a DNS name.
func (e *Engine) Wants(name string) bool {
	for _, l := range e.tables {
		if l.program.Wants(name) {
			return true
		}
	}
	return false
}

// SelectsName reports whether an egress rule of a subject has a DNS name or a pattern that matches a name.
func (e *Engine) SelectsName(n identity.Numeric, name string) bool {
	s := e.subjects[n]
	return s != nil && s.bound[policytable.Egress] != nil && s.bound[policytable.Egress].program.Wants(name)
}

// Identity returns the peer with a number.
func (e *Engine) Identity(n identity.Numeric) (peer.Identity, bool) {
	p := e.peers[n]
	if p == nil {
		return peer.Identity{}, false
	}
	return p.id, true
}

// IsSubject reports whether the identity is a subject of the engine.
func (e *Engine) IsSubject(n identity.Numeric) bool { return e.subjects[n] != nil }

// Identities returns the number of known peers.
func (e *Engine) Identities() int { return len(e.peers) }

// BoundTable returns a copy of the table that evaluates a direction of a subject; false if the direction is not
// enforced.
func (e *Engine) BoundTable(n identity.Numeric, d policytable.Direction) (policytable.DefineTable, bool) {
	s := e.subjects[n]
	if s == nil || s.bound[d] == nil {
		return policytable.DefineTable{}, false
	}
	return s.bound[d].definition(), true
}

// BoundID returns the ID of the table that evaluates a direction of a subject; false if there is no such subject.
func (e *Engine) BoundID(n identity.Numeric, d policytable.Direction) (policytable.ID, bool) {
	s := e.subjects[n]
	if s == nil {
		return policytable.AllowAll, false
	}
	return s.bound[d].tableID(), true
}

// LargestShare returns the policy with the most rules in the table of a subject and direction.
func (e *Engine) LargestShare(n identity.Numeric, d policytable.Direction) string {
	s := e.subjects[n]
	if s == nil {
		return ""
	}
	count := make(map[string]int)
	for _, sources := range s.sources[d] {
		for _, src := range sources {
			count[policy.Key{Kind: src.Kind, Namespace: src.Namespace, Name: src.Name}.String()]++
		}
	}
	return most(count)
}

// Subjects is a snapshot of the subjects, with the data that Selected needs. It shares no mutable state with the
// engine.
type Subjects struct {
	all         []peer.Identity // sorted by number
	byNamespace map[string][]peer.Identity
}

// Subjects returns a snapshot of the subjects.
func (e *Engine) Subjects() *Subjects {
	out := &Subjects{byNamespace: make(map[string][]peer.Identity, len(e.local))}
	for _, n := range slices.Sorted(maps.Keys(e.subjects)) {
		if p := e.peers[n]; p != nil {
			out.all = append(out.all, p.id)
			out.byNamespace[e.subjects[n].namespace] = append(out.byNamespace[e.subjects[n].namespace], p.id)
		}
	}
	return out
}

// Selected returns the subjects that a policy selects, sorted.
func (s *Subjects) Selected(o *policy.Object) []identity.Numeric {
	var out []identity.Numeric
	for i := range o.Specs {
		spec := &o.Specs[i]
		list := s.all
		if spec.Namespace != "" {
			list = s.byNamespace[spec.Namespace]
		}
		for _, id := range list {
			if selects(spec, id) {
				out = append(out, id.Number)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Selects reports whether a policy selects an identity. The identity need not be a subject.
func Selects(o *policy.Object, id peer.Identity) bool {
	return slices.ContainsFunc(o.Specs, func(s rule.Spec) bool { return selects(&s, id) })
}
