// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"bytes"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/policy/internal/decode"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/excludedlabels"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/record"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/source"
)

// Policy is a policy in force, or one of an earlier run that is not understood
// any more.
type Policy struct {
	Key      policy.Key
	Source   string
	Origin   string
	Manager  string // that brought it by a call
	Manifest []byte
	Revision uint64
	Updated  time.Time
	Rules    int
	Dropped  []string
	Notes    manifest.Notes
	// Broken is why the policy is not in force as it was written. What it selects
	// is isolated, unless that is not known.
	Broken string
	// Exceeds is why the policy has no place in the limits. What it selects is isolated.
	Exceeds string
	// Created and UID order the policies of a tenant. UID is empty for a policy of a
	// file or a call.
	Created time.Time
	UID     string

	read   policy.Object // as it was read, or its isolation
	object policy.Object // as the engine has it: closed where identities lack labels, and with held
	closed bool          // labels that identities lack close it
	named  bool          // by its manager in this run
	// size and sum are those of the whole manifest if Manifest is reduced.
	size int
	sum  []byte
	// held are the rules that isolate what the last form selects that was in force as
	// written, if this one is not. They are made of heldText after a start.
	held     []rule.Spec
	heldText []byte
	// heldLabels are those of that form if the policy is a group.
	heldLabels label.Set
}

// source is where the policy comes from.
func (p *Policy) source() source.Source { return source.Of(p.Source) }

// inForce reports whether the engine has the policy, as written or isolating.
func (p *Policy) inForce() bool { return p.object.Key.Kind != "" }

// Changed is what became of one policy.
type Changed = managed.Changed[policy.Key, manifest.Notes]

// Outcome is the answer of a change.
type Outcome = managed.Outcome[policy.Key, manifest.Notes]

func (o *Owner) policy(d decode.Decoded, source, origin string) *Policy {
	p := &Policy{
		Key: d.Object.Key, Source: source, Origin: origin, Manifest: d.Text, Updated: o.config.Now(),
		Dropped: d.Object.Unknown, Broken: d.Object.Isolates, read: d.Object, Created: d.Created, UID: d.UID,
	}
	p.filter(o.filter.Load())
	return p
}

// filter makes what the engine has of what was read.
func (p *Policy) filter(f *excludedlabels.Filter) {
	p.object, p.closed = f.Apply(p.read)
	p.addHeld()
	p.Notes, p.Rules = p.object.Notes, 0
	for i := range p.object.Specs {
		p.Rules += len(p.object.Specs[i].Rules)
	}
}

// addHeld adds the rules that isolate an earlier form to what the engine has.
func (p *Policy) addHeld() {
	if len(p.held) > 0 {
		p.object.Specs = slices.Concat(p.object.Specs, p.held)
	}
	if g := p.object.Group; g != nil && p.heldLabels.Len() > 0 {
		both := *g
		both.Labels = label.NewSet(append(g.Labels.All(), p.heldLabels.All()...)...)
		p.object.Group = &both
	}
}

// plan decides which policies of a change have a place in the limits. The ledger has the
// change when plan returns without an error; takeBack undoes that.
func (o *Owner) plan(e *edit) (plan, error) {
	out := plan{
		puts: slices.Clone(e.puts), gone: slices.Clone(e.gone),
		fold: make(map[policy.Key]struct{}), unfold: make(map[policy.Key]struct{}),
	}
	if err := o.divide(e, &out); err != nil {
		o.takeBack(out.places)
		return plan{}, err
	}
	out.change = engine.Change{DeletePolicies: out.gone, Refuse: e.answers}
	out.content = len(out.gone) > 0
	for _, p := range out.puts {
		old := o.policies[p.Key]
		p.Revision = o.barrier.Policy + 1
		if old != nil && old.inForce() && old.same(p) && o.closed[p.Key] == nil {
			p.Revision, p.Updated = old.Revision, old.Updated // only its origin is another
			continue
		}
		out.content = true
		out.change.UpsertPolicies = append(out.change.UpsertPolicies, p.object)
		out.putBack(p.Key, o.enforced(p.Key))
	}
	for _, k := range out.gone {
		out.putBack(k, o.enforced(k))
	}
	return out, nil
}

// same reports whether two forms of a policy do the same and say the same.
func (p *Policy) same(q *Policy) bool {
	return p.Broken == q.Broken && p.Exceeds == q.Exceeds &&
		bytes.Equal(p.Manifest, q.Manifest) && bytes.Equal(p.sum, q.sum)
}

// enforced is what the engine has of a policy; nil: nothing.
func (o *Owner) enforced(k policy.Key) *policy.Object {
	if closed := o.closed[k]; closed != nil {
		return &closed.Object
	}
	if p := o.policies[k]; p != nil && p.inForce() {
		return &p.object
	}
	return nil
}

// putBack adds a policy to the change that takes the plan back.
func (p *plan) putBack(k policy.Key, before *policy.Object) {
	if before == nil {
		p.back.DeletePolicies = append(p.back.DeletePolicies, k)
	} else {
		p.back.UpsertPolicies = append(p.back.UpsertPolicies, *before)
	}
}

// change replaces and deletes policies, all of it or nothing. The records are
// staged.
func (o *Owner) change(p plan, staged *record.Staged) error {
	puts, gone := p.puts, p.gone
	if len(puts) == 0 && len(gone) == 0 {
		o.refold(&p)
		return nil
	}
	err := beforeCompile.Hit(o.ctx)
	if err == nil {
		err = o.apply(p.change)
	}
	if err != nil {
		return err
	}
	replaced := make([]*Policy, len(puts))
	for i, p := range puts {
		replaced[i] = o.policies[p.Key]
		o.policies[p.Key] = p
	}
	removed := make([]*Policy, len(gone))
	for i, k := range gone {
		removed[i] = o.policies[k]
		delete(o.policies, k)
	}
	if p.content {
		o.barrier.Policy++
	}
	if err = beforeJournal.Hit(o.ctx); err == nil {
		end := o.loop.Part(opCommit)
		err = o.storage.commit(o.ctx, staged)
		end()
	}
	if err != nil {
		// Nobody has seen the steps yet, and both ways together change nothing.
		for i, p := range puts {
			if replaced[i] == nil {
				delete(o.policies, p.Key)
			} else {
				o.policies[p.Key] = replaced[i]
			}
		}
		for i, k := range gone {
			o.policies[k] = removed[i]
		}
		if p.content {
			o.barrier.Policy--
		}
		if berr := o.apply(p.back); berr != nil {
			o.fatal = fmt.Errorf("put back what storage did not take: %w", berr)
		}
		return err
	}
	for _, x := range puts {
		delete(o.closed, x.Key)
		delete(o.again, x.Key)
	}
	for _, k := range gone {
		delete(o.closed, k)
		delete(o.again, k)
	}
	o.refold(&p)
	return beforeAnswer.Hit(o.ctx)
}
