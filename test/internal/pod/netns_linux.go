// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package pod represents the network of a container: a network namespace with addresses, from which tests and
// benchmarks open sockets and send packets.
package pod

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// In runs fn on a thread inside the network namespace at path. Sockets that fn
// opens stay in that namespace; goroutines that it starts do not run there.
func In(path string, fn func() error) error {
	target, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}
	defer target.Close()
	done := make(chan error, 1)
	go func() {
		// Never unlocked on an error: if the thread cannot return, it ends with the goroutine.
		runtime.LockOSThread()
		own, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			done <- err
			return
		}
		defer own.Close()
		if err := unix.Setns(int(target.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter network namespace %s: %w", path, err)
			return
		}
		err = fn()
		if back := unix.Setns(int(own.Fd()), unix.CLONE_NEWNET); back == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// NewNetns makes a network namespace and binds it to path, as container
// runtimes do. Its loopback device is up.
func NewNetns(path string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return fmt.Errorf("make network namespace: %w", err)
	}
	_ = file.Close()
	done := make(chan error, 1)
	go func() {
		// The thread stays in the new namespace and must end with it.
		runtime.LockOSThread()
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("make network namespace: %w", err)
			}
			if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
				return fmt.Errorf("bind network namespace to %s: %w", path, err)
			}
			return loopbackUp()
		}()
	}()
	if err := <-done; err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return nil
}

// DeleteNetns unbinds and removes a namespace of NewNetns. It returns nil if the namespace does not exist.
func DeleteNetns(path string) error {
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) &&
		!errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// NetnsPath returns the path at which a test binds a namespace with this name.
func NetnsPath(name string) string {
	return filepath.Join("/run/netns", name)
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request)
}
