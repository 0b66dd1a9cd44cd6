// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package mountinfo

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

func TestDeepestAndLastMountHoldsAPath(t *testing.T) {
	const table = `21 1 0:2 / / rw,relatime - rootfs rootfs rw
22 21 0:20 / /run rw,nosuid shared:5 - tmpfs tmpfs rw
23 22 0:20 /netns /run/netns rw master:5 - tmpfs tmpfs rw
24 22 0:20 /netns /run/netns rw shared:7 master:5 propagate_from:2 - tmpfs tmpfs rw
25 22 0:21 / /run/with\040space rw - tmpfs shared:9 rw
`
	for path, want := range map[string]Mount{
		"/":                  {Point: "/"},
		"/runs":              {Point: "/"},
		"/run":               {Point: "/run", Shared: true},
		"/run/netnsx":        {Point: "/run", Shared: true},
		"/run/netns/a":       {Point: "/run/netns", Shared: true, Slave: true},
		"/run/with space/in": {Point: "/run/with space"},
	} {
		if got, ok := holding(table, path); !ok || got != want {
			t.Errorf("%s: %+v, %v, want %+v", path, got, ok, want)
		}
	}
	if m, ok := holding("", "/"); ok {
		t.Errorf("no mounts: %+v", m)
	}
}

// TestKernelMountSaysWhatTheKernelDoes runs in its own mount namespace.
func TestKernelMountSaysWhatTheKernelDoes(t *testing.T) {
	dir := t.TempDir()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the namespace ends with the thread
		err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS)
		mount := func(flags uintptr) {
			if err == nil {
				err = unix.Mount("", dir, "", flags, "")
			}
		}
		want := func(want Mount) {
			want.Point = dir
			if err == nil {
				var got Mount
				if got, err = Of(filepath.Join(dir, "below")); err == nil && got != want {
					t.Errorf("%+v, want %+v", got, want)
				}
			}
		}
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		if err == nil {
			err = unix.Mount("tmpfs", dir, "tmpfs", 0, "")
		}
		if err == nil {
			err = os.Mkdir(filepath.Join(dir, "below"), 0o700)
		}
		want(Mount{})
		mount(unix.MS_SHARED)
		want(Mount{Shared: true})
		// A mount that has no peers, made a slave, becomes private.
		mount(unix.MS_SLAVE)
		want(Mount{})
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatalf("%v (kernel tests need root)", err)
	}
	if _, err := Of(filepath.Join(dir, "missing")); !os.IsNotExist(err) {
		t.Errorf("a path that does not exist: %v", err)
	}
}
