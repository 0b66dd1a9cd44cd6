// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pin

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL of linux/membarrier.h.
const membarrierGlobal = 1

// graceFallback is how long to wait where the kernel cannot say when all
// program runs have ended. A run takes microseconds.
const graceFallback = time.Second

// GracePeriod returns after every program run that had begun has ended.
// membarrier waits for an RCU grace period; a kernel with nohz_full CPUs
// refuses it with EINVAL.
func GracePeriod(ctx context.Context) error {
	_, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0)
	switch {
	case errno == 0:
		return nil
	case !errors.Is(errno, unix.EINVAL) && !errors.Is(errno, unix.ENOSYS) && !errors.Is(errno, unix.EPERM):
		return fmt.Errorf("membarrier: %w", errno)
	}
	select {
	case <-time.After(graceFallback):
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for program runs to end: %w", ctx.Err())
	}
}
