// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package output writes rows and values as people read them. What comes from a container never reaches the terminal
// unescaped.
package output

import (
	"cmp"
	"fmt"
	"io"
	"iter"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"google.golang.org/protobuf/types/known/timestamppb"
)

// Count shortens what no one counts: a /64 saturates the field.
func Count(n uint64) string {
	switch {
	case n == math.MaxUint64:
		return "2^64"
	case n >= 1<<40:
		return "~2^" + strconv.Itoa(int(math.Round(math.Log2(float64(n)))))
	default:
		return strconv.FormatUint(n, 10)
	}
}

// Bytes is a size for people.
func Bytes(n uint64) string {
	switch {
	case n < 1<<10:
		return strconv.FormatUint(n, 10) + " B"
	case n < 1<<20:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	default:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
}

// Row writes one line of a table.
func Row(w io.Writer, cells ...any) {
	texts := make([]string, len(cells))
	for i, cell := range cells {
		texts[i] = cmp.Or(Printable(fmt.Sprint(cell)), "-")
	}
	fmt.Fprintln(w, strings.Join(texts, "\t"))
}

// Printable keeps text from a container, such as a label's value, from talking
// to the terminal.
func Printable(s string) string {
	if strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0 {
		return s
	}
	q := fmt.Sprintf("%q", s)
	return q[1 : len(q)-1]
}

// Enum is the last word of an enum's name, in lower case: READY of
// ENDPOINT_STATE_READY is "ready". It is empty for what is not specified.
func Enum(name fmt.Stringer, prefix string) string {
	if name.String() == prefix+"UNSPECIFIED" {
		return ""
	}
	return strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(name.String(), prefix), "_", "-"))
}

// When is nil for an unset time, which JSON then leaves out.
func When(t *timestamppb.Timestamp) *time.Time {
	if t == nil {
		return nil
	}
	at := t.AsTime()
	return &at
}

// Moment is a time of this machine, for people.
func Moment(t time.Time) string { return t.Local().Format("2006-01-02 15:04:05 MST") }

// Since is how long ago t was, for people.
func Since(t *time.Time) string {
	if t == nil {
		return ""
	}
	d := time.Since(*t)
	switch {
	case d < time.Minute:
		return d.Round(time.Second).String()
	case d < time.Hour:
		return d.Round(time.Second).String()
	case d < 48*time.Hour:
		return d.Round(time.Minute).String()
	default:
		return fmt.Sprintf("%dd", int(d.Hours()/24))
	}
}

// Ordered ranges over a map by its keys.
func Ordered[K cmp.Ordered, V any](m map[K]V) iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for _, k := range slices.Sorted(maps.Keys(m)) {
			if !yield(k, m[k]) {
				return
			}
		}
	}
}
