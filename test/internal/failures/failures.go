// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package failures compares the tables of docs/failures.md and their messages with the results that tests expect while
// they stop a component, and defines the terms that both use.
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

// Document and Messages are the paths of the documents, from the directory of a test package.
const (
	Document = "../../docs/failures.md"
	Messages = "../../docs/reference/failure-messages.md"
)

var update = flag.Bool("update-failures", false, "rewrite the tables of docs/failures.md and of its messages")

// Row describes the effects of one failure.
type Row struct {
	// Cells are the cells of the first table. The first cell names the component that is down.
	Cells []string
	// Says are expected parts of printed messages, one list for each column of the second table.
	Says [][]string
}

// Tables are the two tables of a test: the effects of failures, and the messages.
type Tables struct {
	// Place is the text of the comment in both documents above the table.
	Place string
	// Columns are the columns of the first table. Says are the columns of the second table, without the first.
	Columns, Says []string
	Rows          []Row
}

// Command executes the program sluice for an instance, and returns its exit code and its output.
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

// Want reports each cell of a row that differs from what the test saw, and returns whether all are equal.
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

// table returns a table as Markdown.
func table(columns []string, rows [][]string) string {
	var b strings.Builder
	line := func(cells []string) { fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | ")) }
	line(columns)
	line(slices.Repeat([]string{"---"}, len(columns)))
	for _, cells := range rows {
		line(cells)
	}
	return b.String()
}

// code formats the parts of a text as code.
func code(parts []string) string {
	if len(parts) == 0 {
		return "–"
	}
	return "`" + strings.Join(parts, "…`, `") + "…`"
}

// Compare fails the test if the tables differ from those in the documents. With -update-failures it first writes them
// to the documents.
func (s Tables) Compare(t *testing.T) {
	t.Helper()
	var effects, messages [][]string
	for _, r := range s.Rows {
		effects = append(effects, r.Cells)
		says := []string{r.Cells[0]}
		for _, parts := range r.Says {
			says = append(says, code(parts))
		}
		messages = append(messages, says)
	}
	s.compare(t, Document, table(s.Columns, effects))
	s.compare(t, Messages, table(append([]string{s.Columns[0]}, s.Says...), messages))
}

// compare fails the test if the table of a document differs from the wanted one.
func (s Tables) compare(t *testing.T, document, want string) {
	t.Helper()
	content, err := os.ReadFile(document) //nolint:gosec // a document of the repository
	if err != nil {
		t.Fatal(err)
	}
	begin, end := "<!-- "+s.Place+" -->\n", "<!-- end -->\n"
	before, rest, ok := strings.Cut(string(content), begin)
	have, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s has no comment for the table: %s", document, s.Place)
	}
	if *update {
		if err := os.WriteFile(document, []byte(before+begin+want+end+after), 0o600); err != nil {
			t.Fatal(err)
		}
		have = want
	}
	if have != want {
		t.Errorf("the table of %s differs from the test; `go test -run Document -update-failures` in this directory "+
			"writes it\ngot\n%s\nwant\n%s", document, have, want)
	}
}

// Code returns a plugin's CNI error code and message, 0 for success. It returns other if the plugin failed without a
// CNI error.
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

// AgeUnable makes a failure that the plugin's STATUS has stored, that no ADD works, older than the plugin tolerates.
// While an ADD works, there is no stored failure.
func AgeUnable(t testing.TB, runDir string) {
	t.Helper()
	ago := time.Now().Add(-61 * time.Second)
	err := os.Chtimes(filepath.Join(runDir, "cni-unable"), ago, ago)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
}

// Shown returns the exit code of `sluice status` and the value of its row Ready.
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

// Lacks returns the parts that a text does not contain.
func Lacks(text string, parts []string) (missing []string) {
	for _, part := range parts {
		if !strings.Contains(text, part) {
			missing = append(missing, part)
		}
	}
	return missing
}
