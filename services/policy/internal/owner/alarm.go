// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import "time"

// alarm stores when timed work is due next. It belongs to the loop.
type alarm struct {
	at time.Time // zero: never
}

// set makes the alarm due at t, unless it is due earlier. The zero time means never.
func (a *alarm) set(t time.Time) {
	if !t.IsZero() && (a.at.IsZero() || t.Before(a.at)) {
		a.at = t
	}
}

// due reports whether the alarm is due. If it is, due also resets it.
func (a *alarm) due(now time.Time) bool {
	if a.at.IsZero() || a.at.After(now) {
		return false
	}
	a.at = time.Time{}
	return true
}
