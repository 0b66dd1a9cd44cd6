// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package directory

import (
	"log/slog"
	"maps"
	"slices"
)

// Renamed holds, by the name of a file that cannot be read, the former names whose objects may be in it: these objects
// stay. It is nil before the first listing of a run.
type Renamed map[string][]string

// Next returns the former names after a listing. unread reports whether a file could not be read completely. held are
// the names under which the feed has objects. Renames before the first listing of a run are unknown, so any unread file
// may then be one of the files that are gone.
func (r Renamed) Next(files []File, unread func(name string) bool, held []string) Renamed {
	out := make(Renamed)
	listed := make(map[string]bool, len(files))
	for _, f := range files {
		listed[f.Origin] = true
	}
	for _, f := range files {
		if !unread(f.Origin) {
			continue
		}
		names := slices.Clone(r[f.Origin])
		if f.Former != "" {
			names = append(append(names, f.Former), r[f.Former]...)
		}
		if r == nil {
			names = append(names, held...)
		}
		slices.Sort(names)
		names = slices.DeleteFunc(slices.Compact(names), func(name string) bool { return listed[name] })
		if len(names) > 0 {
			out[f.Origin] = names
		}
	}
	return out
}

// Names yields the former names, possibly repeatedly.
func (r Renamed) Names(yield func(name string) bool) {
	for _, names := range r {
		for _, name := range names {
			if !yield(name) {
				return
			}
		}
	}
}

// Warn logs the files whose former names were found since the previous listing.
func (r Renamed) Warn(l *slog.Logger, source string, before Renamed) {
	for _, file := range slices.Sorted(maps.Keys(r)) {
		if !slices.Equal(r[file], before[file]) {
			l.Warn("a file cannot be read: the objects of removed files stay, because it may be one of them under a new name",
				"source", source, "origin", file, "gone", r[file])
		}
	}
}
