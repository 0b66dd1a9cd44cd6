// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/store"
)

// TestKernelFullDiskRefusesAndLosesNothing fills a small file system, then
// makes it larger.
func TestKernelFullDiskRefusesAndLosesNothing(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("this test needs root, to mount a small file system")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=192k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	s, err := store.Open(dir + "/ipam")
	if err != nil {
		t.Fatal(err)
	}
	ranges := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}
	a, err := ipam.New(s, ipam.Options{Field: "pools", Ranges: ranges, Lease: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan error, 1)
	go func() { ran <- a.Run(ctx) }()
	told := map[workload.Owner]string{}
	holder := map[string]workload.Owner{}
	var full error
	ask := func(i int) error {
		o := workload.Owner{ContainerID: fmt.Sprintf("%0100d", i), Interface: "eth0"}
		got, err := a.Allocate(t.Context(), ipam.Request{Owner: o})
		if err != nil {
			return err
		}
		if other, ok := holder[got.List()]; ok && other != o {
			t.Errorf("%s is held by %s and was given to %s", got.List(), other, o)
		}
		if _, err := a.Confirm(t.Context(), o, []netip.Addr{got.Addresses[0].Addr}); err != nil {
			return err
		}
		told[o], holder[got.List()] = got.List(), o
		return nil
	}
	n := 0
	for ; n < 20_000 && full == nil; n++ {
		full = ask(n)
	}
	if !errors.Is(full, ipam.ErrStore) || !errors.Is(full, unix.ENOSPC) || errors.Is(full, ipam.ErrStoreLost) {
		t.Fatalf("after %d owners: %v, want a full disk that can be survived", n, full)
	}
	if list, err := a.List(t.Context()); err != nil || len(list) != len(told) {
		t.Fatalf("a full disk lists %d owners, %v; want %d", len(list), err, len(told))
	}
	if p := a.Problem(); !errors.Is(p, unix.ENOSPC) || !strings.Contains(p.Error(), s.Path()) {
		t.Errorf("a full disk is not a problem with the name of the file: %v", p)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT, "size=64m"); err != nil {
		t.Fatal(err)
	}
	// It tries again by itself.
	for deadline := time.Now().Add(time.Minute); a.Problem() != nil && time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
	}
	if p := a.Problem(); p != nil {
		t.Fatalf("with space again: %v", p)
	}
	for i := range 50 {
		if err := ask(n + i); err != nil {
			t.Fatalf("with space again: %v", err)
		}
	}
	cancel()
	if err := <-ran; err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s, err = store.Open(dir + "/ipam")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c, err := s.Load()
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range c.Allocations {
		if told[x.Owner] != x.List() {
			t.Errorf("in the file %s holds %s, but the answer was %q", x.Owner, x.List(), told[x.Owner])
		}
	}
	if len(c.Allocations) != len(told) {
		t.Errorf("the file has %d owners, but %d got an address", len(c.Allocations), len(told))
	}
}

// TestKernelReadOnlyFileSystemStopsTheStart: the error contains the directory, and the state is unchanged when the file
// system accepts writes again.
func TestKernelReadOnlyFileSystemStopsTheStart(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("this test needs root, to mount a small file system")
	}
	mount := t.TempDir()
	if err := unix.Mount("tmpfs", mount, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mount, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	dir := mount + "/ipam"
	write := func() error {
		s, err := store.Open(dir)
		if err != nil {
			return err
		}
		o := workload.Owner{ContainerID: "c", Interface: "eth0"}
		a := &ipam.Allocation{Owner: o, State: ipam.Confirmed, Addresses: []ipam.Address{{Addr: netip.MustParseAddr("10.0.0.2"), PoolBits: 16}}}
		return errors.Join(s.Commit(&ipam.Changes{Allocations: map[workload.Owner]*ipam.Allocation{o: a}}), s.Close())
	}
	if err := write(); err != nil {
		t.Fatal(err)
	}
	for _, there := range []bool{true, false} {
		if err := unix.Mount("tmpfs", mount, "tmpfs", unix.MS_REMOUNT|unix.MS_RDONLY, "size=1m"); err != nil {
			t.Fatal(err)
		}
		if err := write(); !errors.Is(err, unix.EROFS) || !strings.Contains(err.Error(), dir) {
			t.Errorf("state there %v: %v, want EROFS and the directory", there, err)
		}
		if err := unix.Mount("tmpfs", mount, "tmpfs", unix.MS_REMOUNT, "size=1m"); err != nil {
			t.Fatal(err)
		}
		s, err := store.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		c, err := s.Load()
		if err != nil || len(c.Allocations) != map[bool]int{true: 1, false: 0}[there] {
			t.Errorf("state there %v: %d allocations, %v", there, len(c.Allocations), err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
}
