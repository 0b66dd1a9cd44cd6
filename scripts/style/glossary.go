// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

const (
	glossaryFile = "docs/glossary.md"
	// exceptionsFile has a line "FILE: WORDS" for words that a file must use outside of code, such as a quotation of
	// another system.
	exceptionsFile = "scripts/style/words.txt"
)

// glossary has the terms of the project, and the words that must not be used instead of them.
type glossary struct {
	missing  map[string]*regexp.Regexp // by term: what a text contains that uses it; used terms are deleted
	phrases  []phrase
	expr     *regexp.Regexp // a group for each phrase
	excepted map[string]bool
	needed   map[string]bool // exceptions that occurred
}

// phrase is one or more words of the column "not".
type phrase struct{ words, term string }

// verbs are the forms of irregular verbs in phrases.
var verbs = map[string]string{
	"be": "(?:is|are|was|were|be|been|being|isn't|stays?|stayed)",
	"go": "(?:go|goes|went|gone|going)",
}

var (
	separator = regexp.MustCompile(`[,;] `)
	article   = regexp.MustCompile(`^(?:to|an?|the) | (?:an?|the)\b`)
)

// newGlossary reads the tables of the glossary. faults are rows in a wrong form or order.
func newGlossary(content, exceptions string) (g *glossary, faults []string) {
	g = &glossary{missing: map[string]*regexp.Regexp{}, excepted: map[string]bool{}, needed: map[string]bool{}}
	for line := range strings.Lines(exceptions) {
		g.excepted[strings.TrimSpace(line)] = true
	}
	last := ""
	for i, line := range strings.Split(content, "\n") {
		if !strings.HasPrefix(line, "|") {
			last = ""
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for j := range cells {
			cells[j] = strings.TrimSpace(cells[j])
		}
		term := cells[0]
		if len(cells) != 3 || term == "" || cells[1] == "" {
			faults = append(faults, fmt.Sprintf("%s:%d: a row has a term, a meaning and words not to use", glossaryFile, i+1))
			continue
		}
		if term == "term" || strings.HasPrefix(term, "---") {
			continue
		}
		key := strings.ToLower(strings.TrimPrefix(term, "to "))
		if key < last {
			faults = append(faults, fmt.Sprintf("%s:%d: %q belongs above %q", glossaryFile, i+1, key, last))
		}
		last = key
		for _, t := range separator.Split(term, -1) {
			g.missing[t] = inflected(t)
		}
		for _, words := range separator.Split(cells[2], -1) {
			if words != "" {
				g.phrases = append(g.phrases, phrase{words, term})
			}
		}
	}
	// The first alternative wins, so longer phrases come first.
	slices.SortFunc(g.phrases, func(a, b phrase) int {
		return cmp.Or(len(b.words)-len(a.words), strings.Compare(a.words, b.words))
	})
	var groups []string
	for _, p := range g.phrases {
		words := strings.Fields(p.words)
		for i, w := range words {
			forms, irregular := verbs[w]
			if !irregular {
				forms = regexp.QuoteMeta(w)
			}
			if w == strings.ToLower(w) { // VIP is not vip
				forms = "(?i:" + forms + ")"
			}
			words[i] = forms
		}
		groups = append(groups, "("+strings.Join(words, `\s+`)+")")
	}
	g.expr = regexp.MustCompile(`\b(?:` + strings.Join(groups, "|") + `)\b`)
	return g, faults
}

// inflected matches the words of a term in this order, in any form, at most four words apart.
func inflected(term string) *regexp.Regexp {
	words := strings.Fields(article.ReplaceAllString(term, " "))
	for i, w := range words {
		if len(w) > 3 {
			w = strings.TrimRight(w, "ey")
		}
		words[i] = `\b` + regexp.QuoteMeta(w) + `\w*`
	}
	return regexp.MustCompile(`(?i)` + strings.Join(words, `\W+(?:\w+\W+){0,4}?`))
}

// check returns the places of a file that use a word instead of a term. In comments, names of the same Go file are no
// words.
func (g *glossary) check(name, content string) (places []string, err error) {
	if name == glossaryFile || strings.HasPrefix(name, "docs/record/") {
		return nil, nil
	}
	texts, names, err := allProse(name, content)
	if err != nil {
		return nil, err
	}
	for _, t := range texts {
		for term, expr := range g.missing {
			if expr.MatchString(t.text) {
				delete(g.missing, term)
			}
		}
		for _, at := range g.expr.FindAllStringSubmatchIndex(t.text, -1) {
			used := t.text[at[0]:at[1]]
			exception := name + ": " + strings.ToLower(used)
			if t.comment && names[used] {
				continue
			}
			if g.excepted[exception] {
				g.needed[exception] = true
				continue
			}
			p := g.phrases[slices.IndexFunc(at[2:], func(i int) bool { return i >= 0 })/2]
			line := t.line + strings.Count(t.text[:at[0]], "\n")
			places = append(places, fmt.Sprintf("%s:%d: %q, for which %s has the term %q", name, line, used, glossaryFile,
				p.term))
		}
	}
	return places, nil
}

// unused returns the terms and the exceptions that no file uses.
func (g *glossary) unused() (faults []string) {
	for _, term := range slices.Sorted(maps.Keys(g.missing)) {
		faults = append(faults, fmt.Sprintf("%s: %q occurs nowhere else", glossaryFile, term))
	}
	for _, e := range slices.Sorted(maps.Keys(g.excepted)) {
		if !g.needed[e] {
			faults = append(faults, fmt.Sprintf("%s: %q is not needed", exceptionsFile, e))
		}
	}
	return faults
}

// checkGlossary compares all files with the glossary, if it is one of them.
func checkGlossary(names []string) (faults []string, err error) {
	if !slices.Contains(names, glossaryFile) {
		return nil, nil
	}
	content, err := os.ReadFile(glossaryFile)
	if err != nil {
		return nil, err
	}
	exceptions, err := os.ReadFile(exceptionsFile)
	if err != nil {
		return nil, err
	}
	g, faults := newGlossary(string(content), string(exceptions))
	for _, name := range names {
		content, err := os.ReadFile(filepath.Clean(name))
		if err != nil {
			return nil, err
		}
		places, err := g.check(name, string(content))
		if err != nil {
			return nil, err
		}
		faults = append(faults, places...)
	}
	return append(faults, g.unused()...), nil
}
