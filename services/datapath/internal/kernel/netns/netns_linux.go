// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package netns opens network namespaces by path, verifies that a path is a network namespace, and runs code
// inside namespaces.
package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

var (
	// ErrNotNetns: the path is not a network namespace.
	ErrNotNetns = errors.New("not a network namespace")
	// ErrOwn: the path is the host's network namespace.
	ErrOwn = errors.New("the node's own network namespace")
)

// ID identifies a namespace while it exists: device and inode of the nsfs file.
type ID struct{ Dev, Inode uint64 }

// Namespace is an open network namespace. It exists at least while it is open.
type Namespace struct {
	file *os.File
	id   ID
}

// Current opens the namespace of the calling thread.
func Current() (*Namespace, error) { return Open(own) }

// own is the namespace of the thread that opens it.
const own = "/proc/thread-self/ns/net"

// Open opens the namespace at path. It returns fs.ErrNotExist if there is nothing at path, and ErrNotNetns if
// it is not a network namespace.
//
// The path is first opened with O_PATH only, because opening some devices has side effects and opening a pipe
// blocks.
func Open(path string) (*Namespace, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open network namespace", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var sfs unix.Statfs_t
	if err := unix.Fstatfs(fd, &sfs); err != nil {
		return nil, fmt.Errorf("inspect %s: %w", path, err)
	}
	if sfs.Type != unix.NSFS_MAGIC {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Size == 0 {
			return nil, fmt.Errorf("%s: %w: it is an empty file: the namespace is not mounted there yet, "+
				"or this process does not see the mount (mount propagation)", path, ErrNotNetns)
		}
		return nil, fmt.Errorf("%s: %w: it is not a namespace", path, ErrNotNetns)
	}
	file, err := os.OpenFile("/proc/self/fd/"+strconv.Itoa(fd), os.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	n := &Namespace{file: file}
	if err := n.verify(path); err != nil {
		file.Close()
		return nil, err
	}
	return n, nil
}

func (n *Namespace) verify(path string) error {
	kind, err := unix.IoctlRetInt(n.Fd(), unix.NS_GET_NSTYPE)
	if err != nil {
		return fmt.Errorf("%s: %w: its type cannot be read: %w", path, ErrNotNetns, err)
	}
	if kind != unix.CLONE_NEWNET {
		return fmt.Errorf("%s: %w: it is a namespace of kind %#x", path, ErrNotNetns, kind)
	}
	var st unix.Stat_t
	if err := unix.Fstat(n.Fd(), &st); err != nil {
		return fmt.Errorf("inspect %s: %w", path, err)
	}
	n.id = ID{Dev: st.Dev, Inode: st.Ino}
	return nil
}

// Fd returns the descriptor of the namespace, valid until Close.
func (n *Namespace) Fd() int { return int(n.file.Fd()) }

// ID returns the device and inode number of the namespace.
func (n *Namespace) ID() ID { return n.id }

// Close closes the descriptor.
func (n *Namespace) Close() error { return n.file.Close() }

// Do runs fn on a thread inside the namespace and waits for it. fn must not start goroutines that rely on the
// namespace. Sockets that it opens stay inside.
//
// Afterwards the thread returns to its namespace. If that fails, the thread ends with its goroutine, so that no
// other code ever runs on a thread in the wrong namespace.
func (n *Namespace) Do(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := n.run(fn)
		if home {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// run is like Do, but on the calling thread; home reports whether the thread is in its original namespace again.
func (n *Namespace) run(fn func() error) (home bool, err error) {
	var st unix.Stat_t
	if err := unix.Stat(own, &st); err != nil {
		return true, &fs.PathError{Op: "inspect the thread's network namespace", Path: own, Err: err}
	}
	if (ID{Dev: st.Dev, Inode: st.Ino}) == n.id {
		return true, fn()
	}
	back, err := unix.Open(own, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return true, &fs.PathError{Op: "open the thread's network namespace", Path: own, Err: err}
	}
	defer unix.Close(back)
	if err := unix.Setns(n.Fd(), unix.CLONE_NEWNET); err != nil {
		return true, fmt.Errorf("enter network namespace: %w", err)
	}
	err = fn()
	return unix.Setns(back, unix.CLONE_NEWNET) == nil, err
}

// Cookie returns the number by which eBPF programs identify the namespace. It is not reused until reboot.
func (n *Namespace) Cookie() (cookie uint64, err error) {
	err = n.Do(func() error {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open a socket: %w", err)
		}
		defer unix.Close(fd)
		if cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE); err != nil {
			return fmt.Errorf("read SO_NETNS_COOKIE: %w", err)
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("read the cookie of a network namespace: %w", err)
	}
	return cookie, nil
}
