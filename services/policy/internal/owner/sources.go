// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/services/policy/internal/initialsync"
	"github.com/sluice-net/sluice/services/policy/internal/summary"
)

// managerSource is how a manager is called as a source.
func managerSource(manager string) string { return managed.SourceGRPC + "/" + manager }

// awaited are the sources for which subscribers wait: those that bring policies.
func (o *Owner) awaited(sources []string) (out []initialsync.Source) {
	for _, name := range sources {
		switch s := o.sources[name]; {
		case !s.Policies || s.Calls:
		case !s.Files:
			out = append(out, initialsync.Source{Name: name})
		default:
			if o.config.Directory == "" {
				continue
			}
			g := initialsync.Source{Name: name, Whole: true}
			for _, p := range o.policies {
				g.Brought = g.Brought || p.Source == name
			}
			out = append(out, g)
			s.missing = map[string]string{o.config.Directory: "is not read yet"}
		}
	}
	for _, m := range o.config.Managers {
		out = append(out, initialsync.Source{Name: managerSource(m)})
	}
	return out
}

// tookFiles notes what a listing of files lacks.
func (o *Owner) tookFiles(src *sourceState, l *listing) {
	src.err, src.missing = "", make(map[string]string)
	skipped := make(map[string][]string)
	for origin, f := range l.files {
		if f.err != nil {
			src.missing[origin] = f.err.Error()
		} else if f.keep {
			src.missing[origin] = "is being written"
		}
		if len(f.skipped) > 0 {
			skipped[origin] = f.skipped
		}
		for _, text := range f.skipped {
			if !slices.Contains(src.skipped[origin], text) {
				o.config.Log.Warn("a document is no policy, and skipped", "source", l.source, "origin", origin, "document", text)
			}
		}
	}
	for _, p := range o.policies {
		if p.Source == l.source && src.missing[p.Origin] == "is being written" {
			delete(src.missing, p.Origin) // it has what it had
		}
	}
	src.skipped = skipped
	o.completeFiles(src)
}

// completeFiles completes the source of files if nothing is missing, nobody waits
// for what is, or it was complete before.
func (o *Owner) completeFiles(src *sourceState) {
	if !o.gate.HasListed(managed.SourceFile) {
		for _, a := range o.gate.Accepted(managed.SourceFile) {
			delete(src.missing, a.Part)
		}
		if len(src.missing) > 0 {
			if text := strings.Join(incomplete(src), "; "); text != src.told {
				src.told = text
				o.config.Log.Warn("files of policies were never read: no endpoint gets its policies until they are",
					"source", managed.SourceFile, "missing", text)
			}
			return
		}
	}
	o.completed(managed.SourceFile)
}

// directoryFailed notes that the directory cannot be read at all.
func (o *Owner) directoryFailed(src *sourceState) {
	if src.err == "" || o.gate.HasListed(managed.SourceFile) {
		return
	}
	src.missing = map[string]string{o.config.Directory: src.err}
	o.completeFiles(src)
}

// completed notes that a source has said everything.
func (o *Owner) completed(name string) {
	src := o.sources[name]
	src.synced, src.err = true, ""
	o.stateChanged = true
	o.noteListed(name)
}

// noteListed tells the gate of a source that has said everything.
func (o *Owner) noteListed(name string) {
	o.problems.note("note of the first listing of "+name, o.gate.Listed(name))
}

// incomplete says what is missing of a source, sorted.
func incomplete(src *sourceState) (out []string) {
	for _, part := range slices.Sorted(maps.Keys(src.missing)) {
		out = append(out, part+": "+src.missing[part])
	}
	return out
}

// state is why a source is not as it should be: why it cannot say anything, or what
// is missing of it.
func (s *sourceState) state() string {
	if s.err != "" || s.synced {
		return s.err
	}
	return strings.Join(incomplete(s), "; ")
}

// skipped names the documents of files that are no policies, sorted.
func (o *Owner) skipped() (all []string) {
	src := o.sources[managed.SourceFile]
	if src == nil {
		return nil
	}
	for _, origin := range slices.Sorted(maps.Keys(src.skipped)) {
		for _, text := range src.skipped[origin] {
			if len(all) == summary.MaxProblems {
				return all
			}
			all = append(all, origin+": "+text)
		}
	}
	return all
}

// waitsFor says which sources keep subscribers waiting, and what is missing of them.
func (o *Owner) waitsFor() (out []string) {
	if o.gate.IsOpen() {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(o.sources)) {
		src := o.sources[name]
		switch {
		case o.gate.HasListed(name):
		case name == managed.SourceFile:
			for _, part := range slices.Sorted(maps.Keys(src.missing)) {
				out = append(out, fmt.Sprintf("the file %s was never read: %s; "+
					"`sluice policy source accept-without %s` goes on without it", part, src.missing[part], part))
			}
		default:
			why := "it has not listed every policy yet"
			if src.err != "" {
				why = src.err
			}
			out = append(out, fmt.Sprintf(
				"the source %s is not complete: %s; `sluice policy confirm` goes on without it", name, why))
		}
	}
	for _, m := range o.config.Managers {
		if !o.gate.HasListed(managerSource(m)) {
			out = append(out, fmt.Sprintf("the manager %q has not completed (CompleteSource, ReplacePolicies); "+
				"`sluice policy confirm` goes on without it", m))
		}
	}
	return out
}

// ErrNotMissing says that nothing waits for the file that a caller accepts as missing.
var ErrNotMissing = errors.New("nothing waits for it")

// Acceptance is the answer of AcceptWithout.
type Acceptance struct {
	File    string   // as the source calls it
	Why     string   // it was missing
	Waiting []string // for what subscribers wait still
}

// AcceptWithout ends the waiting for a file of policies that was never read, and
// records it. To validate changes nothing.
func (o *Owner) AcceptWithout(ctx context.Context, name string, validateOnly bool) (Acceptance, error) {
	return loop.Ask(ctx, o.loop, opOther, func() (Acceptance, error) {
		src := o.sources[managed.SourceFile]
		if src == nil {
			return Acceptance{}, fmt.Errorf(
				"%w: no directory of policies is configured (sources.directory)", ErrNotMissing)
		}
		part := name
		if _, ok := src.missing[part]; !ok && filepath.Dir(name) == filepath.Clean(o.config.Directory) {
			part = filepath.Base(name)
		}
		why, ok := src.missing[part]
		switch {
		case o.gate.HasListed(managed.SourceFile):
			return Acceptance{}, fmt.Errorf("%w: the files of %s were read, or accepted, before: what was in force of %s stays",
				ErrNotMissing, o.config.Directory, name)
		case !ok:
			return Acceptance{}, fmt.Errorf("%w: %s; missing are: %s",
				ErrNotMissing, name, strings.Join(incomplete(src), "; "))
		case validateOnly:
			return Acceptance{File: part, Why: why, Waiting: o.waitsFor()}, nil
		}
		a := initialsync.Accepted{Source: managed.SourceFile, Part: part, Why: why, Time: o.config.Now()}
		if err := o.gate.Accept(a); err != nil {
			return Acceptance{}, fmt.Errorf("%w: %w", failure.ErrStorage, err)
		}
		o.config.Log.Warn("a file of policies is accepted as missing: endpoints are connected without it",
			"file", part, "reason", why)
		o.completeFiles(src)
		return Acceptance{File: part, Why: why, Waiting: o.waitsFor()}, nil
	})
}

// acceptedWithout says which files an operator did not wait for that are not read
// still.
func (o *Owner) acceptedWithout() (out []string) {
	src := o.sources[managed.SourceFile]
	if src == nil {
		return nil
	}
	for _, a := range o.gate.Accepted(managed.SourceFile) {
		_, bad := src.refused[a.Part]
		if bad || a.Part == o.config.Directory && src.err != "" {
			out = append(out, fmt.Sprintf("the file %s was accepted as missing at %s: what cannot be read of it is not in force",
				a.Part, a.Time.UTC().Format("2006-01-02 15:04:05Z")))
		}
	}
	return out
}
