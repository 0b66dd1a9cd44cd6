// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package servicetest runs services as processes for tests, and waits for what
// they do.
package servicetest

import (
	"context"
	"testing"
	"time"
)

// Patience is how long a test waits for what should come at once. It is much
// more than that on purpose: it only has to be longer than the pauses of a
// machine that runs many tests, since a test that passes does not wait.
const Patience = time.Minute

// Bounds of the time between two looks, which is as long as the look took: the rest
// of the CPU is for what the test waits for.
const (
	shortest = 5 * time.Millisecond
	longest  = 100 * time.Millisecond
)

// Eventually waits until ok, and fails the test if that takes longer than
// Patience. What names the condition.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	wait(t, what, func() (string, bool) { return "", ok() })
}

// EventuallyNil is Eventually for a condition that can say what is missing: it
// waits until get returns nil.
func EventuallyNil(t testing.TB, what string, get func() error) {
	t.Helper()
	wait(t, what, func() (string, bool) {
		if err := get(); err != nil {
			return ": " + err.Error(), false
		}
		return "", true
	})
}

func wait(t testing.TB, what string, look func() (why string, ok bool)) {
	t.Helper()
	var took time.Duration
	for end := time.Now().Add(Patience); ; time.Sleep(min(max(shortest, took), longest)) {
		began := time.Now()
		why, ok := look()
		took = time.Since(began)
		if ok {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s%s", Patience, what, why)
		}
	}
}

// Context ends with the test, or after Patience.
func Context(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	t.Cleanup(cancel)
	return ctx
}
