// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"fmt"
	"slices"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// ChangeType is what was done to an object.
type ChangeType int

// The types.
const (
	Created ChangeType = iota + 1
	Replaced
	Unchanged
	Deleted
	Absent
)

// Changed is what became of one object.
type Changed struct {
	Key     service.ObjectKey
	Type    ChangeType
	Dropped []string
	Notes   []string
}

// Outcome is the answer of a change.
type Outcome struct {
	Revision uint64
	Changes  []Changed
}

// Caller is who asks for a change of the source "grpc", and on what condition.
type Caller struct {
	Manager      string  // empty: that of calls without one
	IfRevision   *uint64 // nil: whatever the revision is
	ValidateOnly bool    // check, but change nothing
	AllowEmpty   bool    // the manager may lose every object that it has
}

// Request is a change as a caller asks for it.
type Request struct {
	Caller
	Manifests    []byte
	Namespace    string // of documents that name none; empty: default
	AllowUnknown bool   // drop fields that a kind does not have, instead of refusing them
}

// Upsert adds or replaces objects of a manager.
func (o *Owner) Upsert(ctx context.Context, r Request) (Outcome, error) {
	docs, err := (manifest.Options{Namespace: r.Namespace, AllowUnknown: r.AllowUnknown}).Decode(r.Manifests)
	if err != nil {
		return Outcome{}, err
	}
	if err := distinct(docs); err != nil {
		return Outcome{}, err
	}
	return o.change(ctx, r.Caller, func() (*edit, error) {
		e := &edit{}
		by := &bringer{source: SourceGRPC, manager: r.Manager}
		for i := range docs {
			x := newObject(&docs[i], by)
			c := Changed{Key: x.key(), Type: Created, Dropped: docs[i].Dropped, Notes: docs[i].Notes}
			if old := o.object(c.Key); old != nil {
				if who := o.foreign(old, r.Manager); who != "" {
					return nil, fmt.Errorf("%w: %s is of %s", failure.ErrOwned, c.Key, who)
				}
				if c.Type = Replaced; old.same(x) {
					c.Type = Unchanged
				}
			}
			if c.Type != Unchanged {
				x.named = true
				e.puts = append(e.puts, x)
			}
			e.named = append(e.named, c.Key)
			e.Changes = append(e.Changes, c)
		}
		return e, nil
	})
}

// distinct refuses an object that a manifest has twice.
func distinct(docs []manifest.Object) error {
	seen := make(map[service.ObjectKey]int, len(docs))
	for _, d := range docs {
		if first, ok := seen[d.Key]; ok {
			return &manifest.Error{Violations: []manifest.Violation{{
				Document: d.Document, Path: "metadata.name", Text: fmt.Sprintf("%s is in document %d already", d.Key, first+1),
			}}}
		}
		seen[d.Key] = d.Document
	}
	return nil
}

// Delete deletes objects of a manager.
func (o *Owner) Delete(ctx context.Context, c Caller, keys []service.ObjectKey) (Outcome, error) {
	return o.change(ctx, c, func() (*edit, error) {
		e := &edit{}
		seen := make(map[service.ObjectKey]bool, len(keys))
		for _, k := range keys {
			x := o.object(k)
			if x == nil || seen[k] {
				e.Changes = append(e.Changes, Changed{Key: k, Type: Absent})
				continue
			}
			if who := o.foreign(x, c.Manager); who != "" {
				return nil, fmt.Errorf("%w: %s is of %s", failure.ErrForeign, k, who)
			}
			seen[k] = true
			e.remove(k)
		}
		return e, nil
	})
}

// remove adds a deletion to the edit.
func (e *edit) remove(keys ...service.ObjectKey) {
	for _, k := range keys {
		e.gone = append(e.gone, k)
		e.Changes = append(e.Changes, Changed{Key: k, Type: Deleted})
	}
}

// Complete deletes the objects that a manager has not named in this run. The
// incarnation is the run that took the listing.
func (o *Owner) Complete(ctx context.Context, c Caller, incarnation [16]byte) (Outcome, error) {
	if incarnation != o.incarnation {
		return Outcome{}, fmt.Errorf("%w: the service is another run than the one that took the listing", failure.ErrChanged)
	}
	return o.change(ctx, c, func() (*edit, error) {
		e := &edit{completes: true}
		var stale []service.ObjectKey
		named := 0
		o.objects(func(x *object) {
			switch {
			case x.by.source != SourceGRPC || x.by.manager != c.Manager:
			case x.named:
				named++
			default:
				stale = append(stale, x.key())
			}
		})
		if named == 0 && len(stale) > 0 && !c.AllowEmpty {
			return nil, fmt.Errorf("%w: manager %q has %d objects and has named none", failure.ErrEmpty, c.Manager, len(stale))
		}
		slices.SortFunc(stale, service.ObjectKey.Compare)
		e.remove(stale...)
		return e, nil
	})
}

// foreign names who has an object that a manager may not touch; empty if it may.
// An object of a source that is not configured any more belongs to every caller:
// its own source will not come.
func (o *Owner) foreign(x *object, manager string) string {
	switch {
	case x.by.source != SourceGRPC && o.sources[x.by.source] != nil:
		return "the source " + x.by.source + " (" + x.by.origin + ")"
	case x.by.source != SourceGRPC || x.by.manager == manager:
		return ""
	case x.by.manager == "":
		return "calls without a manager"
	}
	return fmt.Sprintf("the manager %q", x.by.manager)
}

// change makes a change of the source "grpc", or says what would become of it.
func (o *Owner) change(ctx context.Context, c Caller, find func() (*edit, error)) (Outcome, error) {
	out, err := o.revise(ctx, func() (*edit, error) {
		if c.IfRevision != nil && *c.IfRevision != o.state.Revision {
			return nil, fmt.Errorf("%w: the revision is %d, not %d", failure.ErrChanged, o.state.Revision, *c.IfRevision)
		}
		e, err := find()
		if err == nil {
			e.dry = c.ValidateOnly
		}
		return e, err
	}, func(e *edit) {
		for _, k := range e.named {
			o.object(k).named = true
		}
		if e.completes {
			o.managers[c.Manager] = true
		}
		o.annotate(e)
	})
	return out, err
}

// annotate adds to the changes what only the state tells: endpoints that are left
// out, and frontends that other services have.
func (o *Owner) annotate(e *edit) {
	for i := range e.Changes {
		c := &e.Changes[i]
		if c.Type == Deleted || c.Type == Absent || c.Key.Kind != service.KindService {
			continue
		}
		if j := o.services[c.Key.Name]; j != nil && j.object != nil {
			c.Notes = o.notes(j)
		}
	}
}
