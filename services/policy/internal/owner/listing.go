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

// listing is a listing of a source, with the changes that are needed to apply it.
type listing struct {
	source string
	order  []string // origins
	files  map[string]*file
	// deltas is set for a source that reports changes: files contains only the changed files, removed contains the
	// removed ones, and other files are unchanged. If listed is set, the source is complete, and listed contains the
	// origins of all existing files.
	deltas  bool
	removed map[string]policy.Key
	// renamed is set if an unreadable file may contain the policies of a file that has disappeared.
	renamed bool
	listed  map[string]struct{}
	// before describes the last listing of the source, if only the files that changed since need to be compared; nil:
	// all files must be compared.
	before *enforced
	// after is set when the listing has been applied. It is before of the next listing.
	after *enforced
	// steps is the number by which the listing increases policySet.changes. It is set if only changed files were
	// compared.
	steps uint64

	fresh []puts // of the files that are applied
	gone  []policy.Key
	// unfolded and spaces are passed on to the fields of the same names in edit.
	unfolded, spaces []policy.Key
	bad              map[string]refused
	// partly contains the files that have unreadable documents. The readable documents of these files are enforced.
	partly map[string]bool
	// shadowed contains objects of an API server that isolate pods because another source has a policy with the same
	// key.
	shadowed map[string]bool
}

// enforced is a set of files whose policies are all enforced as written.
type enforced struct {
	files   map[string]*file
	changes uint64 // policySet.changes while this was true
}

// enforced returns the files if all their policies are enforced as written; otherwise nil. The listing must have been
// applied before.
func (l *listing) enforced(policies *policySet) *enforced {
	if l.deltas || l.renamed || len(l.bad) > 0 {
		return nil
	}
	// If nothing else has changed policies, the policies of unchanged files are still enforced.
	changed := l.before != nil && l.steps > 0 && policies.changes == l.before.changes+l.steps
	for origin, f := range l.files {
		if f.keep || f.err != nil {
			return nil
		}
		if changed && l.before.files[origin] == f {
			continue
		}
		for _, d := range f.docs {
			p := policies.all[d.Object.Key]
			if p == nil || p.Source != l.source || p.Origin != origin || p.Broken != "" || p.Exceeds != "" {
				return nil
			}
		}
	}
	return &enforced{files: l.files, changes: policies.changes}
}

// puts contains the new or changed policies of a file.
type puts struct {
	origin   string
	policies []*Policy
}

// edit returns the change that the listing makes.
func (l *listing) edit() edit {
	e := edit{gone: l.gone, unfolded: l.unfolded, spaces: l.spaces}
	for _, f := range l.fresh {
		e.puts = append(e.puts, f.policies...)
	}
	return e
}

// without reports whether an origin will have no policies, apart from those in the files of the listing.
func (l *listing) without(origin string) bool {
	_, removed := l.removed[origin]
	_, listed := l.listed[origin]
	return !l.deltas || removed || l.listed != nil && !listed
}

// complete reports whether the listing completes the source.
func (l *listing) complete() bool { return !l.deltas || l.listed != nil }

// unreadable records a document that can be neither applied nor isolated, because its pods cannot be determined.
func (l *listing) unreadable(origin string, d decode.Decoded, why string) {
	why = decode.Violation{Document: d.Document, Line: d.Line, Text: why}.String()
	if r, ok := l.bad[origin]; ok {
		why = r.err + "; " + why
	}
	l.bad[origin], l.partly[origin] = refused{key: d.Object.Key, err: why}, true
}

// comparison computes the changes that a listing makes, without applying them.
type comparison struct {
	sources  *sources
	policies *policySet
	places   *places
	forms    *forms
}

// compareChanged is like compare, but looks only at the files that differ from the last listing, whose policies are
// all enforced as written. It returns false if all files must be compared: because a policy moved to another file, or
// because something other than the files changed policies.
func (c *comparison) compareChanged(l *listing) bool {
	before := l.before
	if before == nil || before.changes != c.policies.changes ||
		l.renamed || len(c.policies.closed)+len(c.places.folded) > 0 {
		return false
	}
	former := make(map[policy.Key]string) // keys in the former content of changed and removed files
	for origin, f := range before.files {
		if l.files[origin] == f {
			continue
		}
		for _, d := range f.docs {
			former[d.Object.Key] = origin
		}
	}
	var fresh []puts
	var steps uint64
	taken := make(map[policy.Key]bool)
	for _, origin := range l.order {
		f := l.files[origin]
		if f.err != nil || f.keep {
			return false
		}
		if before.files[origin] == f {
			continue
		}
		x := puts{origin: origin}
		for i, d := range f.docs {
			p := c.policies.all[d.Object.Key]
			if taken[d.Object.Key] || p != nil && (p.Source != l.source || p.Origin != origin) {
				return false
			}
			taken[d.Object.Key] = true
			if p == nil || !c.places.says(p, d) {
				x.policies = append(x.policies, c.forms.policy(d, l.source, origin))
				if steps++; p != nil {
					steps++ // replaced
				}
				continue
			}
			f.docs[i].Object, f.docs[i].Text = p.read, p.Manifest // share one copy
		}
		if len(x.policies) > 0 {
			fresh = append(fresh, x)
		}
	}
	l.fresh, l.steps = fresh, steps
	for k := range former {
		if !taken[k] {
			l.steps++
			l.gone = append(l.gone, k)
		}
	}
	slices.SortFunc(l.gone, policy.Key.Compare)
	return true
}

// compare computes the changes that the listing makes.
func (c *comparison) compare(l *listing) {
	l.bad = make(map[string]refused)
	l.partly, l.shadowed = make(map[string]bool), make(map[string]bool)
	l.fresh, l.gone, l.unfolded, l.spaces = nil, nil, nil, nil
	if c.compareChanged(l) {
		return
	}
	from := source.Of(l.source)
	if l.deltas {
		for origin, r := range c.sources.all[l.source].refused {
			if l.files[origin] == nil && !l.without(origin) {
				l.bad[origin] = r
			}
		}
	}
	keys := make(map[string]map[policy.Key]bool) // keys of each file's policies, computed on demand
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
		if f := l.files[origin]; f.err != nil {
			l.bad[origin] = refused{err: f.err.Error()}
			l.partly[origin] = f.partly && !f.keep
		}
	}
	// The first origin of a policy keeps it. If another origin has a policy with the same key, that document or
	// object isolates the pods that it selects. A CIDR group selects no pods, so a second one is refused.
	documents := 0
	for _, f := range l.files {
		documents += len(f.docs)
	}
	taken := make(map[policy.Key]string, documents)
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
		var second []policy.Key // groups of addresses that another origin already has
		for i, d := range of {
			there := func(of string) bool {
				return has(of, d.Object.Key) || stays(of) && !l.files[of].gone
			}
			why := c.conflict(l, origin, d.Object.Key, taken, there)
			if why == "" {
				continue
			}
			if !from.Files {
				if d.Object.Group != nil {
					l.bad[origin] = refused{key: d.Object.Key, err: why}
					break
				}
				of = []decode.Decoded{decode.Options{Rules: c.forms.rules, Held: true}.ShadowedObject(d, why)}
				l.shadowed[origin] = true
				break
			}
			if d.Object.Group != nil {
				second = append(second, d.Object.Key)
				l.unreadable(origin, d, why)
				continue
			}
			if &of[0] == &l.files[origin].docs[0] {
				of = slices.Clone(of) // keep the decoded file, which the next listing may apply as written
			}
			of[i] = decode.Options{Rules: c.forms.rules}.Shadowed(origin, d, why)
		}
		if _, ok := l.bad[origin]; ok && !l.partly[origin] {
			continue
		}
		if len(second) > 0 {
			of = slices.DeleteFunc(slices.Clone(of), func(d decode.Decoded) bool {
				return slices.Contains(second, d.Object.Key)
			})
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
				d.Object, d.Text = p.read, p.Manifest // share one copy
				docs[origin][i] = d
			}
		}
		if len(f.policies) > 0 {
			l.fresh = append(l.fresh, f)
		}
	}
	if !from.Files {
		for _, of := range docs {
			for _, d := range of {
				k := decode.ShadowKey(d.Object.Key) // the key that the object had while another source had the policy
				if p := c.policies.all[k]; p != nil && p.Source == l.source && taken[k] == "" {
					l.gone = append(l.gone, k)
				}
			}
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
			look(decode.ShadowKey(k), c.policies.all[decode.ShadowKey(k)])
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

// conflict returns the reason for which a policy of a file or object cannot be applied, because another source or
// origin has the policy. there reports whether the origin of the existing policy still contains it.
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
