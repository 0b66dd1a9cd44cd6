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

// ErrLocked is returned by Lock when another process keeps the lock.
var ErrLocked = errors.New("in use by another process")

// Lock takes the lock of which path is the file, and waits at most so long for
// a process that is on its way out. The file stays; the lock ends when the
// result is closed, or with the process, however that ends. Zero waits not at all.
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
