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
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/policy/internal/decode"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// Request is a change as requested by a caller.
type Request struct {
	managed.Caller
	Manifests []byte
	Namespace string // for documents without a namespace; empty: default
	// AllowUnknown drops fields that a kind does not have, instead of rejecting the request.
	AllowUnknown bool
}

// read decodes the manifests of a request, if it has any.
func (r *Request) read(rules rule.Options) ([]decode.Decoded, error) {
	if len(r.Manifests) == 0 {
		return nil, nil
	}
	return decode.Options{Rules: rules, Namespace: r.Namespace, AllowUnknown: r.AllowUnknown}.Decode(r.Manifests)
}

// Upsert adds or replaces policies without a manager.
func (o *Owner) Upsert(ctx context.Context, manifests []byte, namespace string, validateOnly bool) (Outcome, error) {
	return o.Apply(ctx, Request{
		Caller: managed.Caller{ValidateOnly: validateOnly}, Manifests: manifests, Namespace: namespace,
	})
}

// Apply adds or replaces policies of a manager.
func (o *Owner) Apply(ctx context.Context, r Request) (Outcome, error) {
	docs, err := r.read(o.config.Rules)
	if err != nil {
		return Outcome{}, err
	}
	out, err := o.changed(ctx, r.Caller, func() (edit, error) { return o.upsert(&r.Caller, docs) })
	if err != nil {
		return out, err
	}
	return out, o.addNotes(ctx, docs, out.Changes)
}

// Replace replaces all policies of a manager with the policies of the request. Afterwards the manager counts as
// complete.
func (o *Owner) Replace(ctx context.Context, r Request) (Outcome, error) {
	docs, err := r.read(o.config.Rules)
	if err != nil {
		return Outcome{}, err
	}
	out, err := o.changed(ctx, r.Caller, func() (edit, error) {
		e, err := o.upsert(&r.Caller, docs)
		if err != nil {
			return e, err
		}
		e.completes = true
		stay := make(map[policy.Key]bool, len(e.named))
		for _, k := range e.named {
			stay[k] = true
		}
		return e, o.removeOthers(&e, &r.Caller, func(k policy.Key) bool { return stay[k] })
	})
	if err != nil {
		return out, err
	}
	return out, o.addNotes(ctx, docs, out.Changes)
}

// noneSelected is the note for a policy that selects no endpoint of this node.
var noneSelected = manifest.Note{Kind: manifest.NoteSelectsNothing, Text: "selects no endpoint of this node"}

// addNotes adds two kinds of notes to the changes: a document selects no endpoint of this node; or it allows DNS
// names, and no DNS rule selects its endpoints. changes[i] must be the change of docs[i]; further elements are
// deletions. It runs in the caller's goroutine, not in the loop.
func (o *Owner) addNotes(ctx context.Context, docs []decode.Decoded, changes []Changed) error {
	changed := make(map[policy.Key]bool, len(changes))
	for _, c := range changes {
		changed[c.Key] = true
	}
	usesNames := slices.ContainsFunc(docs, func(d decode.Decoded) bool { return d.Object.UsesNames() })
	var dns policy.DNSRules
	subjects, err := loop.Ask(ctx, o.loop, opOther, func() ([]label.Set, error) {
		var out []label.Set
		for _, s := range o.interests.all {
			for x := range s.subjects {
				if id, ok := o.engine.Identity(x); ok {
					out = append(out, id.Labels)
				}
			}
		}
		if usesNames {
			dns = o.policies.dnsRules(func(k policy.Key) bool { return !changed[k] })
		}
		return out, nil
	})
	if err != nil {
		return err
	}
	for _, d := range docs {
		dns.Add(d.Object)
	}
	for i, d := range docs {
		changes[i].Notes = dns.WithNotes(d.Object, changes[i].Notes)
		if d.Object.Group == nil && !slices.ContainsFunc(d.Object.Specs, func(spec rule.Spec) bool {
			return slices.ContainsFunc(subjects, spec.Subject.Matches)
		}) {
			changes[i].Notes = append(slices.Clone(changes[i].Notes), noneSelected)
		}
	}
	return nil
}

// Complete deletes the policies that a manager sent in earlier runs of the service and has not sent again in this
// run. run is the run in which the manager has sent its policies; if the service was restarted since, Complete fails.
func (o *Owner) Complete(ctx context.Context, c managed.Caller, run [16]byte) (Outcome, error) {
	return o.changed(ctx, c, func() (edit, error) {
		e := edit{completes: true}
		if err := c.CheckRun(run, o.Incarnation()); err != nil {
			return e, err
		}
		return e, o.removeOthers(&e, &c, func(k policy.Key) bool { return o.policies.all[k].named })
	})
}

// removeOthers removes the policies of a manager for which stays returns false.
func (o *Owner) removeOthers(e *edit, c *managed.Caller, stays func(policy.Key) bool) error {
	gone, err := o.policies.managed(o.sources.configured).Prune(c, len(e.named), stays)
	if err != nil {
		return err
	}
	e.gone = append(e.gone, gone...)
	e.Changes = append(e.Changes, managed.Deletions[policy.Key, manifest.Notes](gone, gone)...)
	return nil
}

// Delete deletes policies without a manager.
func (o *Owner) Delete(ctx context.Context, keys []policy.Key, validateOnly bool) (Outcome, error) {
	return o.Remove(ctx, managed.Caller{ValidateOnly: validateOnly}, keys)
}

// Remove deletes policies of a manager.
func (o *Owner) Remove(ctx context.Context, c managed.Caller, keys []policy.Key) (Outcome, error) {
	return o.changed(ctx, c, func() (edit, error) {
		gone, err := o.policies.managed(o.sources.configured).Delete(&c, keys)
		if err != nil {
			return edit{}, err
		}
		e := edit{gone: gone}
		e.Changes = managed.Deletions[policy.Key, manifest.Notes](keys, gone)
		return e, nil
	})
}

// upsert returns the change that applies a manager's documents.
func (o *Owner) upsert(caller *managed.Caller, docs []decode.Decoded) (edit, error) {
	var e edit
	for _, d := range docs {
		c := Changed{
			Key: d.Object.Key, Type: managed.Created, Dropped: d.Object.Unknown, Notes: o.forms.filtered(*d.Object).Notes,
		}
		exists, err := o.policies.managed(o.sources.configured).Put(caller, c.Key)
		if err != nil {
			return e, err
		}
		if exists {
			old := o.policies.all[c.Key]
			c.Type = managed.Replaced
			if old.Broken == "" && old.Exceeds == "" && bytes.Equal(old.Manifest, d.Text) {
				c.Type = managed.Unchanged
			}
		}
		if c.Type != managed.Unchanged {
			p := o.forms.policy(d, managed.SourceGRPC, "")
			p.Manager = caller.Manager
			e.puts = append(e.puts, p)
		}
		e.named = append(e.named, c.Key)
		e.Changes = append(e.Changes, c)
	}
	return e, nil
}

// changed makes a change of policies that a call requested (source "grpc"), or only returns the effect if the caller
// asked only to validate it. find determines the change in a turn of the owner.
func (o *Owner) changed(ctx context.Context, c managed.Caller, find func() (edit, error)) (Outcome, error) {
	look := func() (edit, error) {
		if err := c.Check(o.publisher.barrier.Policy); err != nil {
			return edit{}, err
		}
		e, err := find()
		e.answers = true
		return e, err
	}
	if !c.ValidateOnly {
		return o.revise(ctx, opChange, look, func(e *edit) {
			for _, k := range e.named {
				o.policies.all[k].named = true
			}
			if e.completes {
				o.sources.managerCompleted(c.Manager)
			}
		})
	}
	type trial struct {
		Outcome
		change engine.Change
		draft  engine.Draft
	}
	var out Outcome
	err := o.reader.aside(ctx, func() error {
		t, err := loop.Ask(ctx, o.loop, opDraft, func() (trial, error) {
			e, err := look()
			if err != nil {
				return trial{}, err
			}
			p, err := o.plan(&e)
			if err == nil {
				o.places.takeBack(p.places)
			}
			e.Revision = o.publisher.barrier.Policy
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
