// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package output

import (
	"io"
	"slices"
	"text/tabwriter"
)

// Aligned returns a writer that aligns the columns of tables. The caller flushes it.
func Aligned(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 4, 2, ' ', 0) }

// Column is one column of a table of messages.
type Column[M any] struct {
	Header string
	// Wide columns are shown only with -o wide.
	Wide bool
	// Cell returns the value of the column.
	Cell func(M) any
}

// Shown returns the columns for -o table, or for -o wide.
func Shown[M any](columns []Column[M], wide bool) []Column[M] {
	return slices.DeleteFunc(slices.Clone(columns), func(c Column[M]) bool { return c.Wide && !wide })
}

// Table writes a header and one row for each message.
func Table[M any](w io.Writer, columns []Column[M], all []M) {
	Header(w, columns)
	Rows(w, columns, all...)
}

// Header writes the header of a table.
func Header[M any](w io.Writer, columns []Column[M]) {
	cells := make([]any, len(columns))
	for i, c := range columns {
		cells[i] = c.Header
	}
	Row(w, cells...)
}

// Rows writes one row for each message.
func Rows[M any](w io.Writer, columns []Column[M], all ...M) {
	cells := make([]any, len(columns))
	for _, m := range all {
		for i, c := range columns {
			cells[i] = c.Cell(m)
		}
		Row(w, cells...)
	}
}
