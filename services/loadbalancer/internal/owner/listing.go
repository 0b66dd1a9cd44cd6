// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// listing is the files of a source, and the result of checking them.
type listing struct {
	source  string
	order   []string // origins
	files   map[string]*file
	without map[string]string // files that exceed a limit, and why
	partial bool              // a file was never read, and will be soon
	renamed directory.Renamed // the former names of all files that were renamed

	refused map[string]Refused // by origin
}

// file is a file of a listing.
type file struct {
	sum  [sha256.Size]byte
	docs []manifest.Object
	bad  []manifest.Unreadable
	err  error
	keep bool // the file's accepted objects stay
	// gone is set, together with keep, if the file was renamed or removed. Its objects stay, because an unreadable
	// file may contain them now.
	gone bool
}

// unnamed reports whether a document of the file does not identify its object.
func (f *file) unnamed() bool {
	return slices.ContainsFunc(f.bad, func(b manifest.Unreadable) bool { return b.Key.Name.Name == "" })
}

// stays reports whether the file's accepted objects stay, whatever its content.
func (f *file) stays() bool { return f.keep || f.err != nil }

// compare computes the changes of a listing.
func (l *listing) compare(ix *index, s *sources) *edit {
	e := &edit{completes: true, redelivered: true}
	l.refused = make(map[string]Refused)
	refuse := func(origin string, k service.ObjectKey, format string, args ...any) {
		l.refused[origin] = Refused{Key: k, Source: l.source, Origin: origin, Err: fmt.Sprintf(format, args...)}
	}
	stays := func(origin string) bool {
		f := l.files[origin]
		_, bad := l.refused[origin]
		return bad || f != nil && f.stays()
	}
	// there reports whether an object that stays may still be in its file.
	there := func(origin string) bool {
		f := l.files[origin]
		return stays(origin) && (f == nil || !f.gone)
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
	// A file keeps the objects that it has. The same object in a second file is left out.
	taken := make(map[service.ObjectKey]string)
	leftOut := make(map[service.ObjectKey]map[string]bool) // by origin
	shadow := func(origin string, s *service.Service, why string) {
		y := newShadow(s, &managed.By{Source: l.source, Origin: origin}, origin, why)
		if y == nil || taken[y.key()] != "" {
			return
		}
		taken[y.key()] = origin
		if x := ix.object(y.key()); x == nil || !x.same(y) {
			e.puts = append(e.puts, y)
		}
	}
	wrong := make(map[string][]string) // why objects are left out, by origin
	for _, origin := range l.order {
		if stays(origin) {
			continue
		}
		for _, d := range l.files[origin].docs {
			x, why := ix.object(d.Key), ""
			switch other, ok := taken[d.Key]; {
			case ok:
				why = fmt.Sprintf("%s is already in %s", d.Key, other)
			case x == nil:
			case x.by.Source != l.source && s.delivers(x.by.Source):
				why = fmt.Sprintf("%s belongs to the source %s", d.Key, x.by.Source)
			case x.by.Source == l.source && x.by.Origin != origin && (has[d.Key][x.by.Origin] || there(x.by.Origin)):
				why = fmt.Sprintf("%s is already in %s", d.Key, x.by.Origin)
			}
			if why == "" {
				taken[d.Key] = origin
				continue
			}
			if leftOut[d.Key] == nil {
				leftOut[d.Key] = make(map[string]bool, 1)
			}
			leftOut[d.Key][origin] = true
			shadow(origin, d.Service, why)
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
			x := ix.object(b.Key)
			var y *object
			if b.Key.Kind == service.KindService {
				y = closedOf(b, x, &managed.By{Source: l.source, Origin: origin})
			}
			switch _, ok := taken[b.Key]; {
			case b.Key.Name.Name == "":
				unnamed[origin] = true
			case ok, x != nil && (x.by.Source != l.source && s.delivers(x.by.Source) ||
				x.by.Source == l.source && x.by.Origin != origin && there(x.by.Origin)):
				shadow(origin, b.Service, "another source, file or document has "+b.Key.String())
			case y != nil:
				taken[b.Key] = origin
				if x == nil || !x.same(y) {
					e.puts = append(e.puts, y)
				}
			case x != nil && x.by.Source != l.source:
				e.gone = append(e.gone, b.Key) // the source of the object no longer delivers it
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
			if leftOut[docs[i].Key][origin] {
				continue
			}
			y := newObject(&docs[i], by)
			x := ix.object(y.key())
			if x != nil && x.same(y) {
				docs[i].Service, docs[i].Slice = x.service, x.slice // keep only one copy in memory
				continue
			}
			e.puts = append(e.puts, y)
		}
	}
	ix.objects(func(x *object) {
		if x.by.Source == l.source && taken[x.key()] == "" && !stays(x.by.Origin) &&
			(!unnamed[x.by.Origin] || l.files[x.by.Origin].named(x.key())) {
			e.gone = append(e.gone, x.key())
		}
	})
	for origin, all := range wrong {
		refuse(origin, service.ObjectKey{}, "%s", strings.Join(all, "; "))
	}
	slices.SortFunc(e.gone, service.ObjectKey.Compare)
	e.gone = slices.Compact(e.gone)
	if !s.listed(l.source) && !l.partial {
		e.listed = []string{l.source}
	}
	return e
}

// distinct leaves out every object of a file whose key an earlier object of the file has.
func (f *file) distinct() {
	first := make(map[service.ObjectKey]int, len(f.docs))
	f.docs = slices.DeleteFunc(f.docs, func(d manifest.Object) bool {
		n, again := first[d.Key]
		if again {
			why := fmt.Sprintf("document %d: %s is already in document %d", d.Document+1, d.Key, n+1)
			f.bad = append(f.bad, manifest.Unreadable{Key: d.Key, Service: d.Service, Why: why})
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

// closedOf returns the Service that takes the place of an unreadable one: its addresses refuse connections. If none
// of its addresses is readable, closedOf takes the addresses of the last readable version. It returns nil if there is
// no address and no port.
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
