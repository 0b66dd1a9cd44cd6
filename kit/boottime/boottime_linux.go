// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package boottime reads CLOCK_BOOTTIME, which also runs while the machine is suspended. Go's
// monotonic clock does not.
package boottime

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now returns the time since boot, including time in suspend. The clock cannot be set.
func Now() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic(err) // every Linux kernel has this clock
	}
	return time.Duration(t.Nano())
}
