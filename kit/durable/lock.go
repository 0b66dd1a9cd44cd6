// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package durable

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// ErrLocked is returned by Lock if another process holds the lock.
var ErrLocked = errors.New("in use by another process")

// Lock takes the lock on the file path, and waits at most wait for a process that is exiting; with
// 0 it does not wait. The lock is released when the result is closed or the process ends. The file
// stays.
func Lock(path string, wait time.Duration) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(wait); ; time.Sleep(20 * time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return f, nil
		case errors.Is(err, unix.EINTR):
		case !errors.Is(err, unix.EWOULDBLOCK):
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		case !time.Now().Before(end):
			f.Close()
			return nil, fmt.Errorf("lock %s: %w; see: fuser -v %s", path, ErrLocked, path)
		}
	}
}
