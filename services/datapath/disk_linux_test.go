// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
)

// TestKernelDiskThatTakesNoRecordsIsToldAndTriedAgain fills the disk or makes it read-only. ADD and DEL fail with
// ErrStorage, and the status reports the problem until the disk is writable again.
func TestKernelDiskThatTakesNoRecordsIsToldAndTriedAgain(t *testing.T) {
	for _, c := range []struct {
		name          string
		breaks, mends func(dir string) error
		text          string
	}{
		{
			name:   "full",
			breaks: func(dir string) error { return fill(filepath.Join(dir, "filler")) },
			mends:  func(dir string) error { return os.Remove(filepath.Join(dir, "filler")) },
			text:   "no space left on device",
		},
		{
			name: "read-only",
			breaks: func(dir string) error {
				return unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
			},
			mends: func(dir string) error { return unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND, "") },
			text:  "read-only file system",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			dir := filepath.Join(w.dir, "endpoints")
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=256k,mode=0700"); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
					t.Error(err)
				}
			})
			w.start(true)
			here := w.pod("here")
			if err := w.written.Err(); err != nil {
				t.Errorf("before: %v", err)
			}
			if err := c.breaks(dir); err != nil {
				t.Fatal(err)
			}
			problem := func(when string) {
				t.Helper()
				if err := w.written.Err(); err == nil || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), c.text) {
					t.Errorf("the problem %s: %v, want %q and %s", when, err, c.text, dir)
				}
			}
			problem("before any ADD")
			s := w.spec("new", netnstest.New(t))
			_, err := w.node.Endpoints.Lifecycle.Create(t.Context(), s, false)
			if !errors.Is(err, endpoint.ErrStorage) || !strings.Contains(err.Error(), dir) {
				t.Errorf("ADD: %v, want ErrStorage with the file", err)
			}
			_, err = w.delete(here.owner)
			if !errors.Is(err, endpoint.ErrStorage) || !strings.Contains(err.Error(), dir) {
				t.Errorf("DEL: %v, want ErrStorage with the file", err)
			}
			problem("after them")
			if err := c.mends(dir); err != nil {
				t.Fatal(err)
			}
			if err := w.written.Err(); err != nil {
				t.Errorf("after the disk can be written to: %v", err)
			}
			if _, err := w.node.Endpoints.Lifecycle.Create(t.Context(), s, false); err != nil {
				t.Errorf("ADD again: %v", err)
			}
			// An audit may have finished the deletion by now.
			if _, err := w.delete(here.owner); err != nil {
				t.Errorf("DEL again: %v", err)
			}
			if _, err := w.node.Endpoints.Report.Get(here.owner); !errors.Is(err, endpoint.ErrNotFound) {
				t.Errorf("after DEL: %v, want no endpoint", err)
			}
		})
	}
}

// fill writes to a file until the disk is full.
func fill(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	for {
		if _, err := f.Write(bytes.Repeat([]byte("x"), 4<<10)); err != nil {
			if !errors.Is(err, unix.ENOSPC) {
				return errors.Join(err, f.Close())
			}
			return f.Close()
		}
	}
}
