// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package labels

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/labelfilter"
)

// Filter selects the labels that are part of identities. Without the filter, labels that differ from pod to pod would
// give each pod an identity of its own. Of rules of the same length, a configured rule precedes a default rule.
type Filter = labelfilter.Filter

// Defaults of the filter.
var (
	defaultInclude = labelfilter.DefaultInclude
	defaultExclude = labelfilter.DefaultExclude
)

// NewFilter returns the default filter of workloads with more rules.
func NewFilter(include, exclude []string) (Filter, error) {
	return newFilter(include, exclude, defaultInclude, defaultExclude)
}

// NewNodeFilter returns the filter of nodes. It has no default rules: a label that no configured rule matches is part
// of the identity.
func NewNodeFilter(include, exclude []string) (Filter, error) {
	return newFilter(include, exclude, nil, nil)
}

func newFilter(include, exclude, defaultInclude, defaultExclude []string) (Filter, error) {
	var rules []labelfilter.Rule
	var names []string
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
			rules = append(rules, labelfilter.Rule{Text: t, Counts: set.keep})
			names = append(names, fmt.Sprintf("%s[%d]", set.name, i))
		}
	}
	f, err := labelfilter.New(rules)
	var bad *labelfilter.RuleError
	if errors.As(err, &bad) {
		return Filter{}, fmt.Errorf("%s: %w", names[bad.Index], bad.Err)
	}
	same := func(a, b string) bool { // a domain may end in '/'
		return a == b || strings.Contains(a, "*.") && strings.TrimSuffix(a, "/") == strings.TrimSuffix(b, "/")
	}
	for i, t := range include {
		if j := slices.IndexFunc(exclude, func(x string) bool { return same(t, x) }); j >= 0 {
			return Filter{}, fmt.Errorf("%q is both included (include[%d]) and excluded (exclude[%d])", include[i], i, j)
		}
	}
	return f, err
}
