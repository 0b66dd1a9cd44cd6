// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
)

// Feed is a source that repeatedly lists all its files. It belongs to one goroutine.
type Feed struct {
	owner   *Owner
	name    string
	decoded map[string]*file // by origin
	former  directory.Renamed
}

// Feed returns the feed of a source that New was given.
func (o *Owner) Feed(name string) *Feed {
	return &Feed{owner: o, name: name, decoded: make(map[string]*file)}
}

// Held returns the number of objects that the owner has of the source.
func (f *Feed) Held(ctx context.Context) (held int, err error) {
	err = f.owner.loop.Do(ctx, opRead, func() {
		f.owner.index.objects(func(x *object) {
			if x.by.Source == f.name {
				held++
			}
		})
	})
	return held, err
}

// Failed records why the source cannot be read; nil clears it.
func (f *Feed) Failed(ctx context.Context, why error) error {
	return f.owner.loop.Do(ctx, opOther, func() { f.owner.sources.failed(f.name, why) })
}

// Set replaces the files of the source. Objects of files that are no longer listed are deleted. A single unreadable
// object is left out: an unreadable Service refuses connections, and an unreadable slice is not used. All previous
// objects of a file stay in three cases: the file cannot be read, it exceeds a limit, or one of its documents does
// not identify its object. This also applies to a renamed file. Renames before the first listing of a run are
// unknown. Therefore, while a file cannot be read, the objects of all files that disappeared since the previous run
// stay.
func (f *Feed) Set(ctx context.Context, files []directory.File) error {
	current := make(map[string]*file, len(files))
	l := &listing{source: f.name, files: current, without: make(map[string]string)}
	for _, in := range files {
		old := f.decoded[in.Origin]
		d := &file{sum: sha256.Sum256(in.Data), err: in.Err, keep: in.Keep}
		switch {
		case in.Same && old == nil:
			return fmt.Errorf("%s %s: it is listed as unchanged, but the previous listing did not have it", f.name, in.Origin)
		case in.Same:
			d = old
		case in.Keep:
			if old != nil && d.err == nil {
				d.err = old.err
			}
			l.partial = l.partial || old == nil && d.err == nil
		case in.Err != nil:
		case old != nil && !old.keep && old.sum == d.sum:
			d = old
		default:
			d.docs, d.bad = manifest.Options{}.DecodeEach(in.Data)
			d.distinct()
		}
		current[in.Origin] = d
		l.order = append(l.order, in.Origin)
	}
	former, err := f.findFormer(ctx, files, current)
	if err != nil {
		return err
	}
	for name := range former.Names {
		if current[name] == nil {
			current[name] = &file{keep: true, gone: true}
			l.order = append(l.order, name)
		}
	}
	slices.Sort(l.order)
	l.renamed = f.former.Next(files, func(string) bool { return true }, nil)
	if err := f.apply(ctx, l); err != nil {
		return err
	}
	for origin := range l.without {
		if names := l.renamed[origin]; names != nil {
			former[origin] = names
		}
	}
	former.Warn(f.owner.config.Log, f.name, f.former)
	f.decoded, f.former = current, former
	return nil
}

// findFormer returns the former names of files that cannot be read.
func (f *Feed) findFormer(ctx context.Context, files []directory.File, current map[string]*file) (
	directory.Renamed, error,
) {
	var held []string
	if f.former == nil {
		err := f.owner.loop.Do(ctx, opRead, func() {
			f.owner.index.objects(func(x *object) {
				if x.by.Source == f.name {
					held = append(held, x.by.Origin)
				}
			})
		})
		if err != nil {
			return nil, err
		}
	}
	unread := func(origin string) bool { d := current[origin]; return d.stays() || d.unnamed() }
	return f.former.Next(files, unread, held), nil
}

// maxTries limits how many files are tried one by one when a listing exceeds a limit.
const maxTries = 1000

// apply applies the files of a listing.
func (f *Feed) apply(ctx context.Context, l *listing) error {
	release, err := f.owner.revising.Hold(ctx)
	if err != nil {
		return err
	}
	defer release()
	err = f.revise(ctx, l, func(*edit) { f.took(l) })
	if !errors.Is(err, failure.ErrLimit) {
		return err
	}
	if err := f.fit(ctx, l); err != nil {
		return err
	}
	for origin := range l.without {
		l.keepFormer(l.files, origin)
	}
	return f.revise(ctx, l, func(*edit) { f.took(l) })
}

// revise makes the changes of a listing.
func (f *Feed) revise(ctx context.Context, l *listing, done func(*edit)) error {
	o := f.owner
	_, err := o.reviseHeld(ctx, func() (*edit, error) { return l.compare(o.index, o.sources), nil }, done)
	return err
}

// keepFormer keeps the objects that a file had under its former names.
func (l *listing) keepFormer(files map[string]*file, origin string) {
	for _, name := range l.renamed[origin] {
		if files[name] == nil {
			files[name] = &file{keep: true, gone: true}
		}
	}
}

// fit finds which files of a listing fit if the whole listing exceeds a limit. It keeps unchanged files, and tries
// the changed files one by one.
func (f *Feed) fit(ctx context.Context, l *listing) error {
	// Start without the changed files, so that deletions free space first.
	all := l.files
	trial := func(origin string) *listing {
		some := &listing{
			source: l.source, files: make(map[string]*file, len(all)), without: l.without, order: l.order,
			partial: true,
		}
		for name, one := range all {
			if _, bad := l.without[name]; bad || name > origin && !one.stays() {
				one = &file{keep: true}
			}
			some.files[name] = one
		}
		for name := range all {
			if some.files[name].keep {
				l.keepFormer(some.files, name)
			}
		}
		return some
	}
	tries := 0
	for _, origin := range l.order {
		if all[origin].stays() {
			continue
		}
		if tries++; tries > maxTries {
			l.without[origin] = fmt.Sprintf("%v: not tried, after trying %d other files", failure.ErrLimit, maxTries)
			continue
		}
		err := f.revise(ctx, trial(origin), func(*edit) {})
		switch {
		case errors.Is(err, failure.ErrLimit):
			l.without[origin] = err.Error()
		case err != nil:
			return err
		}
	}
	return nil
}

// took records the result of a listing that was applied.
func (f *Feed) took(l *listing) {
	o := f.owner
	o.sources.acceptUnless(l.source, func(r Refused) bool { _, ok := l.refused[r.Origin]; return ok })
	for _, r := range l.refused {
		o.sources.refuse(r)
	}
	o.sources.failed(l.source, nil)
	if !l.partial {
		o.synced(l.source)
	}
}
