// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package labels

import (
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/label"
)

// Filter says which labels count. Labels that differ per pod, or that no
// policy selects, would make a number per pod.
//
// A rule is "[source:]prefix" and matches keys that begin with the prefix;
// a prefix that begins with "*." matches every key whose domain (what stands
// before '/') ends in the rest. The longest matching rule decides, a
// configured one before a default of the same length; what no rule matches is
// kept.
type Filter struct {
	rules []rule // configured ones first
}

type rule struct {
	source string // empty: any
	prefix string
	domain bool // prefix is the end of a domain, "." included
	keep   bool
}

// Defaults of the filter. Kept: what names the namespace and the app. Dropped:
// what Kubernetes puts on pods for its own use, some of it different per pod.
var (
	defaultInclude = []string{
		"io.kubernetes.pod.namespace",
		"io.cilium.k8s.namespace.labels.",
		"io.cilium.k8s.policy.",
		"app.kubernetes.io/",
	}
	defaultExclude = []string{
		"io.kubernetes.",
		"io.cilium.k8s.",
		"kubernetes.io/",
		"*.kubernetes.io/",
		"k8s.io/",
		"*.k8s.io/",
		"pod-template-generation",
		"pod-template-hash",
		"controller-revision-hash",
		"controller-uid",
		"job-name",
		"annotation.",
	}
)

// NewFilter returns the default filter of workloads with more rules.
func NewFilter(include, exclude []string) (Filter, error) {
	return newFilter(include, exclude, defaultInclude, defaultExclude)
}

// NewNodeFilter returns the filter of nodes, whose labels all count without rules.
func NewNodeFilter(include, exclude []string) (Filter, error) {
	return newFilter(include, exclude, nil, nil)
}

func newFilter(include, exclude, defaultInclude, defaultExclude []string) (Filter, error) {
	var f Filter
	for _, set := range []struct {
		name string
		text []string
		keep bool
	}{
		{"include", include, true},
		{"exclude", exclude, false},
		{"default include", defaultInclude, true},
		{"default exclude", defaultExclude, false},
	} {
		for i, t := range set.text {
			r, err := parseRule(t)
			if err != nil {
				return Filter{}, fmt.Errorf("%s[%d]: %w", set.name, i, err)
			}
			r.keep = set.keep
			f.rules = append(f.rules, r)
		}
	}
	own := f.rules[:len(include)+len(exclude)]
	for i, r := range own[:len(include)] {
		r.keep = false
		if j := slices.Index(own[len(include):], r); j >= 0 {
			return Filter{}, fmt.Errorf("%q is both included (include[%d]) and excluded (exclude[%d])", include[i], i, j)
		}
	}
	return f, nil
}

func parseRule(text string) (rule, error) {
	var r rule
	prefix := text
	if source, rest, ok := strings.Cut(text, ":"); ok {
		if !label.IsSource(source) {
			return rule{}, fmt.Errorf("%q: %q is no label source", text, source)
		}
		r.source, prefix = source, rest
	}
	if rest, ok := strings.CutPrefix(prefix, "*."); ok {
		if rest = strings.TrimSuffix(rest, "/"); rest == "" {
			return rule{}, fmt.Errorf("%q: a domain follows \"*.\"", text)
		}
		r.domain, prefix = true, "."+rest
	}
	if prefix == "" || len(prefix) > label.MaxKey || !label.IsText(prefix) {
		return rule{}, fmt.Errorf("%q: want [source:]prefix", text)
	}
	r.prefix = prefix
	return r, nil
}

func (r rule) matches(l label.Label) bool {
	if r.source != "" && r.source != l.Source {
		return false
	}
	if !r.domain {
		return strings.HasPrefix(l.Key, r.prefix)
	}
	domain, _, ok := strings.Cut(l.Key, "/")
	return ok && strings.HasSuffix(domain, r.prefix)
}

// Keeps says whether a label counts.
func (f Filter) Keeps(l label.Label) bool {
	keep, longest := true, -1
	for _, r := range f.rules {
		n := len(r.prefix)
		if r.source != "" {
			n++ // a rule with a source is the more exact one
		}
		if n > longest && r.matches(l) {
			keep, longest = r.keep, n
		}
	}
	return keep
}

// Apply returns the labels that count, in a new slice.
func (f Filter) Apply(labels []label.Label) []label.Label {
	out := make([]label.Label, 0, len(labels)+2)
	for _, l := range labels {
		if f.Keeps(l) {
			out = append(out, l)
		}
	}
	return out
}
