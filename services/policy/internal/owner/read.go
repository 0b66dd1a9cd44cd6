// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/desired/problem"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/policy/internal/decode"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/query"
	"github.com/sluice-net/sluice/services/policy/internal/summary"
)

// Filter selects policies; its zero value selects all.
type Filter struct {
	Kind, Namespace, Name string
	Subject               identity.Numeric
	Manager               *string // a manager of managed.SourceGRPC
}

// Listed is a policy and its state, or a file that was refused.
type Listed struct {
	Policy
	Error    string // error of a newer version, or of a file without an enforced policy
	Accepted bool
	Subjects []identity.Numeric
}

// List returns policies sorted by key, and their revision. The owner copies the policies; the caller's goroutine
// finds the endpoints that each selects.
func (o *Owner) List(ctx context.Context, f Filter) ([]Listed, uint64, error) {
	type copied struct {
		list     []Listed
		revision uint64
		subjects *engine.Subjects
		subject  *peer.Identity // subject of the filter; nil: unknown
	}
	takes := func(k policy.Key) bool {
		return (f.Kind == "" || k.Kind == f.Kind) && (f.Namespace == "" || k.Namespace == f.Namespace) && (f.Name == "" || k.Name == f.Name)
	}
	c, err := loop.Ask(ctx, o.loop, opRead, func() (copied, error) {
		c := copied{revision: o.publisher.barrier.Policy, subjects: o.engine.Subjects()}
		if id, ok := o.engine.Identity(f.Subject); ok {
			c.subject = &id
		}
		for k, p := range o.policies.all {
			if k.Kind == policy.KindDocument {
				if key, ok := decode.KeyOf(p.Manifest); ok {
					k = key // more precise than the origin
				}
			}
			if !takes(k) || f.Manager != nil && (!p.source().Calls || p.Manager != *f.Manager) {
				continue
			}
			l := Listed{Policy: *p, Accepted: p.Broken == "" && p.Exceeds == "", Error: cmp.Or(p.Broken, p.Exceeds)}
			l.Key = k
			if n := o.places.foldedIn[k.Namespace]; n > 0 && k.Kind == policy.KindNamespaceIsolation {
				l.Error = fmt.Sprintf("%d %s", n, p.Exceeds)
			}
			if r, ok := o.sources.refusal(p.Source, p.Origin); ok {
				l.Error = r.err
			}
			c.list = append(c.list, l)
		}
		if f.Subject == 0 && f.Manager == nil {
			c.list = append(c.list, o.withoutPolicy(c.list, takes)...)
		}
		return c, nil
	})
	out := c.list[:0]
	for _, l := range c.list {
		if f.Subject != 0 && (c.subject == nil || !engine.Selects(&l.object, *c.subject)) {
			continue
		}
		if l.inForce() {
			l.Subjects = c.subjects.Selected(&l.object)
			if len(l.Subjects) == 0 && l.object.Group == nil {
				l.Notes = append(slices.Clone(l.Notes), noneSelected)
			}
		}
		out = append(out, l)
	}
	slices.SortFunc(out, func(a, b Listed) int { return cmp.Or(a.Key.Compare(b.Key), cmp.Compare(a.Origin, b.Origin)) })
	return out, c.revision, err
}

// withoutPolicy returns the refused files for which no policy is listed.
func (o *Owner) withoutPolicy(listed []Listed, takes func(policy.Key) bool) (out []Listed) {
	type place struct{ source, origin string }
	has := make(map[place]bool)
	for i := range listed {
		if l := &listed[i]; l.Error != "" {
			has[place{l.Source, l.Origin}] = true
		}
	}
	for by, r := range o.sources.refusals() {
		if !has[place{by.Source, by.Origin}] && takes(r.key) {
			out = append(out, Listed{Policy: Policy{Key: r.key, Source: by.Source, Origin: by.Origin}, Error: r.err})
		}
	}
	return out
}

// aside runs work, which compiles tables for a query, in the caller's goroutine, while the owner continues. It runs
// one query at a time, to bound the memory.
func (o *Owner) aside(ctx context.Context, work func() error) error {
	release, err := o.questions.Hold(ctx)
	if err != nil {
		return err
	}
	defer release()
	return work()
}

// answer answers a query from the engine, or from a copy of the engine if that does not have all tables.
func (o *Owner) answer(ctx context.Context, q query.Query) error {
	type looked struct {
		complete bool
		draft    engine.Draft
	}
	look := func(draft bool) (looked, error) {
		return loop.Ask(ctx, o.loop, opRead, func() (l looked, err error) {
			l.complete, err = q.Begin(query.View{
				Engine: o.engine, Identities: o.identities.all, Cluster: o.config.Engine.Cluster, NodeLabels: o.config.Rules.NodeLabels,
				Revision: o.publisher.barrier.Policy, Store: o.publisher.barrier.IdentityService.Store,
			})
			switch {
			case err != nil:
			case l.complete:
				err = q.Evaluate(o.engine)
			case draft:
				o.loop.Rename(opDraft)
				l.draft = o.engine.Draft()
			}
			return l, err
		})
	}
	if l, err := look(false); err != nil || l.complete {
		return err
	}
	return o.aside(ctx, func() error {
		l, err := look(true)
		if err != nil || l.complete {
			return err
		}
		e, err := q.Fork(l.draft)
		if err != nil {
			return fmt.Errorf("%w: %w", failure.ErrLimit, err)
		}
		return q.Evaluate(e)
	})
}

// Table returns the tables that evaluate an identity.
func (o *Owner) Table(ctx context.Context, x identity.Numeric) (query.Evaluated, error) {
	q := &query.Table{Identity: x}
	if err := o.answer(ctx, q); err != nil {
		return query.Evaluated{}, err
	}
	return q.Answer, nil
}

// Explain evaluates a connection on both sides.
func (o *Owner) Explain(ctx context.Context, from, to query.Peer, at port.Point) (query.Explained, error) {
	q := &query.Explain{From: from, To: to, At: at}
	if err := o.answer(ctx, q); err != nil {
		return query.Explained{}, err
	}
	return q.Answer, nil
}

// Diff reports which verdicts a change would change, one difference at a time, whatever the source of the policies.
func (o *Owner) Diff(ctx context.Context, r Request, remove []policy.Key, take func(query.Difference) error) error {
	docs, err := o.read(r)
	if err != nil {
		return err
	}
	objects := make([]policy.Object, 0, len(docs))
	for _, d := range docs {
		objects = append(objects, o.forms.filtered(d.Object))
	}
	var compared *query.Comparison
	if err := o.aside(ctx, func() error {
		draft, err := loop.Ask(ctx, o.loop, opDraft, func() (engine.Draft, error) {
			for _, d := range docs {
				if old := o.policies.all[d.Object.Key]; old != nil && o.foreign(old) {
					return engine.Draft{}, fmt.Errorf("%w: %s is of %s %s",
						failure.ErrOwned, old.Key, old.Source, old.Origin)
				}
			}
			for _, k := range remove {
				if old := o.policies.all[k]; old != nil && o.foreign(old) {
					return engine.Draft{}, fmt.Errorf("%w: %s is of %s %s",
						failure.ErrForeign, old.Key, old.Source, old.Origin)
				}
			}
			return o.engine.Draft(), nil
		})
		if err != nil {
			return err
		}
		if compared, err = query.Compare(draft, objects, remove); err != nil {
			return fmt.Errorf("%w: %w", failure.ErrLimit, err)
		}
		return nil
	}); err != nil {
		return err
	}
	// A slow reader does not delay other queries.
	return compared.Each(ctx, take)
}

// Status returns the state of all parts.
func (o *Owner) Status(ctx context.Context) (summary.Status, error) {
	return loop.Ask(ctx, o.loop, opRead, func() (summary.Status, error) {
		s := summary.Status{
			Busy:     o.loop.Figures(),
			Revision: o.publisher.barrier.Policy, Store: o.publisher.barrier.IdentityService.Store,
			Policies: len(o.policies.all), Identities: len(o.identities.all), Waiting: o.engine.Waiting(),
			Size: o.engine.Size(), Counters: o.engine.Counters(), Names: o.names.Len(), Addresses: o.names.Addresses(), Journal: o.storage.journal.Size(),
		}
		for _, p := range o.policies.all {
			if slices.ContainsFunc(p.Notes, func(note manifest.Note) bool { return note.Kind == manifest.NoteUnsupported }) {
				s.Unsupported++
			}
			if p.Exceeds != "" {
				s.Policies--
				if k := p.Key; k.Kind == policy.KindNamespaceIsolation {
					s.Exceeding += o.places.foldedIn[k.Namespace]
				} else {
					s.Exceeding++
				}
				s.Note(summary.ProblemPolicy, "%s %s, and what it selects is isolated", p.Key, p.Exceeds)
			}
			if p.Broken != "" {
				s.Policies--
				s.Refused++
				what := "is stored, but not accepted"
				if p.inForce() {
					what = "cannot be converted, and what it selects is isolated"
				}
				s.Note(summary.ProblemPolicy, "%s %s: %s", p.Key, what, p.Broken)
			}
		}
		s.Limits, s.Reduced = append(o.places.ledger.Usage(), o.splits()...), len(o.engine.Reduced())
		s.Sources = o.sources.states(o.policies)
		for by, r := range o.sources.refusals() {
			s.Refused++
			s.Note(summary.ProblemPolicy, "%s %s is refused: %s", by.Source, by.Origin, r.err)
		}
		s.WaitsFor, s.Skipped = o.sources.waitsFor(), o.sources.skipped()
		for _, text := range s.WaitsFor {
			s.Note(summary.ProblemPolicy, "new endpoints are not connected: %s", text)
		}
		for _, text := range o.sources.acceptedWithout() {
			s.Note(summary.ProblemSettings, "%s", text)
		}
		states, _ := o.publisher.stream.States()
		for name, sub := range o.subscribers.all {
			st := summary.SubscriberStatus{Name: name, Enforces: sub.enforces, Forgotten: sub.until}
			for _, state := range states {
				if state.Name != name {
					continue
				}
				st.Connected, st.Revision, st.Behind = state.Connected, state.Enforced.Policy, state.Behind
				st.Store = state.Enforced.IdentityService.Store
				if state.Hold != nil {
					st.Revision, st.Held = state.Hold.Revision, state.Hold.Reason
				}
				for at, r := range state.Refusals {
					st.Refusals = append(st.Refusals, fmt.Sprintf("%s, table %d: %s; the largest share is from %s", at, r.Table, r.Reason, r.Policy))
				}
				slices.Sort(st.Refusals)
			}
			s.Subscribers = append(s.Subscribers, st)
		}
		slices.SortFunc(s.Subscribers, func(a, b summary.SubscriberStatus) int { return strings.Compare(a.Name, b.Name) })
		for what, err := range o.problems.All() {
			kind := summary.ProblemPolicy
			if what == problem.Storage {
				kind = summary.ProblemStorage
			}
			s.Note(kind, "%s: %v", what, err)
		}
		orphans := make(map[string]int)
		for _, p := range o.policies.all {
			if !o.sources.configured(p.Source) {
				orphans[p.Source]++
			}
		}
		for name, count := range orphans {
			s.Note(summary.ProblemSettings, "the source %s is not configured, but %d of its policies are enforced: "+
				"delete them, or configure it again", name, count)
		}
		slices.SortFunc(s.Problems, func(a, b summary.Problem) int { return strings.Compare(a.Text, b.Text) })
		if s.ProblemCount = len(s.Problems); s.ProblemCount > summary.MaxProblems {
			s.Problems = s.Problems[:summary.MaxProblems]
			s.Note(summary.ProblemPolicy, "%d more problems; `sluice policy list` shows the refused policies",
				s.ProblemCount-summary.MaxProblems)
		}
		return s, nil
	})
}

// Figures returns the weight of the stream's log, and how many subscribers were disconnected.
func (o *Owner) Figures() (weight int, cut uint64) {
	f := o.publisher.stream.Figures()
	return f.Weight, f.Cut
}

// Incarnation identifies this run.
func (o *Owner) Incarnation() [16]byte { return o.publisher.stream.Incarnation() }
