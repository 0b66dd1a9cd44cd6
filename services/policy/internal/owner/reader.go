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
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/names"
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
	Error    string // error of a newer version of the policy, or of a file that has no enforced policy
	Accepted bool
	Subjects []identity.Numeric
}

// Reader answers queries about the policies and their tables, and changes nothing. Its methods may be called
// concurrently.
type Reader struct {
	config *Config
	loop   *loop.Loop
	// questions serialises queries that compile tables outside of the engine.
	questions  *loop.Lock
	engine     *engine.Engine
	publisher  *publisher
	storage    *storage
	forms      *forms
	policies   *policySet
	places     *places
	sources    *sources
	identities *identities
	interests  *interests
	names      *names.Table
	ruleSets   *ruleSets
	problems   *problem.Set
}

// newReader returns the reader of an owner whose other fields are set.
func newReader(o *Owner) *Reader {
	return &Reader{
		config: &o.config, loop: o.loop, questions: o.loop.NewLock(), engine: o.engine, publisher: o.publisher,
		storage: o.storage, forms: o.forms, policies: o.policies, places: o.places, sources: o.sources,
		identities: o.identities, interests: o.interests, names: o.names.table, ruleSets: o.ruleSets,
		problems: o.problems,
	}
}

// List returns policies sorted by key, and their revision. The policies are copied in a turn of the owner. The
// endpoints that each policy selects are determined in the caller's goroutine.
func (r *Reader) List(ctx context.Context, f Filter) ([]Listed, uint64, error) {
	type copied struct {
		list     []Listed
		revision uint64
		subjects *engine.Subjects
		subject  *peer.Identity // subject of the filter; nil: the identity is not known
		dns      policy.DNSRules
	}
	takes := func(k policy.Key) bool {
		return (f.Kind == "" || k.Kind == f.Kind) && (f.Namespace == "" || k.Namespace == f.Namespace) && (f.Name == "" || k.Name == f.Name)
	}
	c, err := loop.Ask(ctx, r.loop, opRead, func() (copied, error) {
		c := copied{revision: r.publisher.barrier.Policy, subjects: r.engine.Subjects()}
		if id, ok := r.engine.Identity(f.Subject); ok {
			c.subject = &id
		}
		for _, p := range r.policies.all {
			k := p.written()
			if !takes(k) || f.Manager != nil && (!p.source().Calls || p.Manager != *f.Manager) {
				continue
			}
			l := Listed{Policy: *p, Accepted: p.Broken == "" && p.Exceeds == "", Error: cmp.Or(p.Broken, p.Exceeds)}
			l.Key = k
			if n := r.places.foldedIn[k.Namespace]; n > 0 && k.Kind == policy.KindNamespaceIsolation {
				l.Error = fmt.Sprintf("%d %s", n, p.Exceeds)
			}
			if x, ok := r.sources.refusal(p.Source, p.Origin); ok {
				l.Error = x.err
			}
			c.list = append(c.list, l)
		}
		if slices.ContainsFunc(c.list, func(l Listed) bool { return l.usesNames() }) {
			c.dns = r.policies.dnsRules(nil)
		}
		if f.Subject == 0 && f.Manager == nil {
			c.list = append(c.list, r.withoutPolicy(c.list, takes)...)
		}
		return c, nil
	})
	out := c.list[:0]
	for _, l := range c.list {
		if f.Subject != 0 && (c.subject == nil || !engine.Selects(l.object, *c.subject)) {
			continue
		}
		if l.inForce() {
			l.Subjects = c.subjects.Selected(l.object)
			l.Notes = c.dns.WithNotes(l.object, l.Notes)
			if len(l.Subjects) == 0 && l.object.Group == nil {
				l.Notes = append(slices.Clone(l.Notes), noneSelected)
			}
		}
		out = append(out, l)
	}
	slices.SortFunc(out, func(a, b Listed) int { return cmp.Or(a.Key.Compare(b.Key), cmp.Compare(a.Origin, b.Origin)) })
	return out, c.revision, err
}

// withoutPolicy returns the refused files that are not in the list, because they have no policy.
func (r *Reader) withoutPolicy(listed []Listed, takes func(policy.Key) bool) (out []Listed) {
	type place struct{ source, origin string }
	has := make(map[place]bool)
	for i := range listed {
		if l := &listed[i]; l.Error != "" {
			has[place{l.Source, l.Origin}] = true
		}
	}
	for by, x := range r.sources.refusals() {
		if !has[place{by.Source, by.Origin}] && takes(x.key) {
			out = append(out, Listed{Policy: Policy{Key: x.key, Source: by.Source, Origin: by.Origin}, Error: x.err})
		}
	}
	return out
}

// aside runs work in the caller's goroutine, because work compiles tables for a query and would block the owner for
// too long. To limit memory, only one query runs at a time.
func (r *Reader) aside(ctx context.Context, work func() error) error {
	release, err := r.questions.Hold(ctx)
	if err != nil {
		return err
	}
	defer release()
	return work()
}

// answer answers a query from the engine or, if the engine lacks a needed table, from a copy of it.
func (r *Reader) answer(ctx context.Context, q query.Query) error {
	type looked struct {
		complete bool
		draft    engine.Draft
	}
	look := func(draft bool) (looked, error) {
		return loop.Ask(ctx, r.loop, opRead, func() (l looked, err error) {
			l.complete, err = q.Begin(query.View{
				Engine: r.engine, Identities: r.identities.all, Cluster: r.config.Engine.Cluster, NodeLabels: r.config.Rules.NodeLabels,
				Revision: r.publisher.barrier.Policy, Store: r.publisher.barrier.IdentityService.Store,
			})
			switch {
			case err != nil:
			case l.complete:
				err = q.Evaluate(r.engine)
			case draft:
				r.loop.Rename(opDraft)
				l.draft = r.engine.Draft()
			}
			return l, err
		})
	}
	if l, err := look(false); err != nil || l.complete {
		return err
	}
	return r.aside(ctx, func() error {
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
func (r *Reader) Table(ctx context.Context, x identity.Numeric) (query.Evaluated, error) {
	q := &query.Table{Identity: x}
	if err := r.answer(ctx, q); err != nil {
		return query.Evaluated{}, err
	}
	return q.Answer, nil
}

// Explain evaluates a connection at its sender and at its receiver.
func (r *Reader) Explain(ctx context.Context, from, to query.Peer, at port.Point) (query.Explained, error) {
	return r.ExplainLookup(ctx, from, to, at, "")
}

// ExplainLookup is like Explain, and also evaluates a DNS query for a name over the connection, unless the name is
// empty.
func (r *Reader) ExplainLookup(
	ctx context.Context, from, to query.Peer, at port.Point, name string,
) (query.Explained, error) {
	q := &query.Explain{From: from, To: to, At: at, Name: name}
	if err := r.answer(ctx, q); err != nil {
		return query.Explained{}, err
	}
	return q.Answer, nil
}

// Diff calls take for each verdict that a change of policies of any source would change.
func (r *Reader) Diff(
	ctx context.Context, change Request, remove []policy.Key, take func(query.Difference) error,
) error {
	docs, err := change.read(r.config.Rules)
	if err != nil {
		return err
	}
	objects := make([]policy.Object, 0, len(docs))
	for _, d := range docs {
		objects = append(objects, r.forms.filtered(*d.Object))
	}
	var compared *query.Comparison
	if err := r.aside(ctx, func() error {
		draft, err := loop.Ask(ctx, r.loop, opDraft, func() (engine.Draft, error) {
			for _, d := range docs {
				if old := r.policies.all[d.Object.Key]; old != nil && r.sources.foreign(old) {
					return engine.Draft{}, fmt.Errorf("%w: %s is of %s %s",
						failure.ErrOwned, old.Key, old.Source, old.Origin)
				}
			}
			for _, k := range remove {
				if old := r.policies.all[k]; old != nil && r.sources.foreign(old) {
					return engine.Draft{}, fmt.Errorf("%w: %s is of %s %s",
						failure.ErrForeign, old.Key, old.Source, old.Origin)
				}
			}
			return r.engine.Draft(), nil
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
	// Do not run Each in aside: a slow reader of the differences would delay other queries.
	return compared.Each(ctx, take)
}

// Status returns the state of all parts.
func (r *Reader) Status(ctx context.Context) (summary.Status, error) {
	return loop.Ask(ctx, r.loop, opRead, func() (summary.Status, error) {
		s := summary.Status{
			Busy:     r.loop.Figures(),
			Revision: r.publisher.barrier.Policy, Store: r.publisher.barrier.IdentityService.Store,
			Policies: len(r.policies.all), Identities: len(r.identities.all), Waiting: r.engine.Waiting(),
			Size: r.engine.Size(), Counters: r.engine.Counters(), Names: r.names.Len(), Addresses: r.names.Addresses(), Journal: r.storage.journal.Size(),
		}
		for _, p := range r.policies.all {
			if slices.ContainsFunc(p.Notes, func(note manifest.Note) bool { return note.Kind == manifest.NoteUnsupported }) {
				s.Unsupported++
			}
			if p.Exceeds != "" {
				s.Policies--
				if k := p.Key; k.Kind == policy.KindNamespaceIsolation {
					s.Exceeding += r.places.foldedIn[k.Namespace]
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
		s.Limits, s.Reduced = append(r.places.ledger.Usage(), r.divided()...), len(r.engine.Reduced())
		if n := r.ruleSets.registry.Figures().Without; n > 0 {
			s.Note(summary.ProblemPolicy, "sets of layer 7 rules without a number: %d; connections that they would evaluate "+
				"are refused; `sluice shares` lists the use of the limit rule-sets", n)
		}
		s.Sources = r.sources.states(r.policies)
		for by, x := range r.sources.refusals() {
			s.Refused++
			s.Note(summary.ProblemPolicy, "%s %s is refused: %s", by.Source, by.Origin, x.err)
		}
		s.WaitsFor, s.Skipped = r.sources.waitsFor(), r.sources.skipped()
		for _, text := range s.WaitsFor {
			s.Note(summary.ProblemPolicy, "new endpoints are not connected: %s", text)
		}
		for _, text := range r.sources.acceptedWithout() {
			s.Note(summary.ProblemSettings, "%s", text)
		}
		states, _ := r.publisher.stream.States()
		for name, sub := range r.interests.all {
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
				for at, x := range state.Refusals {
					st.Refusals = append(st.Refusals, fmt.Sprintf("%s, table %d: %s; the largest share is from %s",
						at, x.Table, x.Reason, x.Policy))
				}
				slices.Sort(st.Refusals)
			}
			s.Subscribers = append(s.Subscribers, st)
		}
		slices.SortFunc(s.Subscribers, func(a, b summary.SubscriberStatus) int { return strings.Compare(a.Name, b.Name) })
		for what, err := range r.problems.All() {
			kind := summary.ProblemPolicy
			if what == problem.Storage {
				kind = summary.ProblemStorage
			}
			s.Note(kind, "%s: %v", what, err)
		}
		orphans := make(map[string]int)
		for _, p := range r.policies.all {
			if !r.sources.configured(p.Source) {
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

// Figures returns the size of the stream's log, and the number of subscribers that were disconnected as too slow.
func (r *Reader) Figures() (weight int, cut uint64) {
	f := r.publisher.stream.Figures()
	return f.Weight, f.Cut
}

// Shares returns the tenants' use of each limit.
func (r *Reader) Shares(ctx context.Context) ([]shares.Usage, error) {
	return loop.Ask(ctx, r.loop, opRead, func() ([]shares.Usage, error) {
		return append(append(r.places.ledger.Usage(), r.places.isolations.Usage()...), r.divided()...), nil
	})
}

// divided returns each tenant's use of the limits on identity classes, their rows, and rule sets.
func (r *Reader) divided() []shares.Usage {
	classes, _ := r.engine.Splits()
	out := []shares.Usage{classes}
	if rows, ok := r.engine.SplitRows(); ok {
		out = append(out, rows)
	}
	return append(out, r.ruleSets.registry.Usage()...)
}

// StorageFailure returns why the state cannot be stored; empty if it can.
func (r *Reader) StorageFailure(ctx context.Context) (string, error) {
	return loop.Ask(ctx, r.loop, opRead, func() (string, error) {
		return r.storage.failure(), nil
	})
}

// Narrows reports whether the policies would allow less to an identity if it had other labels. It returns false until
// every source has been complete once.
func (r *Reader) Narrows(ctx context.Context, n identity.Numeric, labels label.Set) (bool, error) {
	next, err := peer.New(n, labels)
	if err != nil {
		return false, err
	}
	return loop.Ask(ctx, r.loop, opRead, func() (bool, error) {
		return r.sources.ready && r.engine.Narrows(n, r.identities.complete(next)), nil
	})
}

// Codes of the reasons for which a node does not enforce a policy as written.
const (
	NotStored     = "NotStored"
	OtherSource   = "OtherSource"
	TableTooLarge = "TableTooLarge"
)

// Unenforced is the reason for which a node does not enforce a policy as written.
type Unenforced struct{ Code, Why string }

// Unenforced returns the policies that only this node does not enforce as written, with the reasons: a table is too
// large, a change could not be stored, or a file or a call on this node has the same policy as a Kubernetes object.
// It omits policies that no node enforces as written, such as policies that exceed a share.
func (r *Reader) Unenforced(ctx context.Context) (map[policy.Key]Unenforced, error) {
	return loop.Ask(ctx, r.loop, opRead, func() (map[policy.Key]Unenforced, error) {
		out := make(map[policy.Key]Unenforced)
		for k, form := range r.policies.closed {
			if form.of != nil { // nil: the object was removed, so there is nothing to report
				out[k] = Unenforced{NotStored, "the node cannot store it: " + cmp.Or(r.storage.failure(), "a write failed")}
			}
		}
		for k, p := range r.policies.all {
			if k.Kind == policy.KindDocument && p.source().Shared {
				out[p.written()] = Unenforced{OtherSource, p.Broken}
			}
		}
		for _, x := range r.engine.Reduced() {
			for _, k := range x.Policies {
				if out[k] == (Unenforced{}) {
					out[k] = Unenforced{TableTooLarge, x.String()}
				}
			}
		}
		return out, nil
	})
}
