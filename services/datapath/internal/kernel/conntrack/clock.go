// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"time"

	"golang.org/x/sys/unix"
)

// MonotonicSeconds returns CLOCK_MONOTONIC in seconds, the clock of sl_ct.last_s.
func MonotonicSeconds() uint32 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0 // so that nothing has expired
	}
	return uint32(ts.Sec)
}

// TimeOf converts CLOCK_MONOTONIC in nanoseconds to wall-clock time.
func TimeOf(monotonic uint64) time.Time {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return time.Now()
	}
	return time.Now().Add(time.Duration(int64(monotonic) - ts.Nano()))
}
