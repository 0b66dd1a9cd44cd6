// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/nodefiles"
)

// asUser runs do with the rights of a service's user for files. So the files belong to that user, and a link that it
// made in its directory leads to no file that it could not write itself.
func asUser(s nodefiles.Service, do func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // without an end: the thread ends with the goroutine, and with it the user
		done <- asThread(s, do)
	}()
	return <-done
}

func asThread(s nodefiles.Service, do func() error) error {
	if _, err := unix.SetfsgidRetGid(int(s.GID)); err != nil {
		return fmt.Errorf("%w to the group %d: %w", errUser, s.GID, err)
	}
	if _, err := unix.SetfsuidRetUid(int(s.UID)); err != nil {
		return fmt.Errorf("%w to %d: %w", errUser, s.UID, err)
	}
	// Both calls return the former user also when they fail.
	now, err := unix.SetfsuidRetUid(-1)
	if err != nil {
		return fmt.Errorf("%w to %d: %w", errUser, s.UID, err)
	}
	if now != int(s.UID) {
		return fmt.Errorf("%w to %d: it is %d", errUser, s.UID, now)
	}
	return do()
}
