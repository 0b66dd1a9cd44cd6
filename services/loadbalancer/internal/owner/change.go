// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"fmt"

	"github.com/sluice-net/sluice/kit/burst"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// Changed is the result of a change for one object.
type Changed = managed.Changed[service.ObjectKey, []string]

// Outcome is the result of a change.
type Outcome = managed.Outcome[service.ObjectKey, []string]

// Request is a change that a caller requests.
type Request struct {
	managed.Caller
	Manifests    []byte
	Namespace    string // namespace of documents without a namespace; empty: default
	AllowUnknown bool   // drop unknown fields instead of rejecting them
}

// largeText is a size in bytes. A call with manifests of at least this size counts as a burst (see package burst).
const largeText = 128 << 10

// Upsert adds or replaces objects of a manager.
func (o *Owner) Upsert(ctx context.Context, r Request) (Outcome, error) {
	if len(r.Manifests) >= largeText {
		burst.Begin()
	}
	docs, err := (manifest.Options{Namespace: r.Namespace, AllowUnknown: r.AllowUnknown}).Decode(r.Manifests)
	if err != nil {
		return Outcome{}, err
	}
	if err := distinct(docs); err != nil {
		return Outcome{}, err
	}
	return o.change(ctx, r.Caller, func() (*edit, error) {
		e := &edit{puts: make([]*object, 0, len(docs)), named: make([]service.ObjectKey, 0, len(docs))}
		e.Changes = make([]Changed, 0, len(docs))
		by := &managed.By{Source: managed.SourceGRPC, Manager: r.Manager}
		for i := range docs {
			x := newObject(&docs[i], by)
			c := Changed{Key: x.key(), Type: managed.Created, Dropped: docs[i].Dropped, Notes: docs[i].Notes}
			exists, err := o.index.managed(o.sources).Put(&r.Caller, c.Key)
			switch {
			case err != nil:
				return nil, err
			case exists && o.index.object(c.Key).same(x):
				c.Type = managed.Unchanged
			case exists:
				c.Type = managed.Replaced
			}
			if c.Type != managed.Unchanged {
				x.named = true
				e.puts = append(e.puts, x)
			}
			e.named = append(e.named, c.Key)
			e.Changes = append(e.Changes, c)
		}
		return e, nil
	})
}

// distinct rejects an object that a manifest contains twice.
func distinct(docs []manifest.Object) error {
	seen := make(map[service.ObjectKey]int, len(docs))
	for _, d := range docs {
		if first, ok := seen[d.Key]; ok {
			return &manifest.Error{Violations: []manifest.Violation{{
				Document: d.Document, Path: "metadata.name", Text: fmt.Sprintf("%s is already in document %d", d.Key, first+1),
			}}}
		}
		seen[d.Key] = d.Document
	}
	return nil
}

// Delete deletes objects of a manager.
func (o *Owner) Delete(ctx context.Context, c managed.Caller, keys []service.ObjectKey) (Outcome, error) {
	return o.change(ctx, c, func() (*edit, error) {
		gone, err := o.index.managed(o.sources).Delete(&c, keys)
		if err != nil {
			return nil, err
		}
		e := &edit{gone: gone}
		e.Changes = managed.Deletions[service.ObjectKey, []string](keys, gone)
		return e, nil
	})
}

// Complete deletes the objects that a manager has not sent in this run. incarnation is the run in which the manager
// has sent its objects; if the process was restarted since, Complete fails.
func (o *Owner) Complete(ctx context.Context, c managed.Caller, incarnation [16]byte) (Outcome, error) {
	return o.change(ctx, c, func() (*edit, error) {
		if err := c.CheckRun(incarnation, o.incarnation); err != nil {
			return nil, err
		}
		named := func(k service.ObjectKey) bool { return o.index.object(k).named }
		gone, err := o.index.managed(o.sources).Prune(&c, 0, named)
		if err != nil {
			return nil, err
		}
		e := &edit{completes: true, gone: gone}
		e.Changes = managed.Deletions[service.ObjectKey, []string](gone, gone)
		return e, nil
	})
}

// change makes a change of source "grpc"; with ValidateOnly it only returns its outcome.
func (o *Owner) change(ctx context.Context, c managed.Caller, find func() (*edit, error)) (Outcome, error) {
	out, err := o.revise(ctx, func() (*edit, error) {
		if err := c.Check(o.index.revision); err != nil {
			return nil, err
		}
		e, err := find()
		if err == nil {
			e.dry = c.ValidateOnly
		}
		return e, err
	}, func(e *edit) {
		for _, k := range e.named {
			o.index.object(k).named = true
		}
		if e.completes {
			o.sources.managerSynced(c.Manager)
		}
		// The notes on omitted endpoints, and on frontends that belong to other services, depend on the state.
		for i := range e.Changes {
			x := &e.Changes[i]
			if x.Type == managed.Deleted || x.Type == managed.Absent || x.Key.Kind != service.KindService {
				continue
			}
			if j := o.index.service(x.Key.Name); j != nil && j.object != nil {
				x.Notes = o.reader.notes(j)
			}
		}
	})
	return out, err
}
