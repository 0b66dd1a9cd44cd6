// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package output

import (
	"bytes"
	"io"
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

// Folding returns a writer that folds each complete line with more than Width columns.
func Folding(w io.Writer) io.Writer { return &folding{w: w} }

type folding struct {
	w    io.Writer
	line []byte // incomplete
}

func (f *folding) Write(b []byte) (int, error) {
	f.line = append(f.line, b...)
	for {
		at := bytes.IndexByte(f.line, '\n')
		if at < 0 {
			return len(b), nil
		}
		line := string(f.line[:at])
		f.line = f.line[at+1:]
		if _, err := io.WriteString(f.w, Fold(line)+"\n"); err != nil {
			return 0, err
		}
	}
}

// FoldedTable writes a table as Table does, and folds its lines unless wide is set, which also shows all columns.
func FoldedTable[M any](w io.Writer, wide bool, columns []Column[M], all []M) {
	out := w
	if !wide {
		out = Folding(w)
	}
	aligned := Aligned(out)
	Table(aligned, Shown(columns, wide), all)
	_ = aligned.Flush() // w reports the error again
}
