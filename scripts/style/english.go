// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// longest is the number of words of the longest sentence that is not counted.
const longest = 34

// pattern is a construction that readers have to read twice.
type pattern struct {
	name string
	// expr matches the construction. excluded are words that its first group must not be.
	expr     *regexp.Regexp
	excluded []string
}

var patterns = []pattern{
	{
		name: "a relative clause as the subject",
		expr: regexp.MustCompile(`(?:^|[.;:] )(?:What|Whatever|Whoever|Who|Whose)\b[^.?]{3,}`),
	},
	{
		name: "a pronoun as the actor",
		expr: regexp.MustCompile(`(?i)\b(?:nobody|no one|whoever|is none|are none|none of them is|` +
			`nothing (?:is|else is|of))\b`),
	},
	{
		name: "a pronoun instead of the noun",
		expr: regexp.MustCompile(`\b(?:those|that|these) of\b|` +
			`\b(?:are|is|as|than) (?:those|that) (?:that|which|who|with|in|at)\b`),
	},
	{
		name: "a causative verb",
		expr: regexp.MustCompile(`\b(?:has|have|had|having) ([\w'-]+) (?:[\w'-]+ ){0,4}?(?:add|answer|ask|be|begin|` +
			`carry|come|count|do|end|find|forget|give|go|hold|keep|know|lead|learn|look|make|name|pass|read|return|` +
			`run|say|see|send|serve|show|start|stay|stop|take|tell|think|wait|wake|write)\b`),
		excluded: []string{"to", "been", "not", "no", "a", "an", "never", "also", "already"},
	},
	{
		name: "telling without an actor",
		expr: regexp.MustCompile(`\b(?:is|are|was|were|be|been) (?:told|said|asked|named)\b|\bsays? so\b|` +
			`\bhears? of\b|\bspeaks? of\b`),
	},
	{
		name: "an idiom",
		expr: regexp.MustCompile(`(?i)\b(?:of now|all the same|the like|is there once|comes? to|brings? about|` +
			`looks? away|lies? beside|stands? (?:in|beside|there|for)|come[s]? and go|leads? (?:on|away)|` +
			`for (?:so|as) long as|as it is|as they are|the other way round|on its own account|` +
			`wants? (?:to be|at)|wanted (?:are|were|is|was))\b`),
	},
	{name: "a preposition with two meanings", expr: regexp.MustCompile(`\bbesides?\b`)},
	{
		name: "a relative clause instead of the noun",
		expr: regexp.MustCompile(`\b(?:whose|who|whom) (?:it|they|he|she|an?|the) [\w-]+ (?:is|are|belongs?)\b|` +
			`\bwho (?:it is|they are|somebody is)\b`),
	},
	{
		name: "a comment without content",
		expr: regexp.MustCompile(`^[A-Z]\w* (?:is|are|has|have) (?:what|that|those|the one|the ones|of|all that|` +
			`whatever)\b`),
	},
}

// prose is a paragraph, a comment or a message.
type prose struct {
	line int
	text string
}

var (
	comment  = regexp.MustCompile(`^(?://|/\*|\*)\s?(.*?)(?:\*/)?$`)
	message  = regexp.MustCompile(`"((?:[^"\\]|\\.){25,})"`)
	sentence = regexp.MustCompile(`[.!?;:]\s`)
)

// hardSentences lists the places of a file that match a pattern, and its too long sentences.
func hardSentences(name, content string) (places []string) {
	texts := comments
	if strings.HasSuffix(name, ".md") {
		texts = paragraphs
	}
	for _, p := range texts(name, content) {
		for _, pat := range patterns {
			for _, found := range pat.find(p.text) {
				places = append(places, fmt.Sprintf("%s:%d: %s: %s", name, p.line, pat.name, found))
			}
		}
		for _, s := range sentence.Split(p.text, -1) {
			if n := len(strings.Fields(s)); n > longest {
				places = append(places, fmt.Sprintf("%s:%d: a sentence of %d words", name, p.line, n))
			}
		}
	}
	return places
}

func (p pattern) find(text string) (found []string) {
	for _, at := range p.expr.FindAllStringSubmatchIndex(text, -1) {
		question := at[1] < len(text) && text[at[1]] == '?'
		if question || len(at) > 2 && slices.Contains(p.excluded, text[at[2]:at[3]]) {
			continue
		}
		found = append(found, strings.TrimSpace(text[at[0]:min(at[1], at[0]+60)]))
	}
	return found
}

// paragraphs returns the paragraphs and table cells of a Markdown file outside of code blocks.
func paragraphs(_, content string) (all []prose) {
	var current prose
	flush := func() {
		if current.text != "" {
			all = append(all, current)
		}
		current = prose{}
	}
	code := false
	for i, line := range strings.Split(content, "\n") {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "```"):
			code = !code
		case code:
		case strings.HasPrefix(line, "|"):
			for cell := range strings.SplitSeq(strings.Trim(line, "|"), "|") {
				all = append(all, prose{i + 1, strings.TrimSpace(cell)})
			}
		case line == "":
			flush()
		default:
			current.add(i+1, line)
		}
	}
	flush()
	return all
}

// comments returns the comments of a Go, C or proto file, and the string literals of Go that are sentences.
func comments(name, content string) (all []prose) {
	var current prose
	flush := func() {
		if current.text != "" {
			all = append(all, current)
		}
		current = prose{}
	}
	block := false
	for i, line := range strings.Split(content, "\n") {
		text := strings.TrimSpace(line)
		isGo := strings.HasSuffix(name, ".go")
		if !isGo && strings.HasPrefix(text, "/*") {
			block = true
		}
		var got string
		if block || strings.HasPrefix(text, "//") && !strings.HasPrefix(text, "//go:") {
			m := comment.FindStringSubmatch(text)
			if m != nil && !strings.Contains(text, "SPDX") && !strings.Contains(text, "Copyright") {
				got = strings.TrimSpace(m[1])
			}
		}
		if strings.Contains(text, "*/") {
			block = false
		}
		if got != "" {
			current.add(i+1, got)
			continue
		}
		flush()
		if !isGo {
			continue
		}
		for _, m := range message.FindAllStringSubmatch(line, -1) {
			if len(strings.Fields(m[1])) >= 5 {
				all = append(all, prose{i + 1, m[1]})
			}
		}
	}
	flush()
	return all
}

func (p *prose) add(line int, text string) {
	if p.text == "" {
		p.line, p.text = line, text
		return
	}
	p.text += " " + text
}
