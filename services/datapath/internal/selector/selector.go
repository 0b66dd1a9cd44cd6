// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package selector holds label selectors as people type them, in the syntax of
// kubectl: "app=web, tier in (front, back), !canary".
//
// It is for looking at things. Selectors of policies have rules of their own,
// and are none of its business.
package selector

import (
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Selector is a set of requirements that must all hold. The zero value has
// none, and matches everything.
type Selector struct {
	requirements []requirement
}

// requirement is about one key. Those of a negative operator hold also where
// the key is missing, as kubectl has it.
type requirement struct {
	source string // empty: any
	key    string
	op     op
	values []string
}

type op uint8

const (
	exists op = iota
	missing
	in
	notIn
)

// Matches says whether the labels meet all requirements. A key that several
// sources give meets a positive requirement if one of its labels does, and a
// negative one if none of them contradicts.
func (s Selector) Matches(labels []endpoint.Label) bool {
	for _, r := range s.requirements {
		found := slices.ContainsFunc(labels, func(l endpoint.Label) bool {
			return l.Key == r.key && (r.source == "" || r.source == l.Source) &&
				(r.op == exists || r.op == missing || slices.Contains(r.values, l.Value))
		})
		if found == (r.op == missing || r.op == notIn) {
			return false
		}
	}
	return true
}

// String writes the selector in the form that Parse reads.
func (s Selector) String() string {
	var parts []string
	for _, r := range s.requirements {
		key := r.key
		if r.source != "" {
			key = r.source + ":" + key
		}
		switch r.op {
		case exists:
			parts = append(parts, key)
		case missing:
			parts = append(parts, "!"+key)
		case in:
			parts = append(parts, fmt.Sprintf("%s in (%s)", key, strings.Join(r.values, ",")))
		case notIn:
			parts = append(parts, fmt.Sprintf("%s notin (%s)", key, strings.Join(r.values, ",")))
		}
	}
	return strings.Join(parts, ",")
}

// Parse reads requirements separated by commas: "key", "!key", "key=value",
// "key==value", "key!=value", "key in (a,b)", "key notin (a,b)". A key may have
// its source before it, as in "k8s:app". An error says at which byte and what
// was expected.
func Parse(text string) (Selector, error) {
	p := parser{text: text}
	var s Selector
	for {
		r, err := p.requirement()
		if err != nil {
			return Selector{}, err
		}
		s.requirements = append(s.requirements, r)
		p.space()
		if p.at == len(p.text) {
			return s, nil
		}
		if !p.take(",") {
			return Selector{}, p.want("a comma")
		}
	}
}

type parser struct {
	text string
	at   int
}

func (p *parser) want(what string) error {
	rest := p.text[p.at:]
	if len(rest) > 16 {
		rest = rest[:16]
	}
	if rest == "" {
		return fmt.Errorf("at its end: want %s", what)
	}
	return fmt.Errorf("at byte %d, %q: want %s", p.at, rest, what)
}

func (p *parser) space() {
	for p.at < len(p.text) && (p.text[p.at] == ' ' || p.text[p.at] == '\t') {
		p.at++
	}
}

// take moves over what comes next, after spaces, if it is token.
func (p *parser) take(token string) bool {
	p.space()
	if !strings.HasPrefix(p.text[p.at:], token) {
		return false
	}
	p.at += len(token)
	return true
}

func plain(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_' || c == '.'
}

// word is the longest run of plain characters and those of more.
func (p *parser) word(more string) string {
	p.space()
	start := p.at
	for p.at < len(p.text) && (plain(p.text[p.at]) || strings.IndexByte(more, p.text[p.at]) >= 0) {
		p.at++
	}
	return p.text[start:p.at]
}

func (p *parser) requirement() (requirement, error) {
	r := requirement{}
	if p.take("!") {
		r.op = missing
	}
	p.space()
	start := p.at
	r.key = p.word(":/")
	if source, key, ok := strings.Cut(r.key, ":"); ok {
		r.source, r.key = source, key
		if source == "" || strings.ContainsAny(source, "/") || strings.Contains(key, ":") {
			p.at = start
			return r, p.want("a key, or a source, a colon and a key")
		}
	}
	if r.key == "" {
		p.at = start
		return r, p.want("a key")
	}
	if r.op == missing {
		return r, nil
	}
	switch {
	case p.take("!="):
		r.op, r.values = notIn, []string{p.value()}
		return r, nil
	case p.take("=="), p.take("="):
		r.op, r.values = in, []string{p.value()}
		return r, nil
	}
	p.space()
	if p.at == len(p.text) || p.text[p.at] == ',' {
		return r, nil
	}
	start = p.at
	switch p.word("") {
	case "in":
		r.op = in
	case "notin":
		r.op = notIn
	default:
		p.at = start
		return r, p.want("=, ==, !=, in, notin, or a comma")
	}
	var err error
	r.values, err = p.values()
	return r, err
}

func (p *parser) value() string { return p.word(":/") }

func (p *parser) values() ([]string, error) {
	if !p.take("(") {
		return nil, p.want("(")
	}
	var values []string
	for {
		values = append(values, p.value())
		switch {
		case p.take(","):
		case p.take(")"):
			return values, nil
		default:
			return nil, p.want("a comma or )")
		}
	}
}
