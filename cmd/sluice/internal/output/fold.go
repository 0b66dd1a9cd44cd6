// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package output

import (
	"strings"
	"unicode/utf8"
)

// Width is the largest number of columns of text, unless one word is longer. -o wide has no limit.
const Width = 100

// foldIndent precedes the second and further lines of a folded line.
const foldIndent = "    "

// Fold breaks a line with more than Width columns: at two spaces, which separate columns; else after a semicolon or
// colon; else at a space; else after a comma. The second and further lines are indented. A longer word without a comma
// stays whole.
func Fold(line string) string {
	first, rest := cut(line, Width)
	for rest != "" {
		next, after := cut(rest, Width-len(foldIndent))
		first += "\n" + foldIndent + next
		rest = after
	}
	return first
}

// cut returns the beginning of a line with at most width columns if the line can be broken there, and the rest.
func cut(line string, width int) (first, rest string) {
	if utf8.RuneCountInString(line) <= width {
		return line, ""
	}
	// A space may follow the last column.
	window := string([]rune(line)[:width+1])
	clause := max(strings.LastIndex(window, "; "), strings.LastIndex(window, ": ")) + 1
	for _, at := range []int{strings.LastIndex(window, "  "), clause, strings.LastIndex(window, " ")} {
		if at > len(window)/3 {
			return strings.TrimRight(line[:at], " "), strings.TrimLeft(line[at:], " ")
		}
	}
	if at := strings.LastIndex(strings.TrimSuffix(window, ","), ","); at > 0 {
		return line[:at+1], line[at+1:]
	}
	if at := strings.IndexAny(line[len(window):], " ,"); at >= 0 {
		at += len(window)
		return strings.TrimRight(line[:at+1], " "), strings.TrimLeft(line[at+1:], " ")
	}
	return line, ""
}
