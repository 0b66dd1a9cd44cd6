// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/services/policy/internal/decode"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// Feed is a source that lists all its policies each time, such as a directory.
type Feed struct {
	owner   *Owner
	name    string
	decoded map[string]*file // by origin
	former  directory.Renamed
	last    *listing // nil after a failure
}

type file struct {
	sum  [sha256.Size]byte
	docs []decode.Decoded
	err  error
	keep bool // the file was not read; its policies stay
	// gone is set, together with keep, if the file was renamed or removed. Its policies stay, because an unreadable
	// file may contain them now.
	gone bool
	// partly is set if err concerns only some of the documents. docs contains the other documents.
	partly  bool
	skipped []string // documents that are not policies
}

// Feed returns the feed of a source that was passed to New. It must be used by one goroutine.
func (o *Owner) Feed(name string) *Feed {
	return &Feed{owner: o, name: name, decoded: make(map[string]*file)}
}

// Held returns the number of policies that the owner has of the source.
func (f *Feed) Held(ctx context.Context) (int, error) {
	return loop.Ask(ctx, f.owner.loop, opOther, func() (int, error) {
		held := 0
		for _, p := range f.owner.policies.all {
			if p.Source == f.name {
				held++
			}
		}
		return held, nil
	})
}

// Failed records why the source cannot be read; nil clears the failure.
func (f *Feed) Failed(ctx context.Context, why error) error {
	return f.owner.loop.Do(ctx, opOther, func() { f.owner.sources.failed(f.name, why) })
}

// Set replaces the files of the source. A document that cannot be applied isolates the pods that it selects, or its
// namespace. If even the namespace of a document cannot be read, the policies of its file stay, except for policies
// that are now in another document of the file. The same applies to a renamed file. Renames before the first listing
// of a run are unknown. Therefore, while a file cannot be read, the policies of all files that disappeared since the
// previous run stay.
func (f *Feed) Set(ctx context.Context, files []directory.File) error {
	var known map[string][]decode.Decoded
	if len(f.decoded) == 0 {
		var err error
		if known, err = f.inForce(ctx); err != nil {
			return err
		}
	}
	current := make(map[string]*file, len(files))
	var order []string
	var before *enforced // nil if every file was read: then all files are compared
	for _, in := range files {
		if in.Same {
			if f.last != nil {
				before = f.last.after
			}
			old := f.decoded[in.Origin]
			if old == nil || old.keep {
				return fmt.Errorf("%s %s: it is listed as unchanged, but its content is unknown", f.name, in.Origin)
			}
			current[in.Origin] = old
			order = append(order, in.Origin)
			continue
		}
		d := &file{sum: sha256.Sum256(in.Data), err: in.Err, keep: in.Keep}
		if old := f.decoded[in.Origin]; in.Keep {
			if old != nil && d.err == nil {
				d.err = old.err
			}
		} else if old != nil && in.Err == nil && old.sum == d.sum && !old.keep {
			d = old
		} else if docs := decode.Same(in.Data, known[in.Origin]); in.Err == nil && docs != nil {
			d.docs = docs
		} else if in.Err == nil {
			d.read(in, f.owner.config.Rules)
		}
		current[in.Origin] = d
		order = append(order, in.Origin)
	}
	var held []string
	if f.former == nil {
		var err error
		if held, err = f.origins(ctx); err != nil {
			return err
		}
	}
	unread := func(origin string) bool { d := current[origin]; return d.err != nil || d.keep }
	former := f.former.Next(files, unread, held)
	for name := range former.Names {
		if current[name] == nil {
			current[name] = &file{keep: true, gone: true}
			order = append(order, name)
		}
	}
	slices.Sort(order)
	l := &listing{source: f.name, order: order, files: current, renamed: len(former) > 0, before: before}
	f.decoded, f.last = current, l
	if err := f.owner.takeOver(ctx, l); err != nil {
		f.last = nil
		return err // f.former is unchanged, so the next listing handles the same renames again
	}
	former.Warn(f.owner.config.Log, f.name, f.former)
	f.former = former
	return nil
}

// origins returns the origins of the enforced policies of the source.
func (f *Feed) origins(ctx context.Context) ([]string, error) {
	return loop.Ask(ctx, f.owner.loop, opOther, func() ([]string, error) {
		return slices.Compact(slices.Sorted(f.owner.policies.originsOf(f.name))), nil
	})
}

// read decodes the documents of a file.
func (d *file) read(in directory.File, rules rule.Options) {
	is := decode.Options{Rules: rules, Large: true}.File(in.Origin, in.Data)
	d.docs, d.skipped = slices.Clone(is.Policies), is.Skipped // Clone drops spare capacity
	if len(is.Unreadable) > 0 {
		d.err, d.partly = errors.New(strings.Join(is.Unreadable, "; ")), true
	}
}

// inForce returns the enforced policies of the source by origin. They are used so that files which did not change
// during a restart need not be decoded again.
func (f *Feed) inForce(ctx context.Context) (map[string][]decode.Decoded, error) {
	return loop.Ask(ctx, f.owner.loop, opOther, func() (map[string][]decode.Decoded, error) {
		out := make(map[string][]decode.Decoded)
		for _, p := range f.owner.policies.all {
			if p.Source == f.name && p.Broken == "" && p.Exceeds == "" && len(p.Dropped) == 0 {
				out[p.Origin] = append(out[p.Origin], decode.Decoded{Object: p.read, Text: p.Manifest})
			}
		}
		return out, nil
	})
}

// takeOver applies a listing of a source.
func (o *Owner) takeOver(ctx context.Context, l *listing) error {
	release, err := o.revising.Hold(ctx)
	if err != nil {
		return err
	}
	defer release()
	_, err = o.reviseHeld(ctx, opFiles, func() (edit, error) {
		(&comparison{o.sources, o.policies, o.places, o.forms}).compare(l)
		e := l.edit()
		e.levels = l.complete() && o.listedWith(l.source)
		return e, nil
	}, func(*edit) {
		o.sources.took(l, o.policies.originsOf(l.source))
		l.after, l.before = l.enforced(o.policies), nil
	})
	if err != nil && ctx.Err() == nil {
		return errors.Join(err, o.closeChanged(ctx, l, err))
	}
	return err
}
