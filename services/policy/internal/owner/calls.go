// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"bytes"
	"context"
	"fmt"
	"slices"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/reading"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// Caller is who asks for a change of the source "grpc", and on what condition.
type Caller struct {
	Manager      string  // empty: that of calls without one
	IfRevision   *uint64 // nil: whatever the revision is
	ValidateOnly bool    // check and compile, but change nothing
	AllowEmpty   bool    // the manager may lose every policy that it has
}

// Request is a change as a caller asks for it.
type Request struct {
	Caller
	Manifests []byte
	Namespace string // of documents that name none; empty: default
	// AllowUnknown drops fields that a kind does not have, instead of refusing them.
	AllowUnknown bool
}

// read understands the manifests of a request; there may be none.
func (o *Owner) read(r Request) ([]reading.Decoded, error) {
	if len(r.Manifests) == 0 {
		return nil, nil
	}
	return reading.Options{Rules: o.config.Rules, Namespace: r.Namespace, AllowUnknown: r.AllowUnknown}.Decode(r.Manifests)
}

// Upsert adds or replaces policies of calls without a manager.
func (o *Owner) Upsert(ctx context.Context, manifests []byte, namespace string, validateOnly bool) (Outcome, error) {
	return o.Apply(ctx, Request{Caller: Caller{ValidateOnly: validateOnly}, Manifests: manifests, Namespace: namespace})
}

// Apply adds or replaces policies of a manager.
func (o *Owner) Apply(ctx context.Context, r Request) (Outcome, error) {
	docs, err := o.read(r)
	if err != nil {
		return Outcome{}, err
	}
	out, err := o.changed(ctx, r.Caller, func() (edit, error) { return o.upsert(r.Manager, docs) })
	if err != nil {
		return out, err
	}
	return out, o.noteSelection(ctx, docs, out.Changes)
}

// Replace makes the policies of a manager those of the request, which completes
// the manager.
func (o *Owner) Replace(ctx context.Context, r Request) (Outcome, error) {
	docs, err := o.read(r)
	if err != nil {
		return Outcome{}, err
	}
	out, err := o.changed(ctx, r.Caller, func() (edit, error) {
		e, err := o.upsert(r.Manager, docs)
		if err != nil {
			return e, err
		}
		e.completes = true
		stay := make(map[policy.Key]bool, len(e.named))
		for _, k := range e.named {
			stay[k] = true
		}
		return e, o.removeOthers(&e, r.Caller, func(p *Policy) bool { return stay[p.Key] })
	})
	if err != nil {
		return out, err
	}
	return out, o.noteSelection(ctx, docs, out.Changes)
}

// noneSelected is the note on a policy without an endpoint here.
var noneSelected = manifest.Note{Kind: manifest.NoteSelectsNothing, Text: "selects no endpoint of this node"}

// noteSelection notes which of the documents select no endpoint of this node.
// The changes of the documents come first. It looks in the caller's goroutine.
func (o *Owner) noteSelection(ctx context.Context, docs []reading.Decoded, changes []Changed) error {
	subjects, err := loop.Ask(ctx, o.loop, opOther, func() ([]label.Set, error) {
		var out []label.Set
		for _, s := range o.subscribers {
			for x := range s.subjects {
				if id, ok := o.engine.Identity(x); ok {
					out = append(out, id.Labels)
				}
			}
		}
		return out, nil
	})
	if err != nil {
		return err
	}
	for i, d := range docs {
		if d.Object.Group == nil && !slices.ContainsFunc(d.Object.Specs, func(spec rule.Spec) bool {
			return slices.ContainsFunc(subjects, spec.Subject.Matches)
		}) {
			changes[i].Notes = append(slices.Clone(changes[i].Notes), noneSelected)
		}
	}
	return nil
}

// Complete deletes what a manager brought in earlier runs and has not named in
// this one. The run is the one that took the manager's listing.
func (o *Owner) Complete(ctx context.Context, c Caller, run [16]byte) (Outcome, error) {
	return o.changed(ctx, c, func() (edit, error) {
		e := edit{completes: true}
		if run != o.Incarnation() {
			return e, fmt.Errorf("%w: this is another run of the service than the one that took the listing of %q", failure.ErrChanged, c.Manager)
		}
		return e, o.removeOthers(&e, c, func(p *Policy) bool { return p.named })
	})
}

// removeOthers removes the policies of a manager that do not stay. A change that
// has none at all for it has to be meant.
func (o *Owner) removeOthers(e *edit, c Caller, stays func(*Policy) bool) error {
	gone := o.of(c.Manager, func(p *Policy) bool { return !stays(p) })
	kept := len(e.named) + len(o.of(c.Manager, stays))
	if len(gone) > 0 && kept == 0 && !c.AllowEmpty {
		return fmt.Errorf("%w: %d of the manager %q would be deleted", failure.ErrEmpty, len(gone), c.Manager)
	}
	e.remove(gone)
	return nil
}

// Delete deletes policies of calls without a manager.
func (o *Owner) Delete(ctx context.Context, keys []policy.Key, validateOnly bool) (Outcome, error) {
	return o.Remove(ctx, Caller{ValidateOnly: validateOnly}, keys)
}

// Remove deletes policies of a manager.
func (o *Owner) Remove(ctx context.Context, c Caller, keys []policy.Key) (Outcome, error) {
	return o.changed(ctx, c, func() (edit, error) {
		var e edit
		seen := make(map[policy.Key]struct{}, len(keys))
		for _, k := range keys {
			change := Changed{Key: k, Type: Absent}
			_, again := seen[k]
			seen[k] = struct{}{}
			if p := o.policies[k]; p != nil && !again {
				if owner := o.owner(p, c.Manager); owner != "" {
					return e, fmt.Errorf("%w: %s is of %s", failure.ErrForeign, k, owner)
				}
				change.Type = Deleted
				e.gone = append(e.gone, k)
			}
			e.Changes = append(e.Changes, change)
		}
		return e, nil
	})
}

// upsert is the change that documents of a manager are.
func (o *Owner) upsert(manager string, docs []reading.Decoded) (edit, error) {
	var e edit
	for _, d := range docs {
		c := Changed{Key: d.Object.Key, Type: Created, Dropped: d.Object.Unknown, Notes: o.filtered(d.Object).Notes}
		if old := o.policies[c.Key]; old != nil {
			if owner := o.owner(old, manager); owner != "" {
				return e, fmt.Errorf("%w: %s is of %s", failure.ErrOwned, old.Key, owner)
			}
			c.Type = Replaced
			if old.Broken == "" && old.Exceeds == "" && bytes.Equal(old.Manifest, d.Text) {
				c.Type = Unchanged
			}
		}
		if c.Type != Unchanged {
			p := o.policy(d, SourceGRPC, "")
			p.Manager = manager
			e.puts = append(e.puts, p)
		}
		e.named = append(e.named, c.Key)
		e.Changes = append(e.Changes, c)
	}
	return e, nil
}

// remove adds deletions to the change.
func (e *edit) remove(keys []policy.Key) {
	for _, k := range keys {
		e.gone = append(e.gone, k)
		e.Changes = append(e.Changes, Changed{Key: k, Type: Deleted})
	}
}

// of are the policies of a manager that match, sorted.
func (o *Owner) of(manager string, match func(*Policy) bool) []policy.Key {
	var out []policy.Key
	for k, p := range o.policies {
		if p.Source == SourceGRPC && p.Manager == manager && match(p) {
			out = append(out, k)
		}
	}
	slices.SortFunc(out, policy.Key.Compare)
	return out
}

// owner names who has a policy that a manager may not touch; empty if it may.
func (o *Owner) owner(p *Policy, manager string) string {
	switch {
	case o.foreign(p):
		return p.Source + " " + p.Origin
	case p.Source != SourceGRPC || p.Manager == manager:
		return ""
	case p.Manager == "":
		return "calls without a manager"
	}
	return fmt.Sprintf("the manager %q", p.Manager)
}

// foreign reports whether a policy belongs to a source other than "grpc". One of
// a source that is not configured any more belongs to every caller: its own source will not come.
func (o *Owner) foreign(p *Policy) bool {
	return p.Source != SourceGRPC && o.sources[p.Source] != nil
}

// changed makes a change of the source "grpc", which the owner finds with
// find, or says what would become of it.
func (o *Owner) changed(ctx context.Context, c Caller, find func() (edit, error)) (Outcome, error) {
	look := func() (edit, error) {
		if c.IfRevision != nil && *c.IfRevision != o.barrier.Policy {
			return edit{}, fmt.Errorf("%w: the policy revision is %d, not %d",
				failure.ErrChanged, o.barrier.Policy, *c.IfRevision)
		}
		e, err := find()
		e.answers = true
		return e, err
	}
	if !c.ValidateOnly {
		return o.revise(ctx, opChange, look, func(e *edit) {
			for _, k := range e.named {
				o.policies[k].named = true
			}
			if e.completes {
				o.managers[c.Manager], o.stateChanged = true, true
				o.noteListed(managerSource(c.Manager))
			}
		})
	}
	type trial struct {
		Outcome
		change engine.Change
		draft  engine.Draft
	}
	var out Outcome
	err := o.aside(ctx, func() error {
		t, err := loop.Ask(ctx, o.loop, opDraft, func() (trial, error) {
			e, err := look()
			if err != nil {
				return trial{}, err
			}
			p, err := o.plan(&e)
			if err == nil {
				o.takeBack(p.places)
			}
			e.Revision = o.barrier.Policy
			return trial{e.Outcome, p.change, o.engine.Draft()}, err
		})
		if err != nil {
			return err
		}
		out = t.Outcome
		if len(t.change.UpsertPolicies)+len(t.change.DeletePolicies) == 0 {
			return nil
		}
		if err := t.draft.Try(t.change); err != nil {
			return fmt.Errorf("%w: %w", failure.ErrLimit, err)
		}
		return nil
	})
	return out, err
}
