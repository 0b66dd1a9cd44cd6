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
	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// Feed is a source that repeatedly lists all its files. It belongs to one goroutine.
type Feed struct {
	owner   *Owner
	name    string
	decoded map[string]*file // by origin
}

type file struct {
	sum  [sha256.Size]byte
	docs []manifest.Object
	bad  []manifest.Unreadable
	err  error
	keep bool // the file's accepted objects stay
}

// stays reports whether the file's accepted objects stay, whatever its content.
func (f *file) stays() bool { return f.keep || f.err != nil }

// Feed returns the feed of a source that New was given.
func (o *Owner) Feed(name string) *Feed {
	return &Feed{owner: o, name: name, decoded: make(map[string]*file)}
}

// Held returns how many objects of the source are applied.
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

// Set replaces the files of the source. Objects of files that are no longer listed are deleted. An
// unreadable object is left out individually: a Service refuses connections, and a slice is not
// used. A file's objects stay while one of its documents does not identify its object. Objects also
// stay of files that exceed a limit, and of unreadable files.
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
	slices.Sort(l.order)
	if err := f.owner.takeOver(ctx, l); err != nil {
		return err
	}
	f.decoded = current
	return nil
}

// listing is the files of a source, and the result of checking them.
type listing struct {
	source  string
	order   []string // origins
	files   map[string]*file
	without map[string]string // files that exceed a limit, and why
	partial bool              // a file was never read, and will be soon

	refused map[string]Refused // by origin
}

// maxTries bounds the files that are tried one by one when a listing exceeds a limit.
const maxTries = 1000

// takeOver applies the files of a source.
func (o *Owner) takeOver(ctx context.Context, l *listing) error {
	release, err := o.revising.Hold(ctx)
	if err != nil {
		return err
	}
	defer release()
	_, err = o.reviseHeld(ctx, func() (*edit, error) { return o.compare(l), nil }, func(*edit) { o.took(l) })
	if !errors.Is(err, failure.ErrLimit) {
		return err
	}
	if err := o.fit(ctx, l); err != nil {
		return err
	}
	_, err = o.reviseHeld(ctx, func() (*edit, error) { return o.compare(l), nil }, func(*edit) { o.took(l) })
	return err
}

// fit finds which files of a listing fit when the whole listing exceeds a limit: unchanged files
// stay, and the others are tried one after the other.
func (o *Owner) fit(ctx context.Context, l *listing) error {
	// Start without the changed files, so that deletions free space first.
	all := l.files
	trial := func(origin string) *listing {
		some := &listing{
			source: l.source, files: make(map[string]*file, len(all)), without: l.without, order: l.order,
			partial: true,
		}
		for name, f := range all {
			if _, bad := l.without[name]; bad || name > origin && !f.stays() {
				f = &file{keep: true}
			}
			some.files[name] = f
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
		some := trial(origin)
		_, err := o.reviseHeld(ctx, func() (*edit, error) { return o.compare(some), nil }, func(*edit) {})
		switch {
		case errors.Is(err, failure.ErrLimit):
			l.without[origin] = err.Error()
		case err != nil:
			return err
		}
	}
	return nil
}

// compare computes the changes of a listing.
func (o *Owner) compare(l *listing) *edit {
	e := &edit{completes: true}
	l.refused = make(map[string]Refused)
	refuse := func(origin string, k service.ObjectKey, format string, args ...any) {
		l.refused[origin] = Refused{Key: k, Source: l.source, Origin: origin, Err: fmt.Sprintf(format, args...)}
	}
	stays := func(origin string) bool {
		f := l.files[origin]
		_, bad := l.refused[origin]
		return bad || f != nil && f.stays()
	}
	has := make(map[service.ObjectKey]map[string]bool) // the files that contain an object
	for _, origin := range l.order {
		f := l.files[origin]
		if f.err != nil {
			refuse(origin, service.ObjectKey{}, "%v", f.err)
		} else if why, ok := l.without[origin]; ok {
			refuse(origin, service.ObjectKey{}, "%s", why)
		}
		for _, d := range f.docs {
			if has[d.Key] == nil {
				has[d.Key] = make(map[string]bool, 1)
			}
			has[d.Key][origin] = true
		}
	}
	// A file that has an object keeps it; the object of a second file is left out.
	taken := make(map[service.ObjectKey]string)
	shadowed := make(map[service.ObjectKey]map[string]bool) // by origin
	wrong := make(map[string][]string)                      // why objects are left out, by origin
	for _, origin := range l.order {
		if stays(origin) {
			continue
		}
		for _, d := range l.files[origin].docs {
			x, why := o.index.object(d.Key), ""
			switch other, ok := taken[d.Key]; {
			case ok:
				why = fmt.Sprintf("%s is already in %s", d.Key, other)
			case x == nil:
			case x.by.Source != l.source && o.sources.delivers(x.by.Source):
				why = fmt.Sprintf("%s belongs to the source %s", d.Key, x.by.Source)
			case x.by.Source == l.source && x.by.Origin != origin && (has[d.Key][x.by.Origin] || stays(x.by.Origin)):
				why = fmt.Sprintf("%s is already in %s", d.Key, x.by.Origin)
			}
			if why == "" {
				taken[d.Key] = origin
				continue
			}
			if shadowed[d.Key] == nil {
				shadowed[d.Key] = make(map[string]bool, 1)
			}
			shadowed[d.Key][origin] = true
			wrong[origin] = append(wrong[origin], fmt.Sprintf("document %d: %s", d.Document+1, why))
		}
	}
	unnamed := make(map[string]bool) // files with documents that do not identify their object
	for _, origin := range l.order {
		if stays(origin) {
			continue
		}
		for i := range l.files[origin].bad {
			b := &l.files[origin].bad[i]
			wrong[origin] = append(wrong[origin], b.Why)
			x := o.index.object(b.Key)
			switch _, ok := taken[b.Key]; {
			case b.Key.Name.Name == "":
				unnamed[origin] = true
			case ok, x != nil && (x.by.Source != l.source || x.by.Origin != origin && stays(x.by.Origin)):
				// another source or file has it
			case b.Key.Kind == service.KindService:
				if y := closedOf(b, x, &managed.By{Source: l.source, Origin: origin}); y != nil {
					taken[b.Key] = origin
					if x == nil || !x.same(y) {
						e.puts = append(e.puts, y)
					}
				}
			}
		}
	}
	for _, origin := range l.order {
		if stays(origin) {
			continue
		}
		docs := l.files[origin].docs
		by := &managed.By{Source: l.source, Origin: origin}
		for i := range docs {
			if shadowed[docs[i].Key][origin] {
				continue
			}
			y := newObject(&docs[i], by)
			x := o.index.object(y.key())
			if x != nil && x.same(y) {
				docs[i].Service, docs[i].Slice = x.service, x.slice // keep one copy
				continue
			}
			e.puts = append(e.puts, y)
		}
	}
	o.index.objects(func(x *object) {
		if x.by.Source == l.source && taken[x.key()] == "" && !stays(x.by.Origin) &&
			(!unnamed[x.by.Origin] || l.files[x.by.Origin].named(x.key())) {
			e.gone = append(e.gone, x.key())
		}
	})
	for origin, all := range wrong {
		refuse(origin, service.ObjectKey{}, "%s", strings.Join(all, "; "))
	}
	slices.SortFunc(e.gone, service.ObjectKey.Compare)
	if !o.sources.listed(l.source) && !l.partial {
		e.listed = []string{l.source}
	}
	return e
}

// distinct leaves out all but the first of a file's objects with equal names.
func (f *file) distinct() {
	first := make(map[service.ObjectKey]int, len(f.docs))
	f.docs = slices.DeleteFunc(f.docs, func(d manifest.Object) bool {
		n, again := first[d.Key]
		if again {
			why := fmt.Sprintf("document %d: %s is already in document %d", d.Document+1, d.Key, n+1)
			f.bad = append(f.bad, manifest.Unreadable{Key: d.Key, Why: why})
		} else {
			first[d.Key] = d.Document
		}
		return again
	})
}

// named reports whether an unreadable document of the file belongs to an object.
func (f *file) named(k service.ObjectKey) bool {
	return f != nil && slices.ContainsFunc(f.bad, func(b manifest.Unreadable) bool { return b.Key == k })
}

// closedOf returns the Service that takes the place of an unreadable one: its addresses refuse
// connections. If none of its addresses is readable, it has the addresses of the last readable
// version. nil if there is no address and no port.
func closedOf(b *manifest.Unreadable, last *object, by *managed.By) *object {
	s := b.Service
	if last != nil && last.service != nil && (s == nil || len(s.ClusterIPs) == 0 && s.HasFrontends()) {
		s = last.service
	}
	if s == nil || !s.HasFrontends() || len(s.ClusterIPs)+len(s.Ports) == 0 {
		return nil
	}
	s = s.Clone()
	s.Closed, s.HealthCheckNodePort = true, 0
	if len(s.Ports) == 0 { // an address refuses connections only if it has a frontend
		s.Ports = []service.Port{{Protocol: service.TCP, Port: 1}}
		if last != nil && last.service != nil && len(last.service.Ports) > 0 {
			s.Ports = last.service.Clone().Ports
		}
	}
	return &object{by: by, remarks: newRemarks([]string{b.Why + ": connections are refused"}, nil), service: s}
}

// took records the result of a listing that was applied.
func (o *Owner) took(l *listing) {
	o.sources.acceptUnless(l.source, func(r Refused) bool { _, ok := l.refused[r.Origin]; return ok })
	for _, r := range l.refused {
		o.sources.refuse(r)
	}
	o.sources.failed(l.source, nil)
	if !l.partial {
		o.synced(l.source)
	}
}
