// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"io"
	"strconv"
	"time"
)

// result is a measured value with its target.
type result struct {
	what     string
	wanted   string
	measured string
	met      bool
}

// wantTime requires a duration of at most limit.
func (b *bench) wantTime(what string, limit, measured time.Duration) {
	b.results = append(b.results, result{
		what, "at most " + milliseconds(limit), milliseconds(measured),
		measured <= limit,
	})
}

// wantRatio requires a ratio of at most limit.
func (b *bench) wantRatio(what string, limit, measured float64) {
	b.results = append(b.results, result{
		what, fmt.Sprintf("at most %.3f", limit), fmt.Sprintf("%.3f", measured),
		measured <= limit,
	})
}

// wantAtLeast requires a ratio of at least limit.
func (b *bench) wantAtLeast(what string, limit, measured float64) {
	b.results = append(b.results, result{
		what, fmt.Sprintf("at least %.3f", limit), fmt.Sprintf("%.3f", measured),
		measured >= limit,
	})
}

// wantCount requires a count below limit.
func (b *bench) wantCount(what string, limit, measured int) {
	b.results = append(b.results, result{what, fmt.Sprintf("under %d", limit), strconv.Itoa(measured), measured < limit})
}

// wantMemory requires at most limit MiB.
func (b *bench) wantMemory(what string, limit, measured float64) {
	b.results = append(b.results, result{
		what, fmt.Sprintf("at most %g MiB", limit), fmt.Sprintf("%.1f MiB", measured),
		measured <= limit,
	})
}

func printResults(out io.Writer, results []result) {
	fmt.Fprintln(out, "| what | wanted | measured | met |")
	fmt.Fprintln(out, "|---|---|---|---|")
	for _, r := range results {
		met := "no"
		if r.met {
			met = "yes"
		}
		fmt.Fprintf(out, "| %s | %s | %s | %s |\n", r.what, r.wanted, r.measured, met)
	}
}
