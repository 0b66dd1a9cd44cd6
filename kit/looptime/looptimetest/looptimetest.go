// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package looptimetest says in a benchmark for how long the owner of a service's
// state was taken by one operation, step by step, and fails it beyond a limit.
//
// Time is that of the wall clock, as in the service's own figures, so what the
// machine did meanwhile is in it. A goroutine that only sleeps finds out how
// much that was at most: by twice as much the limit is exceeded without blame.
package looptimetest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/looptime"
)

// Limit is how long one operation may take an owner.
const Limit = 100 * time.Millisecond

// Owner is watched.
type Owner struct {
	tb      testing.TB
	figures func() []looptime.Figures
	longest map[string]time.Duration // by operation, before the step
}

// Watch begins to watch an owner that has these figures.
func Watch(tb testing.TB, figures func() []looptime.Figures) *Owner {
	return &Owner{tb: tb, figures: figures, longest: map[string]time.Duration{}}
}

// Step does something and prints the operations that took longer than ever
// before, the longest first.
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

// stalls returns a function that says by how much a goroutine was late at most
// since.
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
