// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/compile"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// Preparation compiles the tables that a change of policies will need, a few at a time, so that the change itself finds
// them ready. It also keeps the tables that the change no longer needs, so that they can be released a few at a time.
// A Preparation changes no verdict. Other changes may be applied between its steps. They can make a prepared table
// unnecessary, but never wrong.
type Preparation struct {
	engine   *Engine
	change   Change // policies of the change whose subjects are not marked yet
	dirty    map[identity.Numeric]struct{}
	replaced map[policy.Key]struct{}
	specs    map[string][]*rule.Spec // specs of the new policies, by namespace
	groups   *compile.Groups         // groups after the change
	changed  []*policy.Group         // groups that the change affects
	grouped  []identity.Numeric      // subjects still to be checked: their tables may depend on changed groups
	subjects []identity.Numeric      // subjects still to be compiled
	held     map[compile.Hash]struct{}
	refuse   bool
}

// Prepare starts the preparation of a change of policies. It does no work yet.
func (e *Engine) Prepare(c Change) *Preparation {
	return &Preparation{
		engine: e, groups: e.groups, change: c, replaced: make(map[policy.Key]struct{}), specs: make(map[string][]*rule.Spec),
		dirty: make(map[identity.Numeric]struct{}), held: make(map[compile.Hash]struct{}), refuse: c.Refuse,
	}
}

// Mark finds the subjects that the next policies of the change affect; policies is their number. It returns false
// when no policies are left. The caller must repeat it until then.
func (p *Preparation) Mark(policies int) bool {
	dirty := make(map[*subject]struct{})
	for ; policies > 0 && len(p.change.DeletePolicies) > 0; policies-- {
		p.replace(p.change.DeletePolicies[0], nil, dirty)
		p.change.DeletePolicies = p.change.DeletePolicies[1:]
	}
	for ; policies > 0 && len(p.change.UpsertPolicies) > 0; policies-- {
		o := &p.change.UpsertPolicies[0]
		p.replace(o.Key, o, dirty)
		p.change.UpsertPolicies = p.change.UpsertPolicies[1:]
	}
	p.markGrouped(policies, dirty)
	for s := range dirty {
		if _, ok := p.dirty[s.number]; !ok {
			p.dirty[s.number] = struct{}{}
			p.subjects = append(p.subjects, s.number)
		}
	}
	if len(p.change.DeletePolicies)+len(p.change.UpsertPolicies)+len(p.grouped) > 0 {
		return true
	}
	p.dirty = nil
	slices.Sort(p.subjects)
	return false
}

func (p *Preparation) replace(key policy.Key, after *policy.Object, dirty map[*subject]struct{}) {
	p.replaced[key] = struct{}{}
	before := p.engine.objects[key]
	if before != nil {
		for i := range before.Specs {
			p.engine.markSelected(&before.Specs[i], dirty)
		}
	}
	if after != nil {
		for i := range after.Specs {
			spec := &after.Specs[i]
			p.engine.markSelected(spec, dirty)
			p.specs[spec.Namespace] = append(p.specs[spec.Namespace], spec)
		}
	}
	if before != nil && before.Group != nil {
		p.regroup(before.Group).Delete(before.Group.Name)
	}
	if after != nil && after.Group != nil {
		p.regroup(after.Group).Set(after.Group)
	}
}

// regroup records an added, removed or changed group, and returns the groups after the change.
func (p *Preparation) regroup(g *policy.Group) *compile.Groups {
	if p.groups == p.engine.groups {
		p.groups = p.groups.Clone()
		for n, s := range p.engine.subjects {
			if slices.ContainsFunc(s.bound[:], func(l *live) bool { return l != nil && l.program.UsesGroups() }) {
				p.grouped = append(p.grouped, n)
			}
		}
	}
	p.changed = append(p.changed, g)
	return p.groups
}

// subjectCost is the cost of checking whether a subject's tables depend on groups, as a number of policies that can
// be marked in the same time.
const subjectCost = 16

// markGrouped marks the subjects whose tables depend on changed groups, once all policies are marked.
func (p *Preparation) markGrouped(policies int, dirty map[*subject]struct{}) {
	for ; policies > 0 && len(p.grouped) > 0; policies -= subjectCost {
		s := p.engine.subjects[p.grouped[0]]
		p.grouped = p.grouped[1:]
		if s != nil && slices.ContainsFunc(s.bound[:], func(l *live) bool {
			return l != nil && l.program.UsesGroups() && l.program.Stale(p.groups, p.changed)
		}) {
			dirty[s] = struct{}{}
		}
	}
}

// Subjects returns the number of affected subjects that are still to be compiled.
func (p *Preparation) Subjects() int { return len(p.subjects) }

// Step compiles the tables of the given number of subjects. It returns true if further subjects are left.
func (p *Preparation) Step(subjects int) bool {
	for ; subjects > 0 && len(p.subjects) > 0; subjects-- {
		s := p.engine.subjects[p.subjects[0]]
		p.subjects = p.subjects[1:]
		if s == nil || p.engine.peers[s.number] == nil {
			continue
		}
		for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
			if l := s.bound[d]; l != nil {
				p.hold(l)
			}
			in, enforced := p.engine.inputOf(p.engine.peers[s.number].id, d, p.groups, p.rules(s))
			if !enforced {
				continue
			}
			b := binding{s: s, d: d, program: program{in: in}}
			var err error
			if b.Program, err = p.engine.compiled(in); err != nil {
				b.reduction = &Reduction{Err: err}
			}
			list := []binding{b}
			built, err := p.engine.buildAll(list, p.refuse)
			if err != nil {
				p.subjects = nil // the change itself will return the error
				return false
			}
			if prog := list[0].Program; prog != nil {
				if l := built[prog.Hash]; l != nil {
					p.engine.tables[prog.Hash] = l
				}
				p.hold(p.engine.tables[prog.Hash])
			}
		}
	}
	return len(p.subjects) > 0
}

// hold keeps a table from being removed. It stores the hash of the table and not a pointer, because the table may be
// replaced.
func (p *Preparation) hold(l *live) {
	if _, ok := p.held[l.program.Hash]; !ok {
		p.held[l.program.Hash] = struct{}{}
		l.refs++
	}
}

// rules returns an iterator over the specs that will apply to a subject after the change.
func (p *Preparation) rules(s *subject) func(func(*rule.Spec)) {
	return func(visit func(*rule.Spec)) {
		ns, _ := p.engine.peers[s.number].id.Labels.Value(label.SourceKubernetes, label.KeyNamespace)
		for _, specs := range []map[*rule.Spec]*policy.Object{p.engine.byNamespace[ns], p.engine.clusterwide} {
			for spec, object := range specs {
				if _, ok := p.replaced[object.Key]; !ok {
					visit(spec)
				}
			}
		}
		for _, spec := range p.specs[ns] {
			visit(spec)
		}
		if ns != "" {
			for _, spec := range p.specs[""] {
				visit(spec)
			}
		}
	}
}

// Release releases the given number of tables, and removes those that no subject uses. It returns false when no
// tables are left. The caller must repeat it until then.
func (p *Preparation) Release(tables int) bool {
	p.subjects = nil
	list := make(map[*live]struct{})
	for hash := range p.held {
		if len(list) == tables {
			break
		}
		delete(p.held, hash)
		list[p.engine.tables[hash]] = struct{}{}
	}
	p.engine.release(inOrder(list))
	return len(p.held) > 0
}
