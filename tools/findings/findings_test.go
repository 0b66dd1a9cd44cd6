// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// tree is a small repository with a correct record and up-to-date tables.
var tree = map[string]string{
	causesFile: table("id|title", "limit|A shared limit"),
	roundsFile: table("round|dates|title|what", "1|2026-11-21|First|the whole", "2|2026-11-22|Second|the rest"),
	findingsFile: table("id|round|severity|title|cause|commits|tests",
		"F001|1|high|One pod fills the map|limit|bpf: count each pod|TestMap TestPod/one_pod's_turn",
		"F002|2|low|One pod fills the log|limit|-|none: by construction",
		"F003|2|high|One pod fills the disk|limit|kit: bound; kit: say so|TestMap"),
	attacksFile:                table("id|round|attack|packets|result|tests", "A001|1|A flood|1,000|Dropped|TestPod"),
	"docs/reference/rounds.md": "# Rounds\n<!-- rounds -->\n<!-- end -->\n",
	"docs/causes.md": "# Causes\n<!-- causes -->\n<!-- end -->\n" +
		"## A shared limit\nExample: F001.\n",
	"bpf/map_test.go": "package bpf\n\nimport \"testing\"\n\nfunc TestMap(t *testing.T) {}\n",
	"pod/pod_test.go": "package pod\n\nimport \"testing\"\n\n" +
		"func TestPod(t *testing.T) { t.Run(\"one pod's turn\", func(*testing.T) {}) }\n",
	// These files must not be read.
	"third_party/x_test.go": "package broken",
	"bin/copy/x_test.go":    "not Go",
}

// table returns lines of cells in the form of the record.
func table(lines ...string) string {
	return strings.ReplaceAll(strings.Join(lines, "\n")+"\n", "|", "\t")
}

// write makes the files of a tree in a new directory.
func write(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func problemsOf(t *testing.T, root string, write bool) []string {
	t.Helper()
	problems, err := run(root, write, nil)
	if err != nil {
		t.Fatal(err)
	}
	return problems
}

func readFile(t *testing.T, elements ...string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(elements...))
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

func TestTablesAreThoseOfTheRecord(t *testing.T) {
	root := write(t, tree)
	want := []string{
		`docs/reference/rounds.md: the block "rounds" differs from docs/record (try: scripts/findings -write)`,
		`docs/causes.md: the block "causes" differs from docs/record (try: scripts/findings -write)`,
	}
	if got := problemsOf(t, root, false); !slices.Equal(got, want) {
		t.Errorf("before -write: %q, want %q", got, want)
	}
	if got := readFile(t, root, "docs/causes.md"); got != tree["docs/causes.md"] {
		t.Errorf("a check has changed docs/causes.md to %q", got)
	}
	for _, withWrite := range []bool{true, false} {
		if got := problemsOf(t, root, withWrite); len(got) > 0 {
			t.Errorf("-write=%v: %q", withWrite, got)
		}
	}

	page := readFile(t, root, "docs/reference/rounds.md")
	line := "| 1 | 2026-11-21 | First: the whole | 1 | 1 | 1 |\n| 2 | 2026-11-22 | Second: the rest | 2 | 1 | 0 |\n" + end
	if !strings.Contains(page, line) {
		t.Errorf("docs/reference/rounds.md is %q, want in it %q", page, line)
	}
	line = "| [A shared limit](#a-shared-limit) | `limit` | 3 | 2 | 2 |\n"
	if causes := readFile(t, root, "docs/causes.md"); !strings.Contains(causes, line) {
		t.Errorf("docs/causes.md is %q, want in it %q", causes, line)
	}
}

func TestMistakesAreNamed(t *testing.T) {
	good := write(t, tree)
	problemsOf(t, good, true)
	for _, c := range []struct{ name, file, from, to, want string }{
		{"missing cell", findingsFile, "\tTestMap TestPod", " TestMap TestPod", findingsFile + ":2: has 6 cells, want 7"},
		{
			"empty cell", findingsFile, "\t-\t", "\t\t",
			findingsFile + `:3: commits: "" is empty or begins or ends with a space`,
		},
		{"id with a gap", findingsFile, "F002", "F004", findingsFile + `:3: id "F004": want F002`},
		{"unknown round", findingsFile, "F002\t2", "F002\t3", findingsFile + `:3: round "3" is not listed in ` + roundsFile},
		{"severity", findingsFile, "\tlow\t", "\tmild\t", findingsFile + `:3: severity "mild": want one of`},
		{"cause", findingsFile, "log\tlimit", "log\tluck", findingsFile + `:3: cause "luck" is not listed in ` + causesFile},
		{"title with a period", findingsFile, "the log", "the log.", findingsFile + ":3: title ends with a period"},
		{
			"title in lower case", findingsFile, "One pod fills the log", "one pod fills it",
			findingsFile + ":3: title begins with a lower",
		},
		{"title with a bar", findingsFile, "the log", "a|b", findingsFile + ":3: title contains a character"},
		{
			"long title", findingsFile, "the log", strings.Repeat("logs ", 30) + "all",
			findingsFile + ":3: title has 167 characters",
		},
		{"title twice", findingsFile, "the log", "the map", findingsFile + ":3: another finding has this title"},
		{"commit", findingsFile, "kit: bound;", "bound;", findingsFile + `:4: commit "bound": want the subject of a commit`},
		{"attack", attacksFile, "A001", "A002", attacksFile + `:2: id "A002": want A001`},
		{"result", attacksFile, "Dropped", "Dropped.", attacksFile + ":2: result ends with a period"},
		{"order of rounds", roundsFile, "\n2\t", "\n3\t", roundsFile + `:3: round "3": want 2`},
		{"cause twice", causesFile, "limit\n", "limit\nlimit\tAgain\n", causesFile + ":3: cause limit is listed twice"},
		{"test", findingsFile, "TestMap TestPod/", "TestGone TestPod/", "F001: TestGone: no such test function"},
		{"test of an attack", attacksFile, "TestPod", "TestGone", "A001: TestGone: no such test function"},
		{"subtest", findingsFile, "one_pod's", "two_pods'", "F001: TestPod/two_pods'_turn: " +
			"no string literal in the test's package is"},
		{
			"section", "docs/causes.md", "## A shared limit", "## Limits",
			`docs/causes.md: no section "A shared limit" for the cause limit`,
		},
		{"example", "docs/causes.md", "F001", "none", `docs/causes.md: section "A shared limit" names no finding`},
		{
			"unknown example", "docs/causes.md", "F001", "F009",
			`docs/causes.md: section "A shared limit": F009 has not the cause limit`,
		},
		{"unknown attack", "docs/causes.md", "F001.", "F001, A009.", `docs/causes.md: section "A shared limit": no attack`},
		{"marker", "docs/causes.md", "<!-- causes -->", "", "docs/causes.md: no block from <!-- causes --> to <!-- end -->"},
		{"figure", "docs/causes.md", "| 3 |", "| 4 |", `docs/causes.md: the block "causes" differs`},
	} {
		t.Run(c.name, func(t *testing.T) {
			files := maps.Clone(tree)
			for _, p := range pages {
				files[p.file] = readFile(t, good, p.file)
			}
			before := files[c.file]
			if files[c.file] = strings.Replace(before, c.from, c.to, 1); files[c.file] == before {
				t.Fatalf("%s has no %q", c.file, c.from)
			}
			got := problemsOf(t, write(t, files), false)
			if !slices.ContainsFunc(got, func(p string) bool { return strings.HasPrefix(p, c.want) }) {
				t.Errorf("%q, want one that begins with %q", got, c.want)
			}
		})
	}
}

// TestTablesAreWrittenBeforeTheirTestsExist allows a record to name tests of a branch that is merged later.
func TestTablesAreWrittenBeforeTheirTestsExist(t *testing.T) {
	files := maps.Clone(tree)
	files["bpf/map_test.go"] = "package bpf\n"
	root := write(t, files)
	if got := problemsOf(t, root, true); len(got) != 2 { // of F001 and F003
		t.Errorf("%q, want the missing test of two findings", got)
	}
	if page := readFile(t, root, "docs/reference/rounds.md"); !strings.Contains(page, "Second: the rest") {
		t.Errorf("docs/reference/rounds.md is %q, want in it the rounds", page)
	}
}

func TestHeaderOfAnotherFormatIsAnError(t *testing.T) {
	files := maps.Clone(tree)
	files[attacksFile] = "id\tattack\n"
	if _, err := run(write(t, files), false, nil); err == nil || !strings.Contains(err.Error(), attacksFile) {
		t.Errorf("%v, want an error that names %s", err, attacksFile)
	}
}

func TestShowNamesTheCommands(t *testing.T) {
	root := write(t, tree)
	rec, err := readRecord(root)
	if err != nil {
		t.Fatal(err)
	}
	declared, err := readTests(root)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := show(&out, rec, declared, []string{"F001", "F002", "A001", "limit", "2"}); err != nil {
		t.Fatal(err)
	}
	want := `F001  high, limit
One pod fills the map
  commit  bpf: count each pod
  test    go test -count=1 ./bpf -run '^TestMap$'
  test    go test -count=1 ./pod -run '^TestPod$/^one_pod.s_turn$'
F002  low, limit
One pod fills the log
  no test: by construction
A001
A flood
  result  Dropped
  test    go test -count=1 ./pod -run '^TestPod$'
F001  high         One pod fills the map
F002  low          One pod fills the log
F003  high         One pod fills the disk
F002  low          One pod fills the log
F003  high         One pod fills the disk
`
	if out.String() != want {
		t.Errorf("printed\n%s\nwant\n%s", out.String(), want)
	}
	if err := show(&out, rec, declared, []string{"F009"}); err == nil {
		t.Error("an unknown finding is no error")
	}
}

// TestConsoleBlockOfTheDocument compares the example of docs/robustness.md with what the command prints.
func TestConsoleBlockOfTheDocument(t *testing.T) {
	const root = "../.."
	_, block, ok := strings.Cut(readFile(t, root, "docs/robustness.md"), "```\n$ scripts/findings ")
	command, rest, ended := strings.Cut(block, "\n")
	want, _, closed := strings.Cut(rest, "```\n")
	if !ok || !ended || !closed {
		t.Fatal("docs/robustness.md shows no run of scripts/findings")
	}
	rec, err := readRecord(root)
	if err != nil {
		t.Fatal(err)
	}
	declared, err := readTests(root)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := show(&out, rec, declared, strings.Fields(command)); err != nil {
		t.Fatal(err)
	}
	if out.String() != want {
		t.Errorf("scripts/findings %s prints\n%s\nthe document has\n%s", command, out.String(), want)
	}
}
