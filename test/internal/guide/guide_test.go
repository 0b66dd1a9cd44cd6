// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package guide

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestOutputsAreComparedByShape: outputs differ if a word, a line or the order differs, but not if only a number
// differs.
func TestOutputsAreComparedByShape(t *testing.T) {
	if err := SameShape([]string{"a 1", "", "…", "c 10.244.0.2"}, "a 2\nb\n\nc 10.244.7.3\n"); err != nil {
		t.Error(err)
	}
	for what, c := range map[string]struct {
		want    []string
		printed string
	}{
		"a line is missing":    {[]string{"a", "…", "c"}, "a\nb\n"},
		"another word":         {[]string{"state: READY"}, "state: GONE"},
		"a line more":          {[]string{"a"}, "a\nb"},
		"a line between":       {[]string{"a", "c"}, "a\nb\nc"},
		"nothing is printed":   {[]string{"a"}, ""},
		"something is printed": {nil, "a"},
		"another order":        {[]string{"…", "b", "…", "a", "…"}, "a\nb\n"},
	} {
		if err := SameShape(c.want, c.printed); err == nil {
			t.Errorf("%s: want a difference, got none", what)
		}
	}
}

// TestCommandsEndWhereTheyEnd: a command with an open quote, backslash or here-document continues in the next line,
// and blocks of other kinds contain no commands.
func TestCommandsEndWhereTheyEnd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "guide.md")
	content := strings.Join([]string{
		"```", "$ not executed", "```", "```console", "$ one \\", "  two", "out 1", "out 2",
		"$ cat <<'EOF'", "```", "$ text", "EOF",
		"$ call '{", "  }'", "```", "$ no command",
	}, "\n")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	steps, err := Read(path)
	if err != nil {
		t.Fatal(err)
	}
	var commands []string
	for _, s := range steps {
		commands = append(commands, s.Command)
	}
	want := []string{"one \\\n  two", "cat <<'EOF'\n```\n$ text\nEOF", "call '{\n  }'"}
	if !slices.Equal(commands, want) || !slices.Equal(steps[0].Output, []string{"out 1", "out 2"}) {
		t.Errorf("read %q, the first with the output %q, want %q", commands, steps[0].Output, want)
	}
}
