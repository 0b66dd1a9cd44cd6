// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package looptimetest reports, for each step of a benchmark, how long single operations occupied the owner of a
// service's state, and fails the benchmark if an operation took longer than a limit.
//
// It measures wall-clock time, like the service's own figures, so stalls of the machine are included. A goroutine that
// only sleeps estimates the longest stall, and twice that time is added to the limit.
package looptimetest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/looptime"
)

// Limit is how long one operation may occupy an owner.
const Limit = 100 * time.Millisecond

// Owner is an owner under observation.
type Owner struct {
	tb      testing.TB
	figures func() []looptime.Figures
	longest map[string]time.Duration // by operation, before the step
}

// Watch begins to observe an owner through its figures.
func Watch(tb testing.TB, figures func() []looptime.Figures) *Owner {
	return &Owner{tb: tb, figures: figures, longest: map[string]time.Duration{}}
}

// Step runs do and then prints, longest first, the operations that took longer than in any previous step.
func (o *Owner) Step(what string, do func()) {
	o.tb.Helper()
	stalled := stalls()
	began := time.Now()
	do()
	took, stall := time.Since(began), stalled()
	var longer []looptime.Figures
	for _, f := range o.figures() {
		if f.Longest > o.longest[f.Operation] {
			o.longest[f.Operation] = f.Longest
			longer = append(longer, f)
		}
	}
	slices.SortFunc(longer, func(x, y looptime.Figures) int { return int(y.Longest - x.Longest) })
	var texts []string
	for _, f := range longer[:min(3, len(longer))] {
		texts = append(texts, fmt.Sprintf("%s %s", f.Operation, f.Longest.Round(10*time.Microsecond)))
	}
	if len(texts) == 0 {
		texts = []string{"nothing longer than before"}
	}
	fmt.Printf("  %-55s %8s; %s; the machine stalled %s\n", what, took.Round(time.Millisecond), strings.Join(texts, ", "), stall.Round(10*time.Microsecond))
	if len(longer) > 0 && longer[0].Longest > Limit+2*stall {
		o.tb.Errorf("%s: %s took the owner for %s, more than %s, while the machine stalled for at most %s", what, longer[0].Operation, longer[0].Longest, Limit, stall)
	}
}

// stalls starts a sleeping goroutine and returns a function that returns how late the goroutine woke at most.
func stalls() func() time.Duration {
	stop, worst := make(chan struct{}), make(chan time.Duration)
	go func() {
		var most time.Duration
		const nap = time.Millisecond
		for {
			began := time.Now()
			select {
			case <-stop:
				worst <- most
				return
			case <-time.After(nap):
			}
			most = max(most, time.Since(began)-nap)
		}
	}()
	return func() time.Duration { close(stop); return <-worst }
}
