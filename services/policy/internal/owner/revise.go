// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"errors"
	"fmt"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/journal"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/record"
)

// Units of work that a long operation does in one turn of the owner.
const (
	subjectsAtOnce   = 16
	identitiesAtOnce = 512
	policiesAtOnce   = 1024
)

// edit is a change of policies.
type edit struct {
	Outcome
	puts  []*Policy
	gone  []policy.Key
	named []policy.Key // policies that the caller named, even if they do not change
	// unfolded contains folded policies whose objects were removed.
	unfolded []policy.Key
	// spaces contains the isolations of namespaces that the change removes if no policy is folded into them any
	// more.
	spaces []policy.Key
	// completes is set if the manager has now sent all its policies.
	completes bool
	// answers is set if a caller waits for the result: the whole change fails if a policy exceeds a limit or does not
	// fit into a table. Otherwise, such a policy isolates.
	answers bool
	// levels makes the change compute the levels of the limits again if they are due, and include the effects.
	levels bool
}

// revision is a change of policies in progress. While it exists, Owner.revising is locked, and policies change only
// through a revision. Therefore a decision made in one turn is still valid in a later turn.
type revision struct {
	owner     *Owner
	operation string
	decide    func() (edit, error)
	done      func(*edit) // called when the change is made

	edit     edit
	plan     plan
	record   record.Change
	prepared *engine.Preparation
	staged   *record.Staged
	ended    bool
}

// revise makes a change of policies, atomically. A small change takes one turn of the owner. For a large change, the
// caller's goroutine writes the records, and the tables are compiled in many short turns. The whole change takes
// effect in the last turn. decide and done are called in turns of the owner.
func (o *Owner) revise(ctx context.Context, operation string, decide func() (edit, error), done func(*edit)) (Outcome, error) {
	release, err := o.revising.Hold(ctx)
	if err != nil {
		return Outcome{}, err
	}
	defer release()
	return o.reviseHeld(ctx, operation, decide, done)
}

// reviseHeld is revise for a caller that holds Owner.revising.
func (o *Owner) reviseHeld(ctx context.Context, operation string, decide func() (edit, error), done func(*edit)) (Outcome, error) {
	r := &revision{owner: o, operation: operation, decide: decide, done: done}
	out, err := loop.Ask(ctx, o.loop, opPrepare, r.begin)
	if err != nil || r.ended {
		return out, err // begin has undone the change
	}
	// Remove staged and prepared data even if the caller no longer waits.
	last := context.WithoutCancel(ctx)
	if err = r.stage(ctx); err == nil {
		if err = r.prepare(ctx); err == nil {
			out, err = loop.Ask(last, o.loop, operation, r.finish)
		}
	}
	if err != nil {
		// This fails only if the owner has ended; its ledger then no longer matters.
		o.loop.Do(last, opOther, func() { //nolint:errcheck // above
			o.places.takeBack(r.plan.places)
		})
	}
	if serr := r.clear(last, err != nil); serr != nil {
		terr := o.loop.Do(last, opOther, func() { o.storage.stored(serr) })
		if err == nil && terr == nil && errors.Is(serr, journal.ErrLost) {
			err = fmt.Errorf("%w: %w", failure.ErrStorage, serr)
		}
	}
	return out, err
}

// begin determines the change, and makes it immediately if it is small.
func (r *revision) begin() (out Outcome, err error) {
	o := r.owner
	if r.edit, err = r.decide(); err != nil {
		return r.edit.Outcome, err
	}
	if r.plan, err = o.plan(&r.edit); err != nil {
		return r.edit.Outcome, err
	}
	defer func() {
		if err != nil {
			o.places.takeBack(r.plan.places)
		}
	}()
	r.record = r.plan.record(o.publisher.barrier.Policy)
	r.prepared = o.engine.Prepare(r.plan.change)
	if r.prepared.Mark(policiesAtOnce) || r.prepared.Subjects() > subjectsAtOnce || !o.storage.journal.Fits(r.record) {
		return r.edit.Outcome, nil
	}
	r.ended = true
	if r.staged, err = o.storage.journal.Stage(o.ctx, r.record); err != nil {
		o.storage.stored(err)
		return r.edit.Outcome, fmt.Errorf("%w: %w", failure.ErrStorage, err)
	}
	return r.finish()
}

// stage writes the records in the caller's goroutine.
func (r *revision) stage(ctx context.Context) (err error) {
	if r.staged, err = r.owner.storage.journal.Stage(ctx, r.record); err == nil || ctx.Err() != nil {
		return err
	}
	why := err
	if err := r.owner.loop.Do(ctx, opOther, func() { r.owner.storage.stored(why) }); err != nil {
		return err
	}
	return fmt.Errorf("%w: %w", failure.ErrStorage, why)
}

// prepare compiles the tables of a few subjects in each turn.
func (r *revision) prepare(ctx context.Context) (err error) {
	steps := []func() bool{
		func() bool { return r.prepared.Mark(policiesAtOnce) },
		func() bool { return r.prepared.Step(subjectsAtOnce) },
	}
	for _, step := range steps {
		if err = r.repeat(ctx, step); err != nil {
			return err
		}
	}
	return nil
}

// repeat runs step in one turn of the owner after the other until it returns false.
func (r *revision) repeat(ctx context.Context, step func() (more bool)) error {
	for more := true; more; {
		var err error
		if more, err = loop.Ask(ctx, r.owner.loop, opPrepare, func() (bool, error) {
			return step(), nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// finish makes the change take effect.
func (r *revision) finish() (Outcome, error) {
	o := r.owner
	o.loop.Rename(r.operation)
	err := o.change(r.plan, r.staged)
	if err == nil {
		r.done(&r.edit)
	}
	r.edit.Revision = o.publisher.barrier.Policy
	return r.edit.Outcome, err
}

// clear removes data that the change no longer needs. It returns only storage errors. If the owner has ended, there
// are no tables to remove, so clear returns nil.
func (r *revision) clear(ctx context.Context, failed bool) (err error) {
	if r.staged != nil {
		if failed {
			err = r.staged.Discard()
		} else {
			err = r.owner.storage.journal.Tidy(ctx)
		}
	}
	_ = r.repeat(ctx, func() bool { return r.prepared.Release(2 * subjectsAtOnce) })
	return err
}

// plan is a change of policies and the change that undoes it.
type plan struct {
	puts         []*Policy
	gone         []policy.Key
	change, back engine.Change
	content      bool    // the content of policies changes, and not only their origin
	places       []place // ledger state of all policies before the change
	levels       bool    // the limits were divided again
	// fold contains the policies that are folded after the change, and unfold the policies that no longer are.
	fold, unfold map[policy.Key]struct{}
}

// record returns the journal record of the change.
func (p *plan) record(revision uint64) record.Change {
	if len(p.puts)+len(p.gone) == 0 {
		return record.Change{}
	}
	if p.content {
		revision++
	}
	rec := record.Change{Revision: revision}
	for _, x := range p.puts {
		rec.Puts = append(rec.Puts, policyRecord(x))
	}
	for _, k := range p.gone {
		rec.Deletes = append(rec.Deletes, record.Key(k).Encode())
	}
	return rec
}
