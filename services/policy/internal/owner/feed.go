// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/reading"
)

// Feed is a source that lists everything it has, again and again.
type Feed struct {
	owner   *Owner
	name    string
	decoded map[string]*file // by origin
}

type file struct {
	sum  [sha256.Size]byte
	docs []reading.Decoded
	err  error
	keep bool // it was not read, and its policies stay
}

// Feed returns the feed of a source that New was told of. It belongs to one
// goroutine.
func (o *Owner) Feed(name string) *Feed {
	return &Feed{owner: o, name: name, decoded: make(map[string]*file)}
}

// File is one file or object of a source.
type File struct {
	Origin string
	Data   []byte
	Err    error // it cannot be read
	// Keep says that it was not read, because it is being changed: its policies
	// stay. Err, if set, is told besides.
	Keep bool
	// Same says that it was not read, because it is what the listing before had,
	// with Data: it is neither hashed nor decoded again.
	Same bool
}

// Held is how many policies of the source there are.
func (f *Feed) Held(ctx context.Context) (int, error) {
	return ask(ctx, f.owner, func() (int, error) {
		held := 0
		for _, p := range f.owner.policies {
			if p.Source == f.name {
				held++
			}
		}
		return held, nil
	})
}

// Set says that these are all files of the source. A file is taken over whole
// or not at all; the policies of one that is refused stay as they were.
func (f *Feed) Set(ctx context.Context, files []File) error {
	var known map[string][]reading.Decoded
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
		} else if docs := reading.Same(in.Data, known[in.Origin]); in.Err == nil && docs != nil {
			d.docs = docs
		} else if in.Err == nil {
			if d.docs, d.err = (reading.Options{Rules: f.owner.config.Rules, Large: true}).Decode(in.Data); errors.Is(d.err, reading.ErrEmpty) {
				d.err = nil
			}
		}
		current[in.Origin] = d
		order = append(order, in.Origin)
	}
	slices.Sort(order)
	f.decoded = current
	return f.owner.takeOver(ctx, &listing{source: f.name, order: order, files: current})
}

// inForce are the policies of the source by origin: after a restart most files
// are what they were, and need not be understood once more.
func (f *Feed) inForce(ctx context.Context) (map[string][]reading.Decoded, error) {
	return ask(ctx, f.owner, func() (map[string][]reading.Decoded, error) {
		out := make(map[string][]reading.Decoded)
		for _, p := range f.owner.policies {
			if p.Source == f.name && p.Broken == "" && p.Exceeds == "" && len(p.Dropped) == 0 {
				out[p.Origin] = append(out[p.Origin], reading.Decoded{Object: p.object, Text: p.Manifest})
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
	bad   map[string]refused
}

// puts are the policies of a file that are new, or another than before.
type puts struct {
	origin   string
	policies []*Policy
}

// takeOver makes the policies of a source those of its files.
func (o *Owner) takeOver(ctx context.Context, l *listing) error {
	release, err := o.hold(ctx)
	if err != nil {
		return err
	}
	defer release()
	_, err = o.reviseHeld(ctx, opFiles, func() (edit, error) {
		o.compare(l)
		e := l.edit()
		e.levels = l.complete() && o.listedWith(l.source)
		return e, nil
	}, func(*edit) { o.took(l) })
	if err != nil && ctx.Err() == nil {
		return errors.Join(err, o.closeChanged(ctx, l, err))
	}
	return err
}

// edit is the change that the listing comes to.
func (l *listing) edit() edit {
	e := edit{gone: l.gone}
	for _, f := range l.fresh {
		e.puts = append(e.puts, f.policies...)
	}
	return e
}

// compare finds out what the listing changes.
func (o *Owner) compare(l *listing) {
	l.bad = make(map[string]refused)
	l.fresh, l.gone = nil, nil
	if l.deltas {
		for origin, r := range o.sources[l.source].refused {
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
	for _, origin := range l.order {
		if err := l.files[origin].err; err != nil {
			l.bad[origin] = refused{err: err.Error()}
		}
	}
	// Who has a policy keeps it; a second file with it is refused.
	taken := make(map[policy.Key]string)
	stays := func(origin string) bool { f := l.files[origin]; return f != nil && (f.err != nil || f.keep) }
	for _, origin := range l.order {
		if stays(origin) {
			continue
		}
		for _, d := range l.files[origin].docs {
			k := d.Object.Key
			why := ""
			if other, ok := taken[k]; ok {
				why = fmt.Sprintf("%s is in %s already", k, other)
			} else if p := o.policies[k]; p != nil && p.Source != l.source && o.sources[p.Source] != nil {
				why = fmt.Sprintf("%s belongs to the source %s", k, p.Source)
			} else if p != nil && p.Origin != origin && (has(p.Origin, k) || stays(p.Origin)) {
				why = fmt.Sprintf("%s is in %s already", k, p.Origin)
			}
			if why != "" {
				l.bad[origin] = refused{key: k, err: why}
				break
			}
		}
		if _, ok := l.bad[origin]; ok {
			continue
		}
		for _, d := range l.files[origin].docs {
			taken[d.Object.Key] = origin
		}
	}
	for _, origin := range l.order {
		if _, ok := l.bad[origin]; ok {
			continue
		}
		f := puts{origin: origin}
		for i, d := range l.files[origin].docs {
			p := o.policies[d.Object.Key]
			switch {
			case p == nil || p.Source != l.source || p.Origin != origin || !o.says(p, d):
				f.policies = append(f.policies, o.policy(d, l.source, origin))
			case p.Exceeds == "":
				l.files[origin].docs[i] = reading.Decoded{Object: p.object, Text: p.Manifest, Created: d.Created, UID: d.UID} // kept once
			}
		}
		if len(f.policies) > 0 {
			l.fresh = append(l.fresh, f)
		}
	}
	look := func(k policy.Key, p *Policy) {
		if p == nil || p.Source != l.source || taken[k] != "" {
			return
		}
		if _, ok := l.bad[p.Origin]; !ok && !stays(p.Origin) && l.without(p.Origin) {
			l.gone = append(l.gone, k)
		}
	}
	if l.deltas && l.listed == nil {
		for _, k := range l.removed {
			look(k, o.policies[k])
		}
	} else {
		for k, p := range o.policies {
			look(k, p)
		}
	}
	slices.SortFunc(l.gone, policy.Key.Compare)
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

// took notes what became of a listing that is taken over.
func (o *Owner) took(l *listing) {
	src := o.sources[l.source]
	for origin, r := range l.bad {
		if before, ok := src.refused[origin]; !ok || before.err != r.err {
			o.config.Log.Warn("policies refused; what was in force of them stays", "source", l.source, "origin", origin, "reason", r.err)
		}
	}
	src.refused = l.bad
	if l.complete() {
		src.synced, src.err = true, ""
		o.stateChanged = true
		if l.source == SourceKubernetes {
			o.problem("note of the first listing", o.gate.Listed())
		}
	}
}
