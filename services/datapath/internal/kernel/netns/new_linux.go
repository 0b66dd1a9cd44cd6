// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netns

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// New makes a namespace. It ends when neither a descriptor nor a socket of it is open.
func New() (*Namespace, error) {
	type result struct {
		n   *Namespace
		err error
	}
	done := make(chan result, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- result{err: fmt.Errorf("make a network namespace: %w", err)}
			return
		}
		n, err := Current()
		done <- result{n, err}
	}()
	r := <-done
	return r.n, r.err
}

// FromFile returns the namespace of a descriptor, which it takes over, also if it fails.
func FromFile(fd int) (*Namespace, error) {
	n := &Namespace{file: os.NewFile(uintptr(fd), "network namespace")}
	if err := n.verify("descriptor"); err != nil {
		n.file.Close()
		return nil, err
	}
	return n, nil
}
