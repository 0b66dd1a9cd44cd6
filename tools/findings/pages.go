// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

const end = "<!-- end -->\n"

// A page is a document whose blocks between "<!-- NAME -->" and "<!-- end -->" come from the record.
type page struct {
	file   string
	blocks func(*record) map[string]string
	check  func(r *record, content string) []string
}

var pages = []page{
	{"docs/reference/rounds.md", rounds, func(*record, string) []string { return nil }},
	{"docs/causes.md", causes, causeSections},
}

// compare returns the blocks of the page that differ from the record. It writes them if write is set.
func (p page) compare(root string, r *record, write bool) ([]string, error) {
	path := filepath.Join(root, p.file)
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	text := string(content)
	var problems []string
	for name, want := range p.blocks(r) {
		begin := "<!-- " + name + " -->\n"
		before, rest, ok := strings.Cut(text, begin)
		is, after, ended := strings.Cut(rest, end)
		switch {
		case !ok || !ended:
			problems = append(problems, fmt.Sprintf("%s: no block from <!-- %s --> to <!-- end -->", p.file, name))
		case is != want && write:
			text = before + begin + want + end + after
		case is != want:
			problems = append(problems,
				fmt.Sprintf("%s: the block %q differs from docs/record (try: scripts/findings -write)", p.file, name))
		}
	}
	slices.Sort(problems)
	if text != string(content) {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return nil, err
		}
	}
	return append(problems, p.check(r, text)...), nil
}

// rounds returns the table of docs/reference/rounds.md.
func rounds(r *record) map[string]string {
	var table strings.Builder
	table.WriteString("| round | dates | what was examined | findings | high | attacks without a finding |\n" +
		"|---|---|---|---|---|---|\n")
	for _, o := range r.rounds {
		in := r.of(func(f finding) bool { return f.round == o.number })
		attacks := 0
		for _, a := range r.attacks {
			if a.round == o.number {
				attacks++
			}
		}
		fmt.Fprintf(&table, "| %d | %s | %s: %s | %d | %d | %d |\n",
			o.number, o.dates, o.title, o.what, len(in), high(in), attacks)
	}
	return map[string]string{"rounds": table.String()}
}

// causes returns the table of docs/causes.md.
func causes(r *record) map[string]string {
	type row struct {
		cause
		all, high, latest int
	}
	var rows []row
	for _, c := range r.causes {
		in := r.of(func(f finding) bool { return f.cause == c.id })
		latest := 0
		for _, f := range in {
			if f.round == len(r.rounds) {
				latest++
			}
		}
		rows = append(rows, row{c, len(in), high(in), latest})
	}
	slices.SortStableFunc(rows, func(a, b row) int { return cmp.Or(b.high-a.high, b.all-a.all) })
	var table strings.Builder
	table.WriteString("| cause | in the data | findings | high | in the latest round |\n|---|---|---|---|---|\n")
	for _, o := range rows {
		fmt.Fprintf(&table, "| [%s](#%s) | `%s` | %d | %d | %d |\n", o.title, anchor(o.title), o.id, o.all, o.high, o.latest)
	}
	return map[string]string{"causes": table.String()}
}

var (
	findingID = regexp.MustCompile(`\bF[0-9]{3,}\b`)
	attackID  = regexp.MustCompile(`\bA[0-9]{3,}\b`)
)

// causeSections returns the causes without a section, the findings that a section names although they have another
// cause, and the attacks that it names and that are not in the record.
func causeSections(r *record, content string) []string {
	var problems []string
	sections := map[string]string{}
	for _, s := range strings.Split("\n"+content, "\n## ")[1:] {
		title, body, _ := strings.Cut(s, "\n")
		sections[title] = body
	}
	for _, c := range r.causes {
		body, ok := sections[c.title]
		if !ok {
			problems = append(problems, fmt.Sprintf("docs/causes.md: no section %q for the cause %s", c.title, c.id))
			continue
		}
		ids := findingID.FindAllString(body, -1)
		if len(ids) == 0 {
			problems = append(problems, fmt.Sprintf("docs/causes.md: section %q names no finding as its example", c.title))
		}
		for _, id := range ids {
			if !slices.ContainsFunc(r.findings, func(f finding) bool { return f.id == id && f.cause == c.id }) {
				problems = append(problems, fmt.Sprintf("docs/causes.md: section %q: %s has not the cause %s", c.title, id, c.id))
			}
		}
		for _, id := range attackID.FindAllString(body, -1) {
			if !slices.ContainsFunc(r.attacks, func(a attack) bool { return a.id == id }) {
				problems = append(problems, fmt.Sprintf("docs/causes.md: section %q: no attack is called %s", c.title, id))
			}
		}
	}
	return problems
}

// of returns the findings that a function accepts.
func (r *record) of(is func(finding) bool) []finding {
	var in []finding
	for _, f := range r.findings {
		if is(f) {
			in = append(in, f)
		}
	}
	return in
}

func high(in []finding) int {
	n := 0
	for _, f := range in {
		if f.severity == "high" {
			n++
		}
	}
	return n
}

// dropped matches the characters that an anchor of GitHub leaves out.
var dropped = regexp.MustCompile(`[^\p{L}\p{N}\-_ ]`)

func anchor(heading string) string {
	return strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(heading), ""), " ", "-")
}
