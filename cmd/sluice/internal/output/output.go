// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package output formats rows and values for people. It escapes control characters, because a container may have
// chosen the text.
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

// Count formats a number of addresses. Large numbers are shown as powers of 2; the largest value of uint64 means 2^64,
// the size of a /64.
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

// Plural returns a number with a noun: "1 policy", "2 policies".
func Plural[N ~int | ~int32 | ~int64 | ~uint | ~uint32 | ~uint64](n N, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// Bytes formats a size in bytes.
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

// Row writes one row of a table. Empty cells become "-".
func Row(w io.Writer, cells ...any) {
	texts := make([]string, len(cells))
	for i, cell := range cells {
		texts[i] = cmp.Or(Printable(fmt.Sprint(cell)), "-")
	}
	fmt.Fprintln(w, strings.Join(texts, "\t"))
}

// Printable escapes control characters in text from a container, such as the value of a label.
func Printable(s string) string {
	if strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0 {
		return s
	}
	q := fmt.Sprintf("%q", s)
	return q[1 : len(q)-1]
}

// Enum returns the name of an enum value in lower case without its prefix: "ready" for ENDPOINT_STATE_READY. It is
// empty for UNSPECIFIED.
func Enum(name fmt.Stringer, prefix string) string {
	if name.String() == prefix+"UNSPECIFIED" {
		return ""
	}
	return strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(name.String(), prefix), "_", "-"))
}

// When converts a time. It returns nil if t is nil.
func When(t *timestamppb.Timestamp) *time.Time {
	if t == nil {
		return nil
	}
	at := t.AsTime()
	return &at
}

// Moment formats a time in the local time zone.
func Moment(t time.Time) string { return t.Local().Format("2006-01-02 15:04:05 MST") }

// Since formats the time that has passed since t; empty if t is nil.
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

// Ordered iterates over a map in the order of its keys.
func Ordered[K cmp.Ordered, V any](m map[K]V) iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for _, k := range slices.Sorted(maps.Keys(m)) {
			if !yield(k, m[k]) {
				return
			}
		}
	}
}
