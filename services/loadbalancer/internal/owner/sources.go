// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"cmp"
	"log/slog"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/source"
)

// Refused is a file or object whose last version is not applied.
type Refused struct {
	Key    service.ObjectKey // zero: a file as a whole
	Source string
	Origin string
	Err    string
}

// compareRefused orders by source, object and origin.
func compareRefused(a, b Refused) int {
	return cmp.Or(cmp.Compare(a.Source, b.Source), a.Key.Compare(b.Key), cmp.Compare(a.Origin, b.Origin))
}

// sourceState is the state of a configured source.
type sourceState struct {
	synced  bool
	listed  bool // listed in this state, in this run or an earlier one
	err     string
	refused map[string]Refused // by origin
}

// sources records which sources were listed completely, why they cannot be read, and what they refused. It belongs to
// the loop.
type sources struct {
	log      *slog.Logger
	all      map[string]*sourceState // configured sources
	managers map[string]bool         // managers of managed.SourceGRPC that completed in this run
	ready    bool
	readied  chan struct{} // closed once ready
}

func newSources(names []string, log *slog.Logger) *sources {
	s := &sources{
		log: log, all: make(map[string]*sourceState, len(names)), managers: make(map[string]bool),
		readied: make(chan struct{}),
	}
	for _, name := range names {
		s.all[name] = &sourceState{refused: make(map[string]Refused)}
	}
	return s
}

// restore records the sources that an earlier run listed completely.
func (s *sources) restore(listed []string) {
	for _, name := range listed {
		if src := s.all[name]; src != nil {
			src.listed = true
		}
	}
}

// configured reports whether a source is configured.
func (s *sources) configured(name string) bool { return s.all[name] != nil }

// delivers reports whether the objects of a source may still change: by calls, or because the source is configured.
func (s *sources) delivers(name string) bool { return source.Of(name).Calls || s.configured(name) }

// deliverZone reports whether a configured source delivers the zone of the node.
func (s *sources) deliverZone() bool {
	for name := range s.all {
		if source.Of(name).Zone {
			return true
		}
	}
	return false
}

// listed reports whether a source was listed completely in this state.
func (s *sources) listed(name string) bool { return s.all[name].listed }

// complete reports whether every source was listed completely in this state.
func (s *sources) complete() bool {
	for _, src := range s.all {
		if !src.listed {
			return false
		}
	}
	return true
}

// checkReady closes readied once every source was listed.
func (s *sources) checkReady() {
	if s.ready || !s.complete() {
		return
	}
	s.ready = true
	close(s.readied)
}

// synced records that a source was listed completely, and reports whether this is the first time in this state.
func (s *sources) synced(name string) (first bool) {
	src := s.all[name]
	first = !src.listed
	src.synced, src.listed, src.err = true, true, ""
	return first
}

// managerSynced records that a manager has now sent all its objects.
func (s *sources) managerSynced(manager string) { s.managers[manager] = true }

// failed records why a source cannot be read; nil clears it.
func (s *sources) failed(name string, why error) {
	src := s.all[name]
	src.err = ""
	if why != nil {
		src.err = why.Error()
	}
}

// refuse records that an object or file is refused, and logs a new refusal. A source that is no longer configured has
// no refusals.
func (s *sources) refuse(r Refused) {
	src := s.all[r.Source]
	if src == nil {
		return
	}
	if before, ok := src.refused[r.Origin]; !ok || before != r {
		s.log.Warn("object or file refused", "source", r.Source, "origin", r.Origin, "reason", r.Err)
	}
	src.refused[r.Origin] = r
}

// accept clears the refusal of an object or file.
func (s *sources) accept(name, origin string) {
	if src := s.all[name]; src != nil {
		delete(src.refused, origin)
	}
}

// acceptUnless clears the refusals of a source for which refused is false.
func (s *sources) acceptUnless(name string, refused func(Refused) bool) {
	maps.DeleteFunc(s.all[name].refused, func(_ string, r Refused) bool { return !refused(r) })
}

// refusals returns what is refused in a namespace, sorted; without a namespace, everything.
func (s *sources) refusals(namespace string) (out []Refused) {
	for _, src := range s.all {
		for _, r := range src.refused {
			if namespace == "" || r.Key.Namespace == namespace {
				out = append(out, r)
			}
		}
	}
	slices.SortFunc(out, compareRefused)
	return out
}

// SourceStatus is the state of a source, or of a manager.
type SourceStatus struct {
	Name, Manager string
	Synced        bool
	Error         string
	Objects       int
}

// creator identifies who created objects.
type creator struct{ source, manager string }

// status returns the states of the managers that have objects or have completed, and of the configured sources.
// objects contains the number of objects of each.
func (s *sources) status(objects map[creator]int) (out []SourceStatus) {
	managers := map[string]struct{}{"": {}}
	for m := range s.managers {
		managers[m] = struct{}{}
	}
	for c := range objects {
		if source.Of(c.source).Calls {
			managers[c.manager] = struct{}{}
		}
	}
	for _, m := range slices.Sorted(maps.Keys(managers)) {
		out = append(out, SourceStatus{
			Name: managed.SourceGRPC, Manager: m, Synced: m == "" || s.managers[m],
			Objects: objects[creator{managed.SourceGRPC, m}],
		})
	}
	for _, name := range slices.Sorted(maps.Keys(s.all)) {
		src := s.all[name]
		out = append(out, SourceStatus{Name: name, Synced: src.synced, Error: src.err, Objects: objects[creator{name, ""}]})
	}
	return out
}
