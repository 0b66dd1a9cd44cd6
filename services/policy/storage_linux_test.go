// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// TestKernelFullDiskOfAnotherUserIsSeen: a directory of another user is on a separate disk that has no free blocks,
// and then no free inodes. The report contains the full disk.
func TestKernelFullDiskOfAnotherUserIsSeen(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("this test needs root, to mount small file systems")
	}
	for options, want := range map[string]bool{
		"size=8m": false, "size=512k": true, "size=8m,nr_inodes=1": true, "size=8m,nr_inodes=0": false,
	} {
		dir, err := os.MkdirTemp("", "sluice-ipam") // accessible to other users
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options+",mode=0700"); err != nil {
			t.Fatal(err)
		}
		err = os.Chown(dir, 65702, 65700)
		var full bool
		if err == nil {
			err = asUser(65703, func() (err error) {
				full, err = isFull(dir)
				return err
			})
		}
		if full != want || err != nil {
			t.Errorf("%s: full %t (%v), want %t", options, full, err, want)
		}
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
		if err := os.Remove(dir); err != nil {
			t.Error(err)
		}
	}
}

// asUser calls f on a thread with the rights of a user.
func asUser(uid uintptr, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so that the thread ends with the goroutine
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uid, uid, uid); errno != 0 {
			done <- errno
			return
		}
		done <- f()
	}()
	return <-done
}
