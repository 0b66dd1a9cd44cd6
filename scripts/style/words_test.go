// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestCountWords(t *testing.T) {
	for _, c := range []struct {
		content string
		want    int
	}{
		{"", 0},
		{"# A heading\n\nTwo words.\n", 4},
		{"It's 192.0.2.1, `sluice-cni` or fd00::1/64.\n", 7}, // fd00, 1 and 64
		{"| a | cell |\n|---|---|\n", 2},
		{"see [the page](some/page.md#with-a-section) now\n", 4},
		{"[a](b.md) and [c](d.md)\n", 3},
		{"before\n```console\n$ sluice status\n```\nafter\n", 2},
		{"- item\n\n  ```\n  code in a list\n  ```\n\n  text\n", 2},
	} {
		if got := countWords(c.content); got != c.want {
			t.Errorf("%q has %d words, want %d", c.content, got, c.want)
		}
	}
}

func TestOnlyDocumentsForUsersAreCounted(t *testing.T) {
	t.Chdir(t.TempDir())
	files := []string{
		"README.md", "docs/a.md", "docs/how-to/b.md", // for users
		"CONTRIBUTING.md", "bpf/README.md", "docs/data.tsv", "docs/record/c.md", "docs/reference/d.md", "docs/decisions/e.md",
	}
	for i, name := range files {
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(strings.Repeat("word ", i+1)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	found, err := checkWords(files, 6)
	if err != nil || len(found) != 0 {
		t.Errorf("6 words of 6: %q, %v", found, err)
	}
	found, err = checkWords(files, 5)
	want := []string{"the documents for users have 6 words, more than 5: shorten them, or move details to " +
		"docs/reference; the longest are docs/how-to/b.md 3, docs/a.md 2, README.md 1"}
	if err != nil || !slices.Equal(found, want) {
		t.Errorf("6 words of 5: %q, %v; want %q", found, err, want)
	}
}
