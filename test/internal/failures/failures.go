// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package failures compares what tests want to be seen while something is away with the tables of docs/failures.md,
// and has the words in which both say it.
package failures

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/test/internal/cni"
)

// Document is the path of the document, from the directory of a test package.
const Document = "../../docs/failures.md"

var update = flag.Bool("update-failures", false, "write the tables of docs/failures.md anew")

// Row is what is seen while one thing is away.
type Row struct {
	// Cells are those of the first table, of which the first is what is away.
	Cells []string
	// Says are the parts of what is printed, one list for each column of the second table.
	Says [][]string
}

// Tables are the two tables of a test: what is seen, and what is said.
type Tables struct {
	// Place is the text of the comment in the document that the tables follow.
	Place string
	// Columns are those of the first table, Says those of the second one, without what is away.
	Columns, Says []string
	Rows          []Row
}

// Command executes a `sluice` against an instance, and returns its exit code and what it prints.
func Command(ctx context.Context, t testing.TB, sluice, instance string, args ...string) (exit int, out string) {
	t.Helper()
	args = append([]string{"--instance", instance}, args...)
	output, err := exec.CommandContext(ctx, sluice, args...).CombinedOutput() //nolint:gosec // ours
	var ended *exec.ExitError
	switch {
	case errors.As(err, &ended):
		return ended.ExitCode(), string(output)
	case err != nil:
		t.Fatalf("sluice %q: %v", args, err)
	}
	return 0, string(output)
}

// Want reports each cell of a row that is not as it was seen, and returns whether there was none.
func (s Tables) Want(t testing.TB, row Row, seen []string) bool {
	t.Helper()
	if len(seen) != len(s.Columns) || len(row.Cells) != len(s.Columns) {
		t.Fatalf("%d cells, %d wanted, of %d columns: %q", len(seen), len(row.Cells), len(s.Columns), seen)
	}
	for i, want := range row.Cells {
		if seen[i] != want {
			t.Errorf("%s: %q, want %q", s.Columns[i], seen[i], want)
		}
	}
	return slices.Equal(seen, row.Cells)
}

// text is the tables as the document has them.
func (s Tables) text() string {
	var b strings.Builder
	line := func(cells ...string) { fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | ")) }
	line(s.Columns...)
	line(slices.Repeat([]string{"---"}, len(s.Columns))...)
	for _, r := range s.Rows {
		line(r.Cells...)
	}
	b.WriteString("\n")
	line(append([]string{s.Columns[0]}, s.Says...)...)
	line(slices.Repeat([]string{"---"}, 1+len(s.Says))...)
	for _, r := range s.Rows {
		cells := []string{r.Cells[0]}
		for _, parts := range r.Says {
			cells = append(cells, code(parts))
		}
		line(cells...)
	}
	return b.String()
}

// code sets the parts of a text as code.
func code(parts []string) string {
	if len(parts) == 0 {
		return "–"
	}
	return "`" + strings.Join(parts, "…`, `") + "…`"
}

// Compare wants the tables to be those of the document, after it has written them there if -update-failures is set.
func (s Tables) Compare(t *testing.T) {
	t.Helper()
	content, err := os.ReadFile(Document)
	if err != nil {
		t.Fatal(err)
	}
	begin, end := "<!-- "+s.Place+" -->\n", "<!-- end -->\n"
	before, rest, ok := strings.Cut(string(content), begin)
	have, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s has no place for the tables: %s", Document, s.Place)
	}
	want := s.text()
	if *update {
		if err := os.WriteFile(Document, []byte(before+begin+want+end+after), 0o600); err != nil {
			t.Fatal(err)
		}
		have = want
	}
	if have != want {
		t.Errorf("the tables are not those of the test; `go test -run Document -update-failures` in this directory "+
			"writes them\ngot\n%s\nwant\n%s", have, want)
	}
}

// Code is the code of CNI that a plugin ended with, 0 for success, and what it said. The error is that of a plugin
// that ended in another way.
func Code(err error) (code, text string, other error) {
	var refused *cni.Error
	switch {
	case errors.As(err, &refused):
		return fmt.Sprint(refused.Code), refused.Message + "; " + refused.Details, nil
	case err != nil:
		return "", "", err
	}
	return "0", "", nil
}

// AgeUnable makes what a STATUS of the plugin remembered, that no ADD works, older than it tolerates. It remembers
// nothing if one works.
func AgeUnable(t testing.TB, runDir string) {
	t.Helper()
	ago := time.Now().Add(-61 * time.Second)
	err := os.Chtimes(filepath.Join(runDir, "cni-unable"), ago, ago)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
}

// Shown is the exit code of `sluice status` and what its row Ready says.
func Shown(exit int, out string) string { return fmt.Sprintf("%d, %s", exit, readiness(out)) }

func readiness(out string) string {
	for line := range strings.Lines(out) {
		if rest, ok := strings.CutPrefix(line, "Ready "); ok {
			switch strings.TrimSpace(rest) {
			case "yes":
				return "ready"
			case "no":
				return "not ready"
			}
			return "ready for known labels"
		}
	}
	return "no row Ready"
}

// Lacks are the parts that a text does not have.
func Lacks(text string, parts []string) (missing []string) {
	for _, part := range parts {
		if !strings.Contains(text, part) {
			missing = append(missing, part)
		}
	}
	return missing
}
