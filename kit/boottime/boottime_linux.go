// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package boottime reads the clock that goes on while the machine sleeps. Go's monotonic
// clock does not.
package boottime

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now is the time since the machine booted, with that in which it slept. No one can set
// the clock.
func Now() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic(err) // Linux has the clock
	}
	return time.Duration(t.Nano())
}
