// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"
	"slices"

	"github.com/sluice-net/sluice/services/policy/internal/decode"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/source"
)

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

// edit is the change that the listing comes to.
func (l *listing) edit() edit {
	e := edit{gone: l.gone, unfolded: l.unfolded, spaces: l.spaces}
	for _, f := range l.fresh {
		e.puts = append(e.puts, f.policies...)
	}
	return e
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

// comparison finds out what a listing changes. It changes nothing.
type comparison struct {
	sources  *sources
	policies *policySet
	places   *places
	forms    *forms
}

// compare finds out what the listing changes.
func (c *comparison) compare(l *listing) {
	l.bad = make(map[string]refused)
	l.fresh, l.gone, l.unfolded, l.spaces = nil, nil, nil, nil
	from := source.Of(l.source)
	if l.deltas {
		for origin, r := range c.sources.all[l.source].refused {
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
			there := func(of string) bool { return has(of, d.Object.Key) || stays(of) }
			why := c.conflict(l, origin, d.Object.Key, taken, there)
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
			of[i] = decode.Options{Rules: c.forms.rules}.Shadowed(origin, d, why)
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
			p := c.policies.all[d.Object.Key]
			switch {
			case p == nil || p.Source != l.source || p.Origin != origin || !c.places.says(p, d):
				f.policies = append(f.policies, c.forms.policy(d, l.source, origin))
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
		if _, ok := c.places.folded[k]; ok && from.Folds && l.without(k.String()) {
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
			look(k, c.policies.all[k])
		}
	} else {
		for k, p := range c.policies.all {
			look(k, p)
		}
		for k := range c.places.folded {
			look(k, nil)
		}
	}
	slices.SortFunc(l.gone, policy.Key.Compare)
}

// conflict is why a policy of a file or object cannot be in force: another source or
// origin has it. There says that what an origin had is still there.
func (c *comparison) conflict(
	l *listing, origin string, k policy.Key, taken map[policy.Key]string, there func(origin string) bool,
) string {
	p := c.policies.all[k]
	switch other, ok := taken[k]; {
	case ok && other != origin:
		return fmt.Sprintf("%s is in %s already", k, other)
	case p != nil && p.Source != l.source && c.sources.configured(p.Source):
		return fmt.Sprintf("%s belongs to the source %s", k, p.Source)
	case p != nil && p.Origin != origin && there(p.Origin):
		return fmt.Sprintf("%s is in %s already", k, p.Origin)
	}
	return ""
}
