// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// Given is an object from a source that watches.
type Given struct {
	Object manifest.Object
	Err    error // the object is unreadable, and its accepted version is removed
}

// Objects is the watch.Sink of a source that reports changes one object at a time, of both kinds in
// any order, and then that the listing is complete. An object that exceeds a limit, or that belongs
// to another source, is refused individually and retried by a call of Apply without changes. It
// belongs to one goroutine.
type Objects struct {
	owner   *Owner
	name    string
	refused map[service.ObjectKey]Given
}

// Objects returns the sink of a source that New was given.
func (o *Owner) Objects(name string) *Objects {
	return &Objects{owner: o, name: name, refused: make(map[service.ObjectKey]Given)}
}

// Apply implements watch.Sink.
func (f *Objects) Apply(ctx context.Context, c watch.Changes[service.ObjectKey, Given]) error {
	upserts := c.Upserts
	if len(upserts)+len(c.Deletes) == 0 {
		upserts = maps.Clone(f.refused)
	}
	for k := range c.Deletes {
		delete(f.refused, k)
	}
	err := f.take(ctx, upserts, c.Deletes)
	if !errors.Is(err, failure.ErrLimit) {
		return err
	}
	// Apply the deletions first, which may free capacity, and then the objects that fit, one by one.
	if err := f.take(ctx, nil, c.Deletes); err != nil {
		return err
	}
	for _, k := range slices.SortedFunc(maps.Keys(upserts), service.ObjectKey.Compare) {
		one := upserts[k]
		err := f.take(ctx, map[service.ObjectKey]Given{k: one}, nil)
		if errors.Is(err, failure.ErrLimit) {
			err = f.refuse(ctx, k, one, err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// take sets and deletes objects, except objects of other sources.
func (f *Objects) take(ctx context.Context, upserts map[service.ObjectKey]Given,
	deletes map[service.ObjectKey]struct{},
) error {
	o := f.owner
	refused := make(map[service.ObjectKey]string)
	by := &managed.By{Source: f.name}
	_, err := o.revise(ctx, func() (*edit, error) {
		e := &edit{redelivered: true}
		clear(refused)
		for _, k := range slices.SortedFunc(maps.Keys(upserts), service.ObjectKey.Compare) {
			g := upserts[k]
			x := o.index.object(k)
			unreadable := g.Err
			if unreadable == nil && g.Object.Key != k {
				unreadable = fmt.Errorf("is %s, but the source calls it %s", g.Object.Key, k)
			}
			shadow := shadowKey(k, f.name)
			old := o.index.object(shadow)
			switch {
			case unreadable != nil:
				refused[k] = unreadable.Error()
				o.quota.stopWaiting(k)
				if x != nil && (x.by.Source == f.name || !o.sources.delivers(x.by.Source)) {
					e.close(x, by, unreadable)
				}
			case x != nil && x.by.Source != f.name && o.sources.delivers(x.by.Source):
				refused[k] = fmt.Sprintf("%s belongs to the source %s", k, x.by.Source)
				y := newShadow(g.Object.Service, by, f.name, refused[k])
				switch {
				case y != nil && (old == nil || !old.same(y)):
					e.puts = append(e.puts, y)
				case y == nil && old != nil:
					e.gone = append(e.gone, shadow)
				}
			default:
				if old != nil {
					e.gone = append(e.gone, shadow)
				}
				y := newObject(&g.Object, by)
				if x == nil || x.refuses() {
					if why := o.quota.count(&g.Object, y, o.config.Now()); why != "" {
						refused[k] = why
						if y.slice != nil {
							continue
						}
						y = y.refusing()
					}
				}
				if x == nil || !x.same(y) {
					e.puts = append(e.puts, y)
				}
			}
		}
		for k := range deletes {
			if o.index.object(k) == nil {
				o.quota.uncount(k) // the object was waiting for capacity
			}
			for _, k := range []service.ObjectKey{k, shadowKey(k, f.name)} {
				if x := o.index.object(k); x != nil && x.by.Source == f.name {
					e.gone = append(e.gone, k)
				}
			}
		}
		return e, nil
	}, func(*edit) {
		accept := func(k service.ObjectKey) {
			o.sources.accept(f.name, k.String())
			if shadow := shadowKey(k, f.name); o.index.object(shadow) == nil {
				o.sources.accept(f.name, shadow.String()) // the shadow had exceeded a limit
			}
		}
		for k := range upserts {
			accept(k)
		}
		for k := range deletes {
			accept(k)
		}
		for k, why := range refused {
			o.sources.refuse(Refused{Key: k, Source: f.name, Origin: k.String(), Err: why})
		}
	})
	if err != nil {
		return err
	}
	for k, g := range upserts {
		delete(f.refused, k)
		if _, bad := refused[k]; bad && g.Err == nil {
			f.refused[k] = g // retry later: capacity or the name may become available
		}
	}
	return nil
}

// close replaces an object whose new version is unreadable, because the endpoints of the former version may no longer
// exist. It deletes a slice. It keeps the addresses of a Service, which then refuse connections.
func (e *edit) close(x *object, by *managed.By, why error) {
	if x.slice != nil {
		e.gone = append(e.gone, x.key())
		return
	}
	if x.service.Closed && x.by.Source == by.Source {
		return
	}
	closed := x.service.Clone()
	closed.Closed, closed.HealthCheckNodePort = true, 0
	note := fmt.Sprintf("the API server has a newer version of this Service, which cannot be read: %v: "+
		"connections are refused", why)
	e.puts = append(e.puts, &object{by: by, remarks: newRemarks([]string{note}, nil), service: closed})
}

// refuse records that an object exceeds a limit.
func (f *Objects) refuse(ctx context.Context, k service.ObjectKey, g Given, why error) error {
	f.refused[k] = g
	return f.owner.loop.Do(ctx, opOther, func() {
		f.owner.sources.refuse(Refused{Key: k, Source: f.name, Origin: k.String(), Err: why.Error()})
	})
}

// Held returns the objects of the source, including objects of earlier runs.
func (f *Objects) Held(ctx context.Context) (out []service.ObjectKey, err error) {
	err = f.owner.loop.Do(ctx, opRead, func() {
		f.owner.index.objects(func(x *object) {
			if x.by.Source == f.name {
				out = append(out, shadowed(x.key()))
			}
		})
	})
	return out, err
}

// Complete implements watch.Sink.
func (f *Objects) Complete(ctx context.Context, listed map[service.ObjectKey]struct{}) error {
	o := f.owner
	_, err := o.revise(ctx, func() (*edit, error) {
		e := &edit{redelivered: true}
		o.index.objects(func(x *object) {
			if _, ok := listed[shadowed(x.key())]; !ok && x.by.Source == f.name {
				e.gone = append(e.gone, x.key())
			}
		})
		o.quota.keepWaiting(listed)
		slices.SortFunc(e.gone, service.ObjectKey.Compare)
		if !o.sources.listed(f.name) {
			e.listed = []string{f.name}
		}
		return e, nil
	}, func(*edit) {
		o.sources.acceptUnless(f.name, func(r Refused) bool { _, ok := listed[r.Key]; return ok })
		o.synced(f.name)
	})
	if err != nil {
		return err
	}
	maps.DeleteFunc(f.refused, func(k service.ObjectKey, _ Given) bool { _, ok := listed[k]; return !ok })
	return nil
}

// Failed implements watch.Sink.
func (f *Objects) Failed(ctx context.Context, why error) error {
	return f.owner.loop.Do(ctx, opOther, func() { f.owner.sources.failed(f.name, why) })
}
