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
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/source"
)

// Feed is a source that lists everything it has, again and again.
type Feed struct {
	owner   *Owner
	name    string
	decoded map[string]*file // by origin
}

type file struct {
	sum  [sha256.Size]byte
	docs []decode.Decoded
	err  error
	keep bool // it was not read, and its policies stay
	// partly says that err is about some of its documents, and docs are the others.
	partly  bool
	skipped []string // documents that are no policies
}

// Feed returns the feed of a source that New was told of. It belongs to one
// goroutine.
func (o *Owner) Feed(name string) *Feed {
	return &Feed{owner: o, name: name, decoded: make(map[string]*file)}
}

// Held is how many policies of the source there are.
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

// Set says that these are all files of the source. A document that cannot be
// applied isolates what it selects, or its namespace. While not even the namespace of a
// document can be read, the policies of its file stay that no other document of it has.
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
	for _, in := range files {
		if in.Same {
			old := f.decoded[in.Origin]
			if old == nil || old.keep {
				return fmt.Errorf("%s %s: it is listed as the same, and the listing before did not have what it says", f.name, in.Origin)
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
	slices.Sort(order)
	f.decoded = current
	return f.owner.takeOver(ctx, &listing{source: f.name, order: order, files: current})
}

// read understands the documents of a file.
func (d *file) read(in directory.File, rules rule.Options) {
	is := decode.Options{Rules: rules, Large: true}.File(in.Origin, in.Data)
	d.docs, d.skipped = is.Policies, is.Skipped
	if len(is.Unreadable) > 0 {
		d.err, d.partly = errors.New(strings.Join(is.Unreadable, "; ")), true
	}
}

// inForce are the policies of the source by origin: after a restart most files
// are what they were, and need not be understood once more.
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

// listing is what a source has, and what has to be done for the policies to be
// those of its files.
type listing struct {
	source string
	order  []string // origins
	files  map[string]*file
	// Of a source that says what changes: the files are those that did, the others
	// stay but for the removed ones. With listed, which are the origins of all that
	// there is, the source is complete.
	deltas  bool
	removed map[string]policy.Key
	listed  map[string]struct{}

	fresh []puts // of the files that are taken over
	gone  []policy.Key
	// unfolded and spaces are as in an edit.
	unfolded, spaces []policy.Key
	bad              map[string]refused
	// partly are the files of which the documents that can be read are in force, and
	// others cannot be read.
	partly map[string]bool
}

// puts are the policies of a file that are new, or another than before.
type puts struct {
	origin   string
	policies []*Policy
}

// takeOver makes the policies of a source those of its files.
func (o *Owner) takeOver(ctx context.Context, l *listing) error {
	release, err := o.revising.Hold(ctx)
	if err != nil {
		return err
	}
	defer release()
	_, err = o.reviseHeld(ctx, opFiles, func() (edit, error) {
		o.compare(l)
		e := l.edit()
		e.levels = l.complete() && o.listedWith(l.source)
		return e, nil
	}, func(*edit) { o.sources.took(l, o.policies.originsOf(l.source)) })
	if err != nil && ctx.Err() == nil {
		return errors.Join(err, o.closeChanged(ctx, l, err))
	}
	return err
}

// edit is the change that the listing comes to.
func (l *listing) edit() edit {
	e := edit{gone: l.gone, unfolded: l.unfolded, spaces: l.spaces}
	for _, f := range l.fresh {
		e.puts = append(e.puts, f.policies...)
	}
	return e
}

// compare finds out what the listing changes.
func (o *Owner) compare(l *listing) {
	l.bad = make(map[string]refused)
	l.fresh, l.gone, l.unfolded, l.spaces = nil, nil, nil, nil
	from := source.Of(l.source)
	if l.deltas {
		for origin, r := range o.sources.all[l.source].refused {
			if l.files[origin] == nil && !l.without(origin) {
				l.bad[origin] = r
			}
		}
	}
	keys := make(map[string]map[policy.Key]bool) // of files that were asked about
	has := func(origin string, k policy.Key) bool {
		f := l.files[origin]
		if f == nil {
			return false
		}
		if keys[origin] == nil {
			keys[origin] = make(map[policy.Key]bool, len(f.docs))
			for _, d := range f.docs {
				keys[origin][d.Object.Key] = true
			}
		}
		return keys[origin][k]
	}
	l.partly = make(map[string]bool)
	for _, origin := range l.order {
		if f := l.files[origin]; f.err != nil {
			l.bad[origin] = refused{err: f.err.Error()}
			l.partly[origin] = f.partly && !f.keep
		}
	}
	// Who has a policy keeps it; a second object with it is refused, and a second
	// document of a file isolates what it selects.
	taken := make(map[policy.Key]string)
	stays := func(origin string) bool {
		f := l.files[origin]
		return f != nil && (f.err != nil && !l.partly[origin] || f.keep)
	}
	docs := make(map[string][]decode.Decoded, len(l.order))
	for _, origin := range l.order {
		if stays(origin) {
			continue
		}
		of := l.files[origin].docs
		for i, d := range of {
			why := o.conflict(l, origin, d.Object.Key, taken, func(of string) bool { return has(of, d.Object.Key) || stays(of) })
			if why == "" {
				continue
			}
			if !from.Files {
				l.bad[origin] = refused{key: d.Object.Key, err: why}
				break
			}
			if &of[0] == &l.files[origin].docs[0] {
				of = slices.Clone(of) // what the file says may be in force in the next listing
			}
			of[i] = decode.Options{Rules: o.config.Rules}.Shadowed(origin, d, why)
		}
		if _, ok := l.bad[origin]; ok && !l.partly[origin] {
			continue
		}
		docs[origin] = of
		for _, d := range of {
			taken[d.Object.Key] = origin
		}
	}
	for _, origin := range l.order {
		f := puts{origin: origin}
		for i, d := range docs[origin] {
			p := o.policies.all[d.Object.Key]
			switch {
			case p == nil || p.Source != l.source || p.Origin != origin || !o.places.says(p, d):
				f.policies = append(f.policies, o.forms.policy(d, l.source, origin))
			case p.Exceeds == "":
				d.Object, d.Text = p.read, p.Manifest // kept once
				docs[origin][i] = d
			}
		}
		if len(f.policies) > 0 {
			l.fresh = append(l.fresh, f)
		}
	}
	look := func(k policy.Key, p *Policy) {
		if k.Kind == policy.KindNamespaceIsolation {
			if from.Folds {
				l.spaces = append(l.spaces, k)
			}
			return
		}
		if _, ok := o.places.folded[k]; ok && from.Folds && l.without(k.String()) {
			l.unfolded = append(l.unfolded, k)
		}
		if p == nil || p.Source != l.source || taken[k] != "" {
			return
		}
		if _, ok := l.bad[p.Origin]; !ok && !stays(p.Origin) && l.without(p.Origin) {
			l.gone = append(l.gone, k)
		}
	}
	if l.deltas && l.listed == nil {
		for _, k := range l.removed {
			look(k, o.policies.all[k])
		}
	} else {
		for k, p := range o.policies.all {
			look(k, p)
		}
		for k := range o.places.folded {
			look(k, nil)
		}
	}
	slices.SortFunc(l.gone, policy.Key.Compare)
}

// conflict is why a policy of a file or object cannot be in force: another source or
// origin has it. There says that what an origin had is still there.
func (o *Owner) conflict(
	l *listing, origin string, k policy.Key, taken map[policy.Key]string, there func(origin string) bool,
) string {
	p := o.policies.all[k]
	switch other, ok := taken[k]; {
	case ok && other != origin:
		return fmt.Sprintf("%s is in %s already", k, other)
	case p != nil && p.Source != l.source && o.sources.configured(p.Source):
		return fmt.Sprintf("%s belongs to the source %s", k, p.Source)
	case p != nil && p.Origin != origin && there(p.Origin):
		return fmt.Sprintf("%s is in %s already", k, p.Origin)
	}
	return ""
}

// without says whether the source has nothing of an origin any more that the
// files do not have.
func (l *listing) without(origin string) bool {
	_, removed := l.removed[origin]
	_, listed := l.listed[origin]
	return !l.deltas || removed || l.listed != nil && !listed
}

// complete reports whether the listing completes the source.
func (l *listing) complete() bool { return !l.deltas || l.listed != nil }
