// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// The files of the record, relative to the root of the repository.
const (
	findingsFile = "docs/record/findings.tsv"
	attacksFile  = "docs/record/attacks.tsv"
	causesFile   = "docs/record/causes.tsv"
	roundsFile   = "docs/record/rounds.tsv"
)

const (
	maxTitle   = 150 // maximum length of a title, an attack and a result
	maxSubject = 100 // maximum length of a commit subject
)

// severities lists the values of the column severity, from the worst to the least.
var severities = []string{"high", "medium-high", "medium", "medium-low", "low", "none"}

// A finding is one line of findings.tsv.
type finding struct {
	id, severity, title, cause string
	round                      int
	commits                    []string
	tests
}

// An attack is one line of attacks.tsv.
type attack struct {
	id, attack, packets, result string
	round                       int
	tests
}

// A cause is one line of causes.tsv. The title is a heading of docs/causes.md.
type cause struct{ id, title string }

// A round is one line of rounds.tsv.
type round struct {
	number             int
	dates, what, title string
}

// tests is the content of the column tests: test names, or the reason for their absence.
type tests struct {
	names []string
	none  string
}

// record is the content of docs/record, with the errors in the format of its lines.
type record struct {
	findings []finding
	attacks  []attack
	causes   []cause
	rounds   []round
	problems []string
}

func readRecord(root string) (*record, error) {
	r := &record{}
	for _, f := range []struct {
		name, columns string
		add           func(place string, cells []string)
	}{
		{causesFile, "id title", r.addCause},
		{roundsFile, "round dates title what", r.addRound},
		{findingsFile, "id round severity title cause commits tests", r.addFinding},
		{attacksFile, "id round attack packets result tests", r.addAttack},
	} {
		content, err := os.ReadFile(filepath.Join(root, f.name))
		if err != nil {
			return nil, err
		}
		columns := strings.Fields(f.columns)
		header, lines, _ := strings.Cut(string(content), "\n")
		if header != strings.Join(columns, "\t") {
			return nil, fmt.Errorf("%s: the first line must name the columns %q", f.name, columns)
		}
		number := 1
		for line := range strings.Lines(lines) {
			number++
			place := fmt.Sprintf("%s:%d", f.name, number)
			cells := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
			if len(cells) != len(columns) {
				r.problem(place, "has %d cells, want %d", len(cells), len(columns))
				continue
			}
			for i, c := range cells {
				if c == "" || c != strings.TrimSpace(c) {
					r.problem(place, "%s: %q is empty or begins or ends with a space", columns[i], c)
				}
			}
			f.add(place, cells)
		}
	}
	return r, nil
}

func (r *record) problem(place, format string, args ...any) {
	r.problems = append(r.problems, place+": "+fmt.Sprintf(format, args...))
}

func (r *record) addCause(place string, cells []string) {
	c := cause{id: cells[0], title: cells[1]}
	if slices.ContainsFunc(r.causes, func(o cause) bool { return o.id == c.id || o.title == c.title }) {
		r.problem(place, "cause %s is listed twice", c.id)
	}
	r.causes = append(r.causes, c)
}

func (r *record) addRound(place string, cells []string) {
	n, err := strconv.Atoi(cells[0])
	if err != nil || n != len(r.rounds)+1 {
		r.problem(place, "round %q: want %d", cells[0], len(r.rounds)+1)
	}
	r.rounds = append(r.rounds, round{number: n, dates: cells[1], title: cells[2], what: cells[3]})
}

func (r *record) addFinding(place string, cells []string) {
	f := finding{id: cells[0], severity: cells[2], title: cells[3], cause: cells[4], tests: readTestsCell(cells[6])}
	f.round = r.roundOf(place, cells[1])
	if want := fmt.Sprintf("F%03d", len(r.findings)+1); f.id != want {
		r.problem(place, "id %q: want %s", f.id, want)
	}
	if !slices.Contains(severities, f.severity) {
		r.problem(place, "severity %q: want one of %q", f.severity, severities)
	}
	if !slices.ContainsFunc(r.causes, func(c cause) bool { return c.id == f.cause }) {
		r.problem(place, "cause %q is not listed in %s", f.cause, causesFile)
	}
	r.sentence(place, "title", f.title)
	if slices.ContainsFunc(r.findings, func(o finding) bool { return o.title == f.title }) {
		r.problem(place, "another finding has this title")
	}
	if cells[5] != "-" {
		f.commits = strings.Split(cells[5], "; ")
	}
	for _, c := range f.commits {
		if !subject.MatchString(c) || utf8.RuneCountInString(c) > maxSubject {
			r.problem(place, "commit %q: want the subject of a commit, of at most %d characters", c, maxSubject)
		}
	}
	r.findings = append(r.findings, f)
}

// subject matches the subject of a commit: "area: what it does".
var subject = regexp.MustCompile(`^[a-zA-Z0-9_./, -]+: \S`)

func (r *record) addAttack(place string, cells []string) {
	a := attack{id: cells[0], attack: cells[2], packets: cells[3], result: cells[4], tests: readTestsCell(cells[5])}
	a.round = r.roundOf(place, cells[1])
	if want := fmt.Sprintf("A%03d", len(r.attacks)+1); a.id != want {
		r.problem(place, "id %q: want %s", a.id, want)
	}
	r.sentence(place, "attack", a.attack)
	r.sentence(place, "result", a.result)
	r.attacks = append(r.attacks, a)
}

// roundOf returns the number of a round, which rounds.tsv must list.
func (r *record) roundOf(place, cell string) int {
	n, err := strconv.Atoi(cell)
	if err != nil || n < 1 || n > len(r.rounds) {
		r.problem(place, "round %q is not listed in %s", cell, roundsFile)
	}
	return n
}

// sentence checks text for a table cell.
func (r *record) sentence(place, column, text string) {
	switch first, _ := utf8.DecodeRuneInString(text); {
	case utf8.RuneCountInString(text) > maxTitle:
		r.problem(place, "%s has %d characters, at most %d are allowed", column, utf8.RuneCountInString(text), maxTitle)
	case strings.ContainsAny(text, "|\r"):
		r.problem(place, "%s contains a character that ends the cell of a table", column)
	case strings.HasSuffix(text, "."):
		r.problem(place, "%s ends with a period", column)
	case first >= 'a' && first <= 'z' && !properName.MatchString(text):
		r.problem(place, "%s begins with a lower-case letter", column)
	}
}

// properName matches names that are written in lower case where they begin a sentence.
var properName = regexp.MustCompile(`^(datapath\.md|etcd|identity|ipam|sluice-[a-z]+|tcpdump) `)

// readTestsCell reads names that are separated by spaces, or "none: REASON".
func readTestsCell(cell string) tests {
	if reason, ok := strings.CutPrefix(cell, "none: "); ok {
		return tests{none: reason}
	}
	return tests{names: strings.Fields(cell)}
}

// check returns the tests of findings and attacks that are not declared.
func (r *record) check(d *declarations) []string {
	var problems []string
	look := func(id string, t tests) {
		for _, name := range t.names {
			if why := d.missing(name); why != "" {
				problems = append(problems, fmt.Sprintf("%s: %s: %s", id, name, why))
			}
		}
	}
	for _, f := range r.findings {
		look(f.id, f.tests)
	}
	for _, a := range r.attacks {
		look(a.id, a.tests)
	}
	return problems
}
