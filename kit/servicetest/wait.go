// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package servicetest runs services as processes for tests, and waits for conditions.
package servicetest

import (
	"context"
	"testing"
	"time"
)

// Patience is how long a test waits for an event that should happen at once. It is generous on
// purpose: tests that pass do not wait, so it only has to be longer than the pauses of a busy
// machine.
const Patience = time.Minute

// Limits of the pause between two checks. A pause is as long as the check before it, so that at least half of the CPU
// time is left for the code under test.
const (
	shortest = 5 * time.Millisecond
	longest  = 100 * time.Millisecond
)

// Eventually waits until ok returns true, and fails the test after Patience. what describes the
// condition.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	wait(t, what, func() (string, bool) { return "", ok() })
}

// EventuallyNil waits until get returns nil, and fails the test with the last error after Patience.
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

// Context returns a context that ends with the test, or after Patience.
func Context(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	t.Cleanup(cancel)
	return ctx
}
