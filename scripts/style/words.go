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

// mostWords is the number of words that the documents for users may have together, so that one engineer can read them
// in an afternoon.
const mostWords = 60000

// longestPages is the number of pages that the message about too many words names.
const longestPages = 5

// word matches a word, a number, an address, and the name of a command or setting as one word each.
var word = regexp.MustCompile(`[\p{L}\p{N}_]+(?:[.'’-][\p{L}\p{N}_]+)*`)

// linkTarget is the target of a link in Markdown.
var linkTarget = regexp.MustCompile(`\]\([^)]*\)`)

// isForUsers reports whether a file is a document for users: README.md and docs/ without the directories that users
// look things up in.
func isForUsers(name string) bool {
	for _, dir := range []string{"docs/record/", "docs/reference/", "docs/decisions/"} {
		if strings.HasPrefix(name, dir) {
			return false
		}
	}
	return name == "README.md" || strings.HasPrefix(name, "docs/") && filepath.Ext(name) == ".md"
}

// countWords returns the number of words of a Markdown file outside of code blocks and link targets.
func countWords(content string) int {
	n, code := 0, false
	for line := range strings.Lines(content) {
		fence := strings.HasPrefix(strings.TrimSpace(line), "```")
		if !fence && !code {
			n += len(word.FindAllString(linkTarget.ReplaceAllString(line, "]"), -1))
		}
		code = code != fence
	}
	return n
}

// checkWords returns a message if the documents for users among the files have more than limit words together.
func checkWords(files []string, limit int) ([]string, error) {
	type page struct {
		name  string
		words int
	}
	var pages []page
	sum := 0
	for _, name := range files {
		if !isForUsers(name) {
			continue
		}
		content, err := os.ReadFile(name) //nolint:gosec // a document of the repository
		if err != nil {
			return nil, err
		}
		p := page{name, countWords(string(content))}
		pages, sum = append(pages, p), sum+p.words
	}
	if sum <= limit {
		return nil, nil
	}
	slices.SortFunc(pages, func(a, b page) int {
		return cmp.Or(b.words-a.words, strings.Compare(a.name, b.name))
	})
	var longest []string
	for _, p := range pages[:min(len(pages), longestPages)] {
		longest = append(longest, fmt.Sprintf("%s %d", p.name, p.words))
	}
	return []string{fmt.Sprintf("the documents for users have %d words, more than %d: shorten them, or move details to "+
		"docs/reference; the longest are %s", sum, limit, strings.Join(longest, ", "))}, nil
}
