// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package selector parses label selectors in the syntax of kubectl, with an optional source before a key: "k8s:app=web,
// tier in (front, back), !canary". The datapath receives the result as a message, so it need not parse text.
//
// It is for filters of commands. Selectors of policies have other rules.
package selector

import (
	"fmt"
	"strings"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

const (
	exists    = datapathv1.LabelOperator_LABEL_OPERATOR_EXISTS
	notExists = datapathv1.LabelOperator_LABEL_OPERATOR_NOT_EXISTS
	in        = datapathv1.LabelOperator_LABEL_OPERATOR_IN
	notIn     = datapathv1.LabelOperator_LABEL_OPERATOR_NOT_IN
)

// Parse parses requirements separated by commas: "key", "!key", "key=value", "key==value", "key!=value", "key in
// (a,b)", "key notin (a,b)". A source may precede a key, as in "k8s:app". Errors contain the byte offset and the
// expected syntax.
func Parse(text string) (*datapathv1.LabelSelector, error) {
	p := parser{text: text}
	s := &datapathv1.LabelSelector{}
	for {
		r, err := p.requirement()
		if err != nil {
			return nil, err
		}
		s.Requirements = append(s.Requirements, r)
		p.space()
		if p.at == len(p.text) {
			return s, nil
		}
		if !p.take(",") {
			return nil, p.want("a comma")
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

// take skips spaces and consumes the token. It returns false if another text follows.
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

// word consumes the longest run of plain characters and characters in more.
func (p *parser) word(more string) string {
	p.space()
	start := p.at
	for p.at < len(p.text) && (plain(p.text[p.at]) || strings.IndexByte(more, p.text[p.at]) >= 0) {
		p.at++
	}
	return p.text[start:p.at]
}

func (p *parser) requirement() (*datapathv1.LabelRequirement, error) {
	r := &datapathv1.LabelRequirement{Operator: exists}
	if p.take("!") {
		r.Operator = notExists
	}
	p.space()
	start := p.at
	r.Key = p.word(":/")
	if source, key, ok := strings.Cut(r.Key, ":"); ok {
		r.Source, r.Key = source, key
		if source == "" || strings.ContainsAny(source, "/") || strings.Contains(key, ":") {
			p.at = start
			return r, p.want("a key, or a source, a colon and a key")
		}
	}
	if r.Key == "" {
		p.at = start
		return r, p.want("a key")
	}
	if r.Operator == notExists {
		return r, nil
	}
	switch {
	case p.take("!="):
		r.Operator, r.Values = notIn, []string{p.value()}
		return r, nil
	case p.take("=="), p.take("="):
		r.Operator, r.Values = in, []string{p.value()}
		return r, nil
	}
	p.space()
	if p.at == len(p.text) || p.text[p.at] == ',' {
		return r, nil
	}
	start = p.at
	switch p.word("") {
	case "in":
		r.Operator = in
	case "notin":
		r.Operator = notIn
	default:
		p.at = start
		return r, p.want("=, ==, !=, in, notin, or a comma")
	}
	var err error
	r.Values, err = p.values()
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
