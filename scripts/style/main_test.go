// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"strings"
	"testing"
)

func TestWideLinesAndCellsOfDocumentsAreFound(t *testing.T) {
	for what, c := range map[string]struct {
		content string
		want    int
	}{
		"a line":              {strings.Repeat("é", columns) + "\n", 0},
		"a wide line":         {strings.Repeat("é", columns+1) + "\n", 1},
		"a table":             {"| a | " + strings.Repeat("b", cellWidth) + " | c |\n", 0},
		"a wide cell":         {"| a | " + strings.Repeat("b", cellWidth+1) + " | c |\n", 1},
		"a cell with a bar":   {"| " + strings.Repeat("b", cellWidth-1) + `\\|` + "b | c |\n", 1},
		"a code block":        {"```\n" + strings.Repeat("b", 200) + "\n```\n", 0},
		"a line after a code": {"```\nx\n```\n" + strings.Repeat("b", 200) + "\n", 1},
	} {
		if got := wideText("a.md", c.content); len(got) != c.want {
			t.Errorf("%s: %q, want %d", what, got, c.want)
		}
	}
}
