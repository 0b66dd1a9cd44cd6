// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/desired/problem"
	"github.com/sluice-net/sluice/services/policy/internal/initialsync"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/source"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
	"github.com/sluice-net/sluice/services/policy/internal/summary"
)

// beingWritten is the reason if a file was not read because it is still being written.
const beingWritten = "is being written"

// managerSource returns the source name of a manager.
func managerSource(manager string) string { return managed.SourceGRPC + "/" + manager }

// sourceState is the state of one source.
type sourceState struct {
	source.Source

	synced  bool
	err     string
	refused map[string]refused // by origin
	// skipped and missing are for a source of files. skipped contains, by file, the documents that are not policies.
	// missing contains the files that could never be read, with the reason.
	skipped map[string][]string
	missing map[string]string
	told    string // the missing files in the last log record
}

// refused is a file or object that was refused.
type refused struct {
	key policy.Key // zero if unknown
	err string
}

// sourcesConfig configures type sources.
type sourcesConfig struct {
	names     []string // the configured sources, without calls
	directory string   // directory of the source of files; empty: do not wait for files
	managers  []string // managers that must complete before subscribers are served
	dir       string   // directory of the state
	state     stream.StateID
	restored  bool // a state from the same boot was loaded
	now       func() time.Time
	log       *slog.Logger
}

// sources tracks the configured sources. It records which of them are complete, which files are missing or refused, and
// whether subscribers wait for a source. It belongs to the loop.
type sources struct {
	config   sourcesConfig
	problems *problem.Set
	all      map[string]*sourceState
	managers map[string]bool // managers that have completed in this run
	gate     *initialsync.Tracker
	// changes counts the changes of the set of complete sources.
	changes int

	ready   bool
	readied chan struct{} // closed once ready
}

// newSources returns the configured sources, all incomplete. brought contains the sources that have
// stored policies.
func newSources(c sourcesConfig, brought map[string]bool, p *problem.Set) (*sources, error) {
	s := &sources{
		config: c, problems: p, managers: make(map[string]bool), readied: make(chan struct{}),
		all: map[string]*sourceState{managed.SourceGRPC: {Source: source.Of(managed.SourceGRPC), synced: true}},
	}
	var awaited []initialsync.Source
	for _, name := range c.names {
		one := &sourceState{Source: source.Of(name), refused: make(map[string]refused)}
		s.all[name] = one
		switch {
		case !one.Policies || one.Calls:
		case !one.Files:
			awaited = append(awaited, initialsync.Source{Name: name})
		case c.directory != "":
			awaited = append(awaited, initialsync.Source{
				Name: name, Of: filepath.Clean(c.directory), Whole: true, Brought: brought[name],
			})
			one.missing = map[string]string{c.directory: "is not read yet"}
		}
	}
	for _, m := range c.managers {
		awaited = append(awaited, initialsync.Source{Name: managerSource(m)})
	}
	var err error
	s.gate, err = initialsync.New(c.dir, c.state, awaited)
	return s, err
}

// configured reports whether a source is configured.
func (s *sources) configured(name string) bool { return s.all[name] != nil }

// foreign reports whether calls may not change a policy, because it belongs to another source.
func (s *sources) foreign(p *Policy) bool {
	return !p.source().Calls && s.configured(p.Source)
}

// synced reports whether every source is complete.
func (s *sources) synced() bool {
	for _, one := range s.all {
		if !one.synced {
			return false
		}
	}
	return true
}

// checkReady closes readied once every source is complete, or if the state of an earlier run was loaded.
func (s *sources) checkReady() {
	if s.ready || !s.config.restored && !s.synced() {
		return
	}
	s.ready = true
	close(s.readied)
}

// listed reports whether every source of policies except but has been complete once.
func (s *sources) listed(but string) bool {
	for name, one := range s.all {
		if one.Policies && name != but && !one.synced {
			return false
		}
	}
	return true
}

// foldingListed reports whether the sources whose policies can be folded have been complete once.
func (s *sources) foldingListed() (all bool) {
	for _, one := range s.all {
		if one.Folds && !one.synced {
			return false
		}
		all = all || one.Folds
	}
	return all
}

// complete returns the names of the complete sources in the form that subscribers store, sorted. Each manager counts
// as a source of its own, because managers complete independently.
func (s *sources) complete() []string {
	var out []string
	for name, one := range s.all {
		if one.synced && !one.Calls {
			out = append(out, name)
		}
	}
	for m := range s.managers {
		out = append(out, managerSource(m))
	}
	slices.Sort(out)
	return out
}

// completed records that a source is complete.
func (s *sources) completed(name string) {
	one := s.all[name]
	one.synced, one.err = true, ""
	s.changes++
	s.noteListed(name)
}

// managerCompleted records that a manager has sent all its policies.
func (s *sources) managerCompleted(manager string) {
	s.managers[manager] = true
	s.changes++
	s.noteListed(managerSource(manager))
}

// noteListed tells the tracker of the initial sync that a source is complete.
func (s *sources) noteListed(name string) {
	s.problems.Note("record of the first complete listing of "+name, s.gate.Listed(name))
}

// failed records the reason for which a source cannot be read; nil clears the failure.
func (s *sources) failed(name string, why error) {
	one := s.all[name]
	one.err = ""
	if why != nil {
		one.err = why.Error()
	}
	if one.Files && one.err != "" && !s.gate.HasListed(name) {
		one.missing = map[string]string{s.config.directory: one.err} // the whole directory cannot be read
		s.completeFiles(one)
	}
}

// took records the results of a listing after it was applied. origins yields the origins of the source's enforced
// policies.
func (s *sources) took(l *listing, origins iter.Seq[string]) {
	one := s.all[l.source]
	for origin, r := range l.bad {
		if before, ok := one.refused[origin]; !ok || before.err != r.err {
			s.config.log.Warn("policies refused; their earlier versions stay enforced",
				"source", l.source, "origin", origin, "reason", r.err)
		}
	}
	one.refused = l.bad
	switch {
	case one.Files:
		s.tookFiles(one, l, origins)
	case l.complete():
		s.completed(l.source)
	}
}

// tookFiles records which files of the directory a listing could not read.
func (s *sources) tookFiles(one *sourceState, l *listing, origins iter.Seq[string]) {
	one.err, one.missing = "", make(map[string]string)
	skipped := make(map[string][]string)
	for origin, f := range l.files {
		if r, bad := l.bad[origin]; bad { // for example, a CIDR group of the file was refused
			one.missing[origin] = r.err
		} else if f.err != nil {
			one.missing[origin] = f.err.Error()
		} else if f.keep {
			one.missing[origin] = beingWritten
		}
		if len(f.skipped) > 0 {
			skipped[origin] = f.skipped
		}
		for _, text := range f.skipped {
			if !slices.Contains(one.skipped[origin], text) {
				s.config.log.Warn("skipping a document that is not a policy",
					"source", l.source, "origin", origin, "document", text)
			}
		}
	}
	if slices.Contains(slices.Collect(maps.Values(one.missing)), beingWritten) { // skip many policies if possible
		for origin := range origins {
			if one.missing[origin] == beingWritten {
				delete(one.missing, origin) // its earlier policies are still enforced
			}
		}
	}
	one.skipped = skipped
	s.completeFiles(one)
}

// completeFiles completes a source of files if no file is missing, if an operator has accepted all missing files, or
// if the source was complete before.
func (s *sources) completeFiles(one *sourceState) {
	if !s.gate.HasListed(one.Name) {
		for _, a := range s.gate.Accepted(one.Name) {
			delete(one.missing, a.Part)
		}
		if len(one.missing) > 0 {
			if text := strings.Join(one.incomplete(), "; "); text != one.told {
				one.told = text
				s.config.log.Warn("policy files were never read; new endpoints wait until they are",
					"source", one.Name, "missing", text)
			}
			return
		}
	}
	s.completed(one.Name)
}

// incomplete returns the missing parts of a source, sorted.
func (one *sourceState) incomplete() (out []string) {
	for _, part := range slices.Sorted(maps.Keys(one.missing)) {
		out = append(out, part+": "+one.missing[part])
	}
	return out
}

// state returns the reason for which a source is not complete: the error of reading it, or the missing parts.
func (one *sourceState) state() string {
	if one.err != "" || one.synced {
		return one.err
	}
	return strings.Join(one.incomplete(), "; ")
}

// refusal returns the reason for which the newest version of an object or file was refused. It returns none for a
// source that is no longer configured.
func (s *sources) refusal(name, origin string) (refused, bool) {
	one := s.all[name]
	if one == nil {
		return refused{}, false
	}
	r, ok := one.refused[origin]
	return r, ok
}

// refusals yields the refused files and objects, by source and origin.
func (s *sources) refusals() iter.Seq2[managed.By, refused] {
	return func(yield func(managed.By, refused) bool) {
		for name, one := range s.all {
			for origin, r := range one.refused {
				if !yield(managed.By{Source: name, Origin: origin}, r) {
					return
				}
			}
		}
	}
}

// files returns the state of the configured source of files; nil if none is configured.
func (s *sources) files() *sourceState {
	for _, one := range s.all {
		if one.Files {
			return one
		}
	}
	return nil
}

// skipped returns the documents of files that are not policies, sorted.
func (s *sources) skipped() (all []string) {
	one := s.files()
	if one == nil {
		return nil
	}
	for _, origin := range slices.Sorted(maps.Keys(one.skipped)) {
		for _, text := range one.skipped[origin] {
			if len(all) == summary.MaxProblems {
				return all
			}
			all = append(all, origin+": "+text)
		}
	}
	return all
}

// waitsFor returns the sources for which subscribers wait, and their missing parts.
func (s *sources) waitsFor() (out []string) {
	if s.gate.IsOpen() {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(s.all)) {
		one := s.all[name]
		switch {
		case s.gate.HasListed(name):
		case one.Files:
			for _, part := range slices.Sorted(maps.Keys(one.missing)) {
				out = append(out, fmt.Sprintf("the file %s was never read: %s; "+
					"`sluice policy source accept-without %s` stops waiting for it", part, one.missing[part], part))
			}
		default:
			why := "not all policies were listed yet"
			if one.err != "" {
				why = one.err
			}
			out = append(out, fmt.Sprintf(
				"the source %s is not complete: %s; `sluice policy confirm` stops waiting for it", name, why))
		}
	}
	for _, m := range s.config.managers {
		if !s.gate.HasListed(managerSource(m)) {
			out = append(out, fmt.Sprintf("the manager %q has not completed (CompleteSource, ReplacePolicies); "+
				"`sluice policy confirm` stops waiting for it", m))
		}
	}
	return out
}

// states returns the states of all configured sources, and of each manager that has policies or has completed.
func (s *sources) states(policies *policySet) []summary.SourceStatus {
	type place struct{ source, manager string }
	states := make(map[place]*summary.SourceStatus)
	for name, src := range s.all {
		states[place{source: name}] = &summary.SourceStatus{Name: name, Synced: src.synced, Error: src.state()}
	}
	manager := func(name string) *summary.SourceStatus {
		at := place{managed.SourceGRPC, name}
		if states[at] == nil {
			states[at] = &summary.SourceStatus{Name: managed.SourceGRPC, Manager: name, Synced: s.managers[name]}
		}
		return states[at]
	}
	for name := range s.managers {
		manager(name)
	}
	for _, p := range policies.all {
		st := states[place{source: p.Source}]
		if p.source().Calls {
			st = manager(p.Manager)
		}
		if st != nil && p.Broken == "" && p.Exceeds == "" {
			st.Policies++
		}
	}
	out := make([]summary.SourceStatus, 0, len(states))
	for _, st := range states {
		out = append(out, *st)
	}
	slices.SortFunc(out, func(a, b summary.SourceStatus) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Manager, b.Manager))
	})
	return out
}

// ErrNotMissing means that the file cannot be accepted as missing, because no subscriber waits for it.
var ErrNotMissing = errors.New("no subscriber waits for it")

// Acceptance is the result of AcceptWithout.
type Acceptance struct {
	File    string   // file name, as the source lists it
	Why     string   // why it was missing
	Waiting []string // sources for which subscribers still wait
}

// acceptWithout makes subscribers stop waiting for a policy file that could never be read, and records that decision.
// With validateOnly it changes nothing.
func (s *sources) acceptWithout(name string, validateOnly bool) (Acceptance, error) {
	one := s.files()
	if one == nil {
		return Acceptance{}, fmt.Errorf(
			"%w: no directory of policies is configured (sources.directory)", ErrNotMissing)
	}
	part := name
	if _, ok := one.missing[part]; !ok && filepath.Dir(name) == filepath.Clean(s.config.directory) {
		part = filepath.Base(name)
	}
	why, ok := one.missing[part]
	switch {
	case s.gate.HasListed(one.Name):
		return Acceptance{}, fmt.Errorf("%w: all files of %s were already read or accepted; the enforced policies of %s stay",
			ErrNotMissing, s.config.directory, name)
	case !ok:
		return Acceptance{}, fmt.Errorf("%w: %s; missing files: %s",
			ErrNotMissing, name, strings.Join(one.incomplete(), "; "))
	case validateOnly:
		return Acceptance{File: part, Why: why, Waiting: s.waitsFor()}, nil
	}
	a := initialsync.Accepted{Source: one.Name, Part: part, Why: why, Time: s.config.now()}
	if err := s.gate.Accept(a); err != nil {
		return Acceptance{}, fmt.Errorf("%w: %w", failure.ErrStorage, err)
	}
	s.config.log.Warn("policy file accepted as missing; endpoints are connected without it",
		"file", part, "reason", why)
	s.completeFiles(one)
	return Acceptance{File: part, Why: why, Waiting: s.waitsFor()}, nil
}

// acceptedWithout returns the files that an operator has accepted as missing and that still cannot be read.
func (s *sources) acceptedWithout() (out []string) {
	one := s.files()
	if one == nil {
		return nil
	}
	for _, a := range s.gate.Accepted(one.Name) {
		_, bad := one.refused[a.Part]
		if bad || a.Part == s.config.directory && one.err != "" {
			out = append(out, fmt.Sprintf("the file %s was accepted as missing at %s: its unreadable policies are not enforced",
				a.Part, a.Time.UTC().Format("2006-01-02 15:04:05Z")))
		}
	}
	return out
}
