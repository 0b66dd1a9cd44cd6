// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package labelfilter selects the labels of workloads that become part of identities. The identity service applies
// the filter. The policy service needs it to know which labels no identity can have.
package labelfilter

import (
	"fmt"
	"strings"

	"github.com/sluice-net/sluice/model/label"
)

// DefaultInclude and DefaultExclude are the rules for workloads that follow the configured rules. They keep the
// labels that name the namespace and the app. They drop the labels that Kubernetes puts on pods for its own use, some
// of which are different for each pod.
var (
	DefaultInclude = []string{
		"io.kubernetes.pod.namespace",
		"io.cilium.k8s.namespace.labels.",
		"io.cilium.k8s.policy.",
		"app.kubernetes.io/",
	}
	DefaultExclude = []string{
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

// Rule is "[source:]prefix". It matches keys that begin with the prefix. A prefix that begins with "*." matches every
// key whose domain (the part before '/') ends in the rest of the prefix.
type Rule struct {
	Text   string
	Counts bool // matching labels are kept
}

// Filter decides which labels are kept. The longest matching rule decides; among rules of equal length, the first. A
// label that matches no rule is kept.
type Filter struct {
	rules []rule
	texts []Rule
}

type rule struct {
	source string // empty: any
	prefix string
	domain bool // prefix is the end of a domain, including the "."
	keep   bool
}

// Default returns the filter for workloads if no rules are configured.
func Default() Filter {
	var rules []Rule
	for _, t := range DefaultInclude {
		rules = append(rules, Rule{t, true})
	}
	for _, t := range DefaultExclude {
		rules = append(rules, Rule{t, false})
	}
	f, err := New(rules)
	if err != nil {
		panic("labelfilter: a default: " + err.Error())
	}
	return f
}

// New returns a filter with the given rules. The error is a *RuleError.
func New(rules []Rule) (Filter, error) {
	f := Filter{texts: rules}
	for i, t := range rules {
		r, err := parseRule(t.Text)
		if err != nil {
			return Filter{}, &RuleError{i, err}
		}
		r.keep = t.Counts
		f.rules = append(f.rules, r)
	}
	return f, nil
}

// RuleError reports an invalid rule.
type RuleError struct {
	Index int
	Err   error
}

// Error names the rule by its index.
func (e *RuleError) Error() string { return fmt.Sprintf("rules[%d]: %v", e.Index, e.Err) }

// Unwrap returns the reason.
func (e *RuleError) Unwrap() error { return e.Err }

// Rules returns the rules that New got. The caller must not change them.
func (f Filter) Rules() []Rule { return f.texts }

func parseRule(text string) (rule, error) {
	var r rule
	prefix := text
	if source, rest, ok := strings.Cut(text, ":"); ok {
		if !label.IsSource(source) {
			return rule{}, fmt.Errorf("%q: %q is not a valid label source", text, source)
		}
		r.source, prefix = source, rest
	}
	if rest, ok := strings.CutPrefix(prefix, "*."); ok {
		if rest = strings.TrimSuffix(rest, "/"); rest == "" {
			return rule{}, fmt.Errorf("%q: \"*.\" must be followed by a domain", text)
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

// Keeps reports whether a label is kept.
func (f Filter) Keeps(l label.Label) bool {
	keep, _ := f.Decide(l)
	return keep
}

// Decide reports whether a label is kept, and the text of the deciding rule; it is empty if none matches.
func (f Filter) Decide(l label.Label) (keep bool, by string) {
	keep, longest := true, -1
	for i, r := range f.rules {
		n := len(r.prefix)
		if r.source != "" {
			n++ // a source makes a rule more specific
		}
		if n > longest && r.matches(l) {
			keep, longest, by = r.keep, n, f.texts[i].Text
		}
	}
	return keep, by
}

// Apply returns the labels that are kept, in a new slice.
func (f Filter) Apply(labels []label.Label) []label.Label {
	out := make([]label.Label, 0, len(labels)+2)
	for _, l := range labels {
		if f.Keeps(l) {
			out = append(out, l)
		}
	}
	return out
}
