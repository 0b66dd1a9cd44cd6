// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package excludedlabels handles policies that refer to labels that identities do not include. No identity has such a
// label, so a selector with it cannot be evaluated: In and Exists would select no pod, and NotIn and DoesNotExist every
// pod. The package makes such policies stricter, so that they never allow more than their author wrote.
package excludedlabels

import (
	"slices"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/labelfilter"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
)

// Filter determines which labels identities have.
type Filter struct {
	Workloads labelfilter.Filter
	Nodes     labelfilter.Filter
}

// Default returns the filter of an identity service without configured rules.
func Default() Filter { return Filter{Workloads: labelfilter.Default()} }

// missing is a label key that identities do not include.
type missing struct {
	key     string
	by      string // the filter rule that excludes the key
	setting string // setting of sluice-identity that includes keys
}

// counts reports whether identities include the labels to which a requirement refers.
func (f Filter) counts(q selector.Requirement) (m missing, ok bool) {
	filter, setting := f.Workloads, "labels.include"
	sources := []string{q.Source}
	switch q.Source {
	case label.SourceReserved, label.SourceCIDRGroup, label.SourceGenerated:
		return missing{}, true
	case label.SourceNode:
		filter, setting = f.Nodes, "nodeLabels.include"
	case "":
		sources = []string{label.SourceKubernetes, label.SourceCNI}
	}
	for _, source := range sources {
		if keep, by := filter.Decide(label.Label{Source: source, Key: q.Key}); !keep {
			return missing{q.Key, by, setting}, false
		}
	}
	return missing{}, true
}

// split returns the requirements of a selector that can be evaluated, and the missing keys of the other requirements.
func (f Filter) split(s selector.Selector) (counted selector.Selector, without []missing) {
	var reqs []selector.Requirement
	for _, q := range s.Requirements() {
		if m, ok := f.counts(q); !ok {
			without = append(without, m)
		} else {
			reqs = append(reqs, q)
		}
	}
	if len(without) == 0 {
		return s, nil
	}
	return selector.New(reqs...), without
}

// Apply makes an object stricter if its selectors use missing keys. If the subject's selector uses a missing key,
// every pod that the selector may match is isolated. If a peer's selector uses a missing key, allow rules lose the
// peer, and deny rules apply to every peer that the selector may match. The notes of the object contain the keys. If
// no selector uses a missing key, Apply returns the object itself and false.
func (f Filter) Apply(ob policy.Object) (out policy.Object, closed bool) {
	out = ob
	for i, spec := range ob.Specs {
		changed, notes := f.spec(spec, ob.Key)
		if len(notes) == 0 {
			continue
		}
		if !closed {
			closed = true
			out.Specs, out.Notes = slices.Clone(ob.Specs), slices.Clone(ob.Notes)
		}
		out.Specs[i] = changed
		seen := make(map[note]bool)
		for _, n := range notes {
			if seen[n] {
				continue
			}
			seen[n] = true
			out.Notes.Unsupported(n.path,
				"the label key %q, which identities leave out (rule %q): %s; %s of sluice-identity includes the key", n.key,
				n.by, n.then, n.setting)
		}
	}
	return out, closed
}

// note describes the effect of missing keys on a selector.
type note struct {
	missing
	path, then string
}

func (f Filter) spec(spec rule.Spec, key policy.Key) (rule.Spec, []note) {
	var notes []note
	note1 := func(path, then string, keys []missing) {
		for _, m := range keys {
			notes = append(notes, note{m, path, then})
		}
	}
	if subject, without := f.split(spec.Subject); len(without) > 0 {
		note1("spec", "every pod that it may select is isolated", without)
		spec.Subject = subject
		return policy.IsolateSpec(key, spec), notes
	}
	rules := make([]*rule.Rule, 0, len(spec.Rules))
	for _, r := range spec.Rules {
		peers := r.Peers
		peers.Selectors = make([]selector.Selector, 0, len(r.Peers.Selectors))
		changed := false
		for _, s := range r.Peers.Selectors {
			counted, without := f.split(s)
			switch {
			case len(without) == 0:
				peers.Selectors = append(peers.Selectors, s)
				continue
			case r.Action == policytable.Deny:
				note1(r.Source.Path, "all peers that it may select are denied", without)
				peers.Selectors = append(peers.Selectors, counted)
			default:
				note1(r.Source.Path, "the selector selects no peer", without)
			}
			changed = true
		}
		switch {
		case !changed:
			rules = append(rules, r)
		case !peers.Nobody():
			next := *r
			next.Peers = peers
			rules = append(rules, next.Seal())
		}
	}
	if len(notes) > 0 {
		spec.Rules = rules
	}
	return spec, notes
}
