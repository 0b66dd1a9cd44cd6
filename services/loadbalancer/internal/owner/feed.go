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

// Feed is a source that lists all its files, again and again. It belongs to one
// goroutine.
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
	keep bool // what was in force of it stays
}

// stays reports whether what was in force of a file stays, whatever it says.
func (f *file) stays() bool { return f.keep || f.err != nil }

// Feed returns the feed of a source that New was told of.
func (o *Owner) Feed(name string) *Feed {
	return &Feed{owner: o, name: name, decoded: make(map[string]*file)}
}

// Held is how many objects of the source are in force.
func (f *Feed) Held(ctx context.Context) (held int, err error) {
	err = f.owner.loop.Do(ctx, opRead, func() {
		f.owner.objects(func(x *object) {
			if x.by.Source == f.name {
				held++
			}
		})
	})
	return held, err
}

// Set says that these are all files of the source. Objects of files that are not listed any
// more are deleted. An object that cannot be read is left out by itself: a Service refuses
// connections, and a slice is not used. Objects that a file had stay while it has a document
// that does not say which object it is. A file without room, and one that cannot be read,
// keep what was in force of them.
func (f *Feed) Set(ctx context.Context, files []directory.File) error {
	current := make(map[string]*file, len(files))
	l := &listing{source: f.name, files: current, without: make(map[string]string)}
	for _, in := range files {
		old := f.decoded[in.Origin]
		d := &file{sum: sha256.Sum256(in.Data), err: in.Err, keep: in.Keep}
		switch {
		case in.Same && old == nil:
			return fmt.Errorf("%s %s: it is listed as the same, and the listing before did not have it", f.name, in.Origin)
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

// listing is what a source has, and what was found out about it.
type listing struct {
	source  string
	order   []string // origins
	files   map[string]*file
	without map[string]string // files that have no room, and why
	partial bool              // a file was never read, and will be soon

	refused map[string]Refused // by origin
}

// maxTries is how many files of a listing without room are tried one by one.
const maxTries = 1000

// takeOver makes the objects of a source those of its files.
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

// fit finds the files of a listing without room that have some: those of which
// nothing changes stay, and the others are tried one after the other.
func (o *Owner) fit(ctx context.Context, l *listing) error {
	// Without any of them, so that what is gone makes room first.
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
			l.without[origin] = fmt.Sprintf("%v: not tried, after %d other files", failure.ErrLimit, maxTries)
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

// compare finds out what a listing changes.
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
	has := make(map[service.ObjectKey]map[string]bool) // files that have an object
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
	wrong := make(map[string][]string)                      // what is left out, by origin
	for _, origin := range l.order {
		if stays(origin) {
			continue
		}
		for _, d := range l.files[origin].docs {
			x, why := o.object(d.Key), ""
			switch other, ok := taken[d.Key]; {
			case ok:
				why = fmt.Sprintf("%s is in %s already", d.Key, other)
			case x == nil:
			case x.by.Source != l.source && (x.by.Source == managed.SourceGRPC || o.sources[x.by.Source] != nil):
				why = fmt.Sprintf("%s belongs to the source %s", d.Key, x.by.Source)
			case x.by.Source == l.source && x.by.Origin != origin && (has[d.Key][x.by.Origin] || stays(x.by.Origin)):
				why = fmt.Sprintf("%s is in %s already", d.Key, x.by.Origin)
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
	unnamed := make(map[string]bool) // files with documents that do not say which object they are
	for _, origin := range l.order {
		if stays(origin) {
			continue
		}
		for i := range l.files[origin].bad {
			b := &l.files[origin].bad[i]
			wrong[origin] = append(wrong[origin], b.Why)
			x := o.object(b.Key)
			switch _, ok := taken[b.Key]; {
			case b.Key.Name.Name == "":
				unnamed[origin] = true
			case ok, x != nil && (x.by.Source != l.source || x.by.Origin != origin && stays(x.by.Origin)):
				// another has it
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
			x := o.object(y.key())
			if x != nil && x.same(y) {
				docs[i].Service, docs[i].Slice = x.service, x.slice // kept once
				continue
			}
			e.puts = append(e.puts, y)
		}
	}
	o.objects(func(x *object) {
		if x.by.Source == l.source && taken[x.key()] == "" && !stays(x.by.Origin) &&
			(!unnamed[x.by.Origin] || l.files[x.by.Origin].named(x.key())) {
			e.gone = append(e.gone, x.key())
		}
	})
	for origin, all := range wrong {
		refuse(origin, service.ObjectKey{}, "%s", strings.Join(all, "; "))
	}
	slices.SortFunc(e.gone, service.ObjectKey.Compare)
	if !o.sources[l.source].listed && !l.partial {
		e.listed = []string{l.source}
	}
	return e
}

// distinct leaves out all but the first of the objects of a file that have the same name.
func (f *file) distinct() {
	first := make(map[service.ObjectKey]int, len(f.docs))
	f.docs = slices.DeleteFunc(f.docs, func(d manifest.Object) bool {
		n, again := first[d.Key]
		if again {
			why := fmt.Sprintf("document %d: %s is in document %d already", d.Document+1, d.Key, n+1)
			f.bad = append(f.bad, manifest.Unreadable{Key: d.Key, Why: why})
		} else {
			first[d.Key] = d.Document
		}
		return again
	})
}

// named reports whether a document of a file that cannot be read is of an object.
func (f *file) named(k service.ObjectKey) bool {
	return f != nil && slices.ContainsFunc(f.bad, func(b manifest.Unreadable) bool { return b.Key == k })
}

// closedOf returns a Service of a file that cannot be read: its addresses, or those of its
// last form if it has none that can be read, refuse connections. nil: there are none.
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
	if len(s.Ports) == 0 { // an address refuses connections if a frontend has it
		s.Ports = []service.Port{{Protocol: service.TCP, Port: 1}}
		if last != nil && last.service != nil && len(last.service.Ports) > 0 {
			s.Ports = last.service.Clone().Ports
		}
	}
	return &object{by: by, remarks: newRemarks([]string{b.Why + ": connections are refused"}, nil), service: s}
}

// took notes what became of a listing that is taken over.
func (o *Owner) took(l *listing) {
	src := o.sources[l.source]
	for origin := range src.refused {
		if _, ok := l.refused[origin]; !ok {
			delete(src.refused, origin)
		}
	}
	for _, r := range l.refused {
		o.noteRefused(r)
	}
	if src.err = ""; !l.partial {
		o.synced(src)
	}
}
