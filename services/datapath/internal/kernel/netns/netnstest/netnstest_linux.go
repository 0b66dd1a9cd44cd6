// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package netnstest creates network namespaces for tests.
package netnstest

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
)

// New creates a network namespace that exists as long as its descriptor, with its loopback device up. Tests of
// a package that calls it must not run on the main thread: the thread of the new namespace ends with its
// goroutine, and the main thread cannot end.
func New(t testing.TB) *netns.Namespace {
	t.Helper()
	var ns *netns.Namespace
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		made <- func() (err error) {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("unshare: %w (kernel tests need root)", err)
			}
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			if err := netlink.LinkSetUp(lo); err != nil {
				return err
			}
			ns, err = netns.Current()
			return err
		}()
	}()
	if err := <-made; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}
