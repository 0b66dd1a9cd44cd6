// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"io"
	"slices"
	"time"
)

// result is a measurement and its target.
type result struct {
	what, wanted, measured string
	met                    bool
}

// report gathers results. A target that is reported several times is met only if it was met each time.
type report struct{ results []result }

func (r *report) add(what, wanted, measured string, met bool) {
	for i, have := range r.results {
		if have.what == what {
			if have.met {
				r.results[i] = result{what, wanted, measured, met}
			}
			return
		}
	}
	r.results = append(r.results, result{what, wanted, measured, met})
}

// note reports a measurement without a target.
func (r *report) note(what, format string, args ...any) {
	r.add(what, "", fmt.Sprintf(format, args...), true)
}

// always reports a result that must be met each time, and returns err.
func (r *report) always(what string, err error) error {
	measured := "yes"
	if err != nil {
		measured = "no"
	}
	r.add(what, "yes", measured, err == nil)
	return err
}

// want adds a measured duration, which should be at most limit.
func (r *report) want(what string, limit, measured time.Duration) {
	r.add(what, fmt.Sprintf("at most %.1f s", limit.Seconds()), fmt.Sprintf("%.2f s", measured.Seconds()),
		measured <= limit)
}

func (r *report) write(out io.Writer) {
	fmt.Fprintln(out, "| what | wanted | measured | met |")
	fmt.Fprintln(out, "|---|---|---|---|")
	for _, x := range r.results {
		met := "no"
		switch {
		case x.wanted == "":
			met = ""
		case x.met:
			met = "yes"
		}
		fmt.Fprintf(out, "| %s | %s | %s | %s |\n", x.what, x.wanted, x.measured, met)
	}
}

// percentile of some durations, which it sorts; 0 of none.
func percentile(all []time.Duration, p int) time.Duration {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[(len(all)-1)*p/100]
}
