// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package nearest suggests the word that a misspelled word probably means.
package nearest

import "fmt"

// Hint returns "; did you mean WORD?" for the word among words that is nearest to text; empty if none is near.
func Hint(text string, words []string) string {
	best, distance := "", limit(text)+1
	for _, w := range words {
		if d := distanceOf(text, w); d < distance {
			best, distance = w, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf("; did you mean %s?", best)
}

// limit is the largest distance of a suggestion: a third of the letters, but at least one.
func limit(text string) int { return max(1, len(text)/3) }

// distanceOf counts the letters to insert, remove, replace or swap with their neighbor to turn a into b.
func distanceOf(a, b string) int {
	var before, last []int
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before, last, row = last, row, make([]int, len(b)+1)
		row[0] = i + 1
		for j := range len(b) {
			replace := last[j]
			if a[i] != b[j] {
				replace++
			}
			row[j+1] = min(replace, last[j+1]+1, row[j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
	}
	return row[len(b)]
}
