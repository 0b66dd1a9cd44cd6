// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package filter

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// flowLabel is a label of a flow, "k8s:app=web".
type flowLabel struct{ source, key, value string }

func parseLabels(texts []string) (labels []flowLabel) {
	for _, text := range texts {
		name, value, _ := strings.Cut(text, "=")
		source, key, ok := strings.Cut(name, ":")
		if !ok {
			source, key = "", name
		}
		labels = append(labels, flowLabel{source, key, value})
	}
	return labels
}

// selector is a label selector in Kubernetes syntax, whose keys may begin with a source. All its requirements must be
// met.
type selector []requirement

// requirement is a condition on the labels with one key.
type requirement struct {
	source, key string // an empty source matches any source
	op          operator
	values      []string
}

type operator int

const (
	exists operator = iota
	notExists
	in
	notIn
)

func (s selector) matches(labels []flowLabel) bool {
	return !slices.ContainsFunc(s, func(r requirement) bool { return !r.matches(labels) })
}

func (r requirement) matches(labels []flowLabel) bool {
	found, equal := false, false
	for _, l := range labels {
		if l.key == r.key && (r.source == "" || r.source == l.source) {
			found = true
			equal = equal || slices.Contains(r.values, l.value)
		}
	}
	switch r.op {
	case exists:
		return found
	case notExists:
		return !found
	case in:
		return equal
	default:
		return !equal
	}
}

// parseSelector parses "a", "!a", "a=b", "a==b", "a!=b", "a in (b, c)" and "a notin (b, c)", separated by commas.
func parseSelector(text string) (selector, error) {
	var s selector
	for _, term := range terms(text) {
		r, err := parseRequirement(strings.TrimSpace(term))
		if err != nil {
			return nil, fmt.Errorf("%q is not a label selector: %w", text, err)
		}
		s = append(s, r)
	}
	return s, nil
}

// terms splits a text at the commas outside of parentheses. An empty text has no terms.
func terms(text string) (out []string) {
	if strings.TrimSpace(text) == "" {
		return nil
	}
	depth, from := 0, 0
	for i, c := range text {
		switch c {
		case '(':
			depth++
		case ')':
			depth--
		case ',':
			if depth == 0 {
				out = append(out, text[from:i])
				from = i + 1
			}
		}
	}
	return append(out, text[from:])
}

func parseRequirement(term string) (r requirement, err error) {
	key := term
	switch {
	case strings.HasPrefix(term, "!"):
		r.op, key = notExists, term[1:]
	case strings.HasSuffix(term, ")"):
		name, list, ok := strings.Cut(strings.TrimSuffix(term, ")"), "(")
		if !ok {
			return r, fmt.Errorf("%q has no opening parenthesis", term)
		}
		fields := strings.Fields(name)
		if len(fields) != 2 || fields[1] != "in" && fields[1] != "notin" {
			return r, fmt.Errorf("%q is neither KEY in (…) nor KEY notin (…)", term)
		}
		key, r.op = fields[0], in
		if fields[1] == "notin" {
			r.op = notIn
		}
		for _, v := range strings.Split(list, ",") {
			r.values = append(r.values, strings.TrimSpace(v))
		}
	default:
		if name, value, ok := strings.Cut(term, "!="); ok {
			key, r.op, r.values = name, notIn, []string{strings.TrimSpace(value)}
		} else if name, value, ok := strings.Cut(term, "="); ok {
			key, r.op, r.values = name, in, []string{strings.TrimSpace(strings.TrimPrefix(value, "="))}
		}
	}
	r.source, r.key = "", strings.TrimSpace(key)
	if source, rest, ok := strings.Cut(r.key, ":"); ok {
		r.source, r.key = source, rest
		if r.source == "any" {
			r.source = ""
		}
	}
	if r.key == "" {
		return r, errors.New("a key is empty")
	}
	if strings.ContainsAny(r.key, " \t()!") {
		return r, fmt.Errorf("the key %q has a character that no key has", r.key)
	}
	for _, v := range r.values {
		if strings.ContainsAny(v, " \t()!=") {
			return r, fmt.Errorf("the value %q has a character that no value has", v)
		}
	}
	return r, nil
}
