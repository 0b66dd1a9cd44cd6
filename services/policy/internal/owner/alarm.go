// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import "time"

// alarm is when the next timed work is due. It belongs to the loop.
type alarm struct {
	at time.Time // zero: never
}

// set makes sure that the alarm is due at t; zero: never.
func (a *alarm) set(t time.Time) {
	if !t.IsZero() && (a.at.IsZero() || t.Before(a.at)) {
		a.at = t
	}
}

// due reports whether the alarm is due, and ends it.
func (a *alarm) due(now time.Time) bool {
	if a.at.IsZero() || a.at.After(now) {
		return false
	}
	a.at = time.Time{}
	return true
}
