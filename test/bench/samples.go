// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"slices"
	"time"
)

// samples are measured durations of one kind.
type samples []time.Duration

// quantile returns the value that the share q of the samples does not exceed.
func (s samples) quantile(q float64) time.Duration {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Clone(s)
	slices.Sort(sorted)
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

func (s samples) worst() time.Duration {
	if len(s) == 0 {
		return 0
	}
	return slices.Max(s)
}

// ratio returns the ratio of two durations, or 0 if the divisor is 0.
func ratio(of, to time.Duration) float64 {
	if to == 0 {
		return 0
	}
	return float64(of) / float64(to)
}

// median returns the median of ratios or rates.
func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	sorted := slices.Clone(v)
	slices.Sort(sorted)
	return sorted[len(sorted)/2]
}

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%.2f ms", float64(d)/float64(time.Millisecond))
}

func microseconds(d time.Duration) string {
	return fmt.Sprintf("%.2f µs", float64(d)/float64(time.Microsecond))
}
