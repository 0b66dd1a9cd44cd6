// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package netns opens network namespaces by path, proves that they are what
// the caller claims, and runs code inside them.
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
	// ErrNotNetns: the path leads to something else.
	ErrNotNetns = errors.New("not a network namespace")
	// ErrOwn: the path leads to the namespace that it was compared with.
	ErrOwn = errors.New("the node's own network namespace")
)

// ID tells namespaces apart while they live: device and inode of the nsfs file.
type ID struct{ Dev, Inode uint64 }

// Namespace is an open network namespace. It stays alive while it is open.
type Namespace struct {
	file *os.File
	id   ID
}

// Current opens the namespace of the calling thread.
func Current() (*Namespace, error) { return Open(own) }

// own leads to the namespace of the thread that opens it.
const own = "/proc/thread-self/ns/net"

// Open opens the namespace at path. A path at which there is nothing is
// fs.ErrNotExist, anything but a network namespace ErrNotNetns.
//
// The path is looked at before it is opened for reading, because opening some
// devices has effects and opening a pipe blocks.
func Open(path string) (*Namespace, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open network namespace", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var sfs unix.Statfs_t
	if err := unix.Fstatfs(fd, &sfs); err != nil {
		return nil, fmt.Errorf("look at %s: %w", path, err)
	}
	if sfs.Type != unix.NSFS_MAGIC {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Size == 0 {
			return nil, fmt.Errorf("%s: %w: it is an empty file, on which the namespace is not mounted yet, "+
				"or is mounted where this process does not see it (mount propagation)", path, ErrNotNetns)
		}
		return nil, fmt.Errorf("%s: %w: it is not a namespace at all", path, ErrNotNetns)
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
		return fmt.Errorf("look at %s: %w", path, err)
	}
	n.id = ID{Dev: st.Dev, Inode: st.Ino}
	return nil
}

// Fd is the descriptor of the namespace, valid until Close.
func (n *Namespace) Fd() int { return int(n.file.Fd()) }

// ID identifies the namespace.
func (n *Namespace) ID() ID { return n.id }

// Close lets it go.
func (n *Namespace) Close() error { return n.file.Close() }

// Do runs fn on a thread inside the namespace and waits for it. fn must not
// start goroutines that rely on where they run. Sockets that it opens stay
// inside.
//
// The thread goes back afterwards; if it cannot, it ends with its goroutine,
// so that nothing else ever runs on a thread in the wrong namespace.
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

// run is Do on the calling thread; home says that the thread is where it was.
func (n *Namespace) run(fn func() error) (home bool, err error) {
	var st unix.Stat_t
	if err := unix.Stat(own, &st); err != nil {
		return true, &fs.PathError{Op: "look at the thread's network namespace", Path: own, Err: err}
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

// Cookie is the number by which eBPF programs know the namespace. It is not
// given again while the machine runs.
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
