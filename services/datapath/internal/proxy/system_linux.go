// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package proxy

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// rights returns the control message that passes copies of descriptors to another process.
func rights(files ...int) []byte { return unix.UnixRights(files...) }

// monotonic returns the clock of heartbeats.
func monotonic() (time.Duration, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0, fmt.Errorf("read CLOCK_MONOTONIC: %w", err)
	}
	return time.Duration(now.Nano()), nil
}

// controlSize is the size of the control message with the descriptors of a request.
var controlSize = unix.CmsgSpace(4 * 4)
