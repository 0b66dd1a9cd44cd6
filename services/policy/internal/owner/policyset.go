// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"iter"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/policy/internal/excludedlabels"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// policySet holds the policies of the node. If a change of a policy could not be stored, it also contains the closed
// form of the policy, which the engine has in place of the policy. It belongs to the loop.
type policySet struct {
	all map[policy.Key]*Policy // changed by put and remove only
	// sources counts the policies by sourceName, because the names are needed at every change of a policy.
	sources map[string]int
	changes uint64 // counts calls of put and remove
	// closed contains the policies for which the engine has a closed form instead of the form in all, because a
	// change could not be stored. The closed forms isolate until the change is stored.
	closed map[policy.Key]*closedForm
}

func newPolicySet() *policySet {
	return &policySet{
		all: make(map[policy.Key]*Policy), sources: make(map[string]int), closed: make(map[policy.Key]*closedForm),
	}
}

// put adds or replaces a policy.
func (s *policySet) put(p *Policy) {
	s.remove(p.Key)
	s.all[p.Key] = p
	s.sources[sourceName(p)]++
	s.changes++
}

// remove removes a policy if it exists.
func (s *policySet) remove(k policy.Key) {
	p := s.all[k]
	if p == nil {
		return
	}
	delete(s.all, k)
	s.changes++
	name := sourceName(p)
	if s.sources[name]--; s.sources[name] == 0 {
		delete(s.sources, name)
	}
}

// dnsRules returns the DNS rules of the accepted policies for which takes returns true; nil takes all.
func (s *policySet) dnsRules(takes func(policy.Key) bool) policy.DNSRules {
	var out policy.DNSRules
	for k, p := range s.all {
		if p.inForce() && (takes == nil || takes(k)) {
			out.Add(p.object)
		}
	}
	return out
}

// replace changes policies, and returns a function that undoes the change.
func (s *policySet) replace(puts []*Policy, gone []policy.Key) (undo func()) {
	former := make(map[policy.Key]*Policy, len(puts)+len(gone))
	for _, p := range puts {
		if _, seen := former[p.Key]; !seen {
			former[p.Key] = s.all[p.Key]
		}
		s.put(p)
	}
	for _, k := range gone {
		if _, seen := former[k]; !seen {
			former[k] = s.all[k]
		}
		s.remove(k)
	}
	return func() {
		for k, p := range former {
			if p == nil {
				s.remove(k)
			} else {
				s.put(p)
			}
		}
	}
}

// stored removes the closed forms of policies whose change is stored.
func (s *policySet) stored(puts []*Policy, gone []policy.Key) {
	for _, p := range puts {
		delete(s.closed, p.Key)
	}
	for _, k := range gone {
		delete(s.closed, k)
	}
}

// closedForm is the form that the engine has of a policy whose change could not be stored.
type closedForm struct {
	policy.Object
	of *Policy // the policy that must be stored; nil: it must be removed
}

// close returns the closed form of a policy whose change could not be stored. The new version is p; nil means that
// the policy should be removed. The closed form isolates the pods that the former and the new version select. It
// returns false if the policy already has this form.
func (s *policySet) close(k policy.Key, p *Policy) (policy.Object, bool) {
	if before := s.closed[k]; before != nil && (before.of == nil) == (p == nil) && (p == nil || before.of.same(p)) {
		return policy.Object{}, false
	}
	form := &closedForm{Object: policy.Object{Key: k}, of: p}
	add := func(x *policy.Object) {
		form.Specs = append(form.Specs, isolationOf(x.Specs)...)
		if x.Group != nil {
			labels := x.Group.Labels.All()
			if form.Group != nil {
				labels = append(labels, form.Group.Labels.All()...)
			}
			form.Group = &policy.Group{Name: x.Group.Name, Labels: label.NewSet(labels...), Closed: true}
		}
	}
	if old := s.all[k]; old != nil && old.inForce() {
		add(old.object)
	}
	if p != nil {
		add(p.object)
	}
	s.closed[k] = form
	return form.Object, true
}

// filter applies another label filter, and returns the policies whose form in the engine changes.
func (s *policySet) filter(f *excludedlabels.Filter) (changed []policy.Object) {
	for _, p := range s.all {
		was := p.closed
		p.filter(f)
		// If the policy has a closed form, the engine has the closed form, which the filter does not change.
		if p.inForce() && (was || p.closed) && s.closed[p.Key] == nil {
			changed = append(changed, *p.object)
		}
	}
	return changed
}

// enforced returns the engine's form of a policy; nil if the engine does not have it.
func (s *policySet) enforced(k policy.Key) *policy.Object {
	if closed := s.closed[k]; closed != nil {
		return &closed.Object
	}
	if p := s.all[k]; p != nil && p.inForce() {
		return p.object
	}
	return nil
}

// by returns the origin of the policy in the form for package managed.
func (p *Policy) by() managed.By {
	return managed.By{Source: p.Source, Origin: p.Origin, Manager: p.Manager}
}

// managed returns access to the policies in the form for package managed.
func (s *policySet) managed(configured func(source string) bool) *managed.Objects[policy.Key] {
	return &managed.Objects[policy.Key]{
		By: func(k policy.Key) (managed.By, bool) {
			p := s.all[k]
			if p == nil {
				return managed.By{}, false
			}
			return p.by(), true
		},
		All: func(yield func(policy.Key, managed.By) bool) {
			for k, p := range s.all {
				if !yield(k, p.by()) {
					return
				}
			}
		},
		Configured: configured,
		Compare:    policy.Key.Compare,
	}
}

// originsOf yields the origin of each policy of a source, so it may yield an origin several times.
func (s *policySet) originsOf(source string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, p := range s.all {
			if p.Source == source && !yield(p.Origin) {
				return
			}
		}
	}
}
