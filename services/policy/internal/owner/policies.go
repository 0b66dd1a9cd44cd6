// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/decode"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/excludedlabels"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/record"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/source"
)

// Policy is a policy, or a stored policy that can no longer be decoded.
type Policy struct {
	Key      policy.Key
	Source   string
	Origin   string
	Manager  string // the manager whose call sent it
	Manifest []byte
	Revision uint64
	Updated  time.Time
	Rules    int
	Dropped  []string
	Notes    manifest.Notes
	// Broken is the reason for which the policy is not enforced as written; empty if it is. If it is set, the pods
	// that the policy selects are isolated, unless they cannot be determined.
	Broken string
	// Exceeds describes the limit that the policy exceeds; empty if it exceeds none. If it is set, the pods that the
	// policy selects are isolated.
	Exceeds string
	// Created and UID order the policies of a tenant. UID is empty for a policy of a file or call.
	Created time.Time
	UID     string

	read   *policy.Object // as decoded, or the rules that isolate its pods
	object *policy.Object // in the engine: read with held, made stricter by the label filter; often equal to read
	closed bool           // the label filter has made object stricter
	named  bool           // sent by its manager in this run
	known  bool           // the version of the service that accepted it knew all its fields
	// allowed contains fields that were dropped because the caller of the policy allowed it. The last version of the
	// service that enforced the policy did not know them.
	allowed []string
	// size and sum describe the whole manifest if Manifest is reduced.
	size int
	sum  []byte
	// held contains rules that isolate the pods which the last enforced version selected. It is set if the current
	// version is not enforced as written. After a restart, held is computed from heldText.
	held     []rule.Spec
	heldText []byte
	// heldLabels are the labels of the last enforced version, if the policy is a CIDR group.
	heldLabels label.Set
}

// source returns the source of the policy.
func (p *Policy) source() source.Source { return source.Of(p.Source) }

// inForce reports whether the engine has the policy, as written or isolating.
func (p *Policy) inForce() bool { return p.object != nil && p.object.Key.Kind != "" }

// usesNames reports whether the policy is accepted and allows DNS names.
func (p *Policy) usesNames() bool { return p.inForce() && p.object.UsesNames() }

// written returns the key that the text of the policy contains. For a document without a valid key, Key is only its
// position.
func (p *Policy) written() policy.Key {
	if p.Key.Kind == policy.KindDocument {
		if key, ok := decode.KeyOf(p.Manifest); ok {
			return key
		}
	}
	return p.Key
}

// Changed is the effect of a change on one policy.
type Changed = managed.Changed[policy.Key, manifest.Notes]

// Outcome is the result of a change.
type Outcome = managed.Outcome[policy.Key, manifest.Notes]

// filter computes the object for the engine from the decoded policy.
func (p *Policy) filter(f *excludedlabels.Filter) {
	p.object = p.read
	filtered, closed := f.Apply(*p.read)
	if p.closed = closed; closed {
		p.object = new(filtered)
	}
	p.addHeld()
	p.Notes, p.Rules = p.object.Notes, 0
	for i := range p.object.Specs {
		p.Rules += len(p.object.Specs[i].Rules)
	}
}

// addHeld adds the rules that isolate an earlier version to the object for the engine.
func (p *Policy) addHeld() {
	g := p.object.Group
	if len(p.held) == 0 && (g == nil || p.heldLabels.Len() == 0) {
		return
	}
	object := *p.object // the source of the policy shares p.object
	object.Specs = slices.Concat(object.Specs, p.held)
	if g != nil && p.heldLabels.Len() > 0 {
		both := *g
		both.Labels = label.NewSet(append(g.Labels.All(), p.heldLabels.All()...)...)
		object.Group = &both
	}
	p.object = &object
}

// plan decides which policies of a change are admitted. After a success, the ledger contains the change; takeBack
// undoes it.
func (o *Owner) plan(e *edit) (plan, error) {
	out := plan{
		puts: slices.Clone(e.puts), gone: slices.Clone(e.gone),
		fold: make(map[policy.Key]struct{}), unfold: make(map[policy.Key]struct{}),
	}
	err := o.places.divide(e, &out, o.listed(), o.sources.foldingListed())
	if out.levels {
		o.deliverAgain()
	}
	if err != nil {
		o.places.takeBack(out.places)
		return plan{}, err
	}
	out.change = engine.Change{DeletePolicies: out.gone, Refuse: e.answers}
	out.content = len(out.gone) > 0
	for _, p := range out.puts {
		old := o.policies.all[p.Key]
		p.Revision = o.publisher.barrier.Policy + 1
		if old != nil && old.inForce() && old.same(p) && o.policies.closed[p.Key] == nil {
			p.Revision, p.Updated = old.Revision, old.Updated // only the origin of the policy has changed
			continue
		}
		out.content = true
		out.change.UpsertPolicies = append(out.change.UpsertPolicies, *p.object)
		out.putBack(p.Key, o.policies.enforced(p.Key))
	}
	for _, k := range out.gone {
		out.putBack(k, o.policies.enforced(k))
	}
	return out, nil
}

// same reports whether two versions of a policy have the same effect and the same text.
func (p *Policy) same(q *Policy) bool {
	return p.Broken == q.Broken && p.Exceeds == q.Exceeds &&
		bytes.Equal(p.Manifest, q.Manifest) && bytes.Equal(p.sum, q.sum)
}

// putBack extends the change that undoes the plan: it restores the former version of a policy.
func (p *plan) putBack(k policy.Key, before *policy.Object) {
	if before == nil {
		p.back.DeletePolicies = append(p.back.DeletePolicies, k)
	} else {
		p.back.UpsertPolicies = append(p.back.UpsertPolicies, *before)
	}
}

// change replaces and deletes all policies of a plan, or none of them. staged contains their records.
func (o *Owner) change(p plan, staged *record.Staged) error {
	puts, gone := p.puts, p.gone
	if len(puts) == 0 && len(gone) == 0 {
		o.places.refold(&p)
		return nil
	}
	err := beforeCompile.Hit(o.ctx)
	if err == nil {
		err = o.compiler.apply(p.change)
	}
	if err != nil {
		return err
	}
	undo := o.policies.replace(puts, gone)
	if p.content {
		o.publisher.barrier.Policy++
	}
	if err = beforeJournal.Hit(o.ctx); err == nil {
		end := o.loop.Part(opCommit)
		err = o.storage.commit(o.ctx, staged)
		end()
	}
	if err != nil {
		// The steps of the change were not published yet, and the steps of undo cancel them.
		undo()
		if p.content {
			o.publisher.barrier.Policy--
		}
		if berr := o.compiler.apply(p.back); berr != nil {
			o.fatal = fmt.Errorf("undo a change that could not be stored: %w", berr)
		}
		return err
	}
	o.policies.stored(puts, gone)
	o.places.delivered(puts, gone)
	o.places.refold(&p)
	return beforeAnswer.Hit(o.ctx)
}

// hold also isolates the pods that the last enforced version of the policy selected, because the new version is
// unreadable or not enforced.
func (p *Policy) hold(old *Policy) {
	switch {
	case old == nil || !old.inForce() || old.Source != p.Source:
		return
	case old.object.Group != nil:
		p.heldLabels, p.heldText = old.object.Group.Labels, policy.Reduced(p.Key, old.Manifest, maxReduced)
	case old.Exceeds == "" && old.Broken == "":
		p.held, p.heldText = isolationOf(old.object.Specs), old.Manifest
		if p.source().Redelivers {
			p.heldText = policy.Reduced(p.Key, old.Manifest, maxReduced)
		}
	default:
		p.held, p.heldText = old.held, old.heldText
	}
	p.addHeld()
}

// is reports whether the policy has this text.
func (p *Policy) is(text []byte) bool {
	if p.sum == nil {
		return string(p.Manifest) == string(text)
	}
	sum := sha256.Sum256(text)
	return len(text) == p.size && string(p.sum) == string(sum[:])
}

// isolationOf returns rules that isolate the subjects of specs. The result never allows more than specs.
func isolationOf(specs []rule.Spec) []rule.Spec {
	out := make([]rule.Spec, 0, len(specs))
	for i := range specs {
		s := &specs[i]
		closed := rule.Spec{
			Subject: s.Subject, Namespace: s.Namespace, Host: s.Host, Selects: s.Selects, DefaultDeny: s.DefaultDeny,
		}
		for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
			var first *rule.Rule // first rule that may deny
			for _, r := range s.Rules {
				if r.Direction == d && (r.Action == policytable.Deny || r.Action == policytable.Pass) &&
					(first == nil || cmp.Or(cmp.Compare(r.Tier, first.Tier), cmp.Compare(r.Priority, first.Priority),
						cmp.Compare(r.Index, first.Index)) < 0) {
					first = r
				}
			}
			if first == nil {
				continue
			}
			r := &rule.Rule{
				Source: first.Source, Direction: d, Action: policytable.Deny,
				Tier: first.Tier, Priority: first.Priority, Index: first.Index,
				Peers: rule.Peers{Any: true, ExceptOwn: first.Tier == policytable.Isolation && first.Peers.ExceptOwn}, AllPorts: true,
			}
			r.Source.Path = "isolation"
			closed.Rules = append(closed.Rules, r.Seal())
		}
		out = append(out, closed)
	}
	return out
}

// copy returns a copy of the policy that may be modified.
func (p *Policy) copy() *Policy {
	c := *p
	return &c
}

// record returns the journal record of a policy that is in the engine.
func (p *Policy) record() record.Policy {
	r := policyRecord(p)
	r.Place = record.Place{Created: p.Created.Unix(), Known: r.Place.Known, Dropped: r.Place.Dropped}
	return r
}
