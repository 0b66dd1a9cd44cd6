// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package leaktest fails a test binary that leaves something behind.
//
//	func TestMain(m *testing.M) { leaktest.Main(m) }
//
// Goroutines and file descriptors are always checked. Other things that a package creates, such as
// network namespaces or mounts, are passed as Resources.
package leaktest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// patience is how long background cleanup may take. A binary without leaks does not wait, so it
// only has to be longer than the pauses of a busy machine.
var patience = 30 * time.Second

// Resource lists the existing items of one kind, such as network namespaces. An item that exists after the tests and
// did not exist before them is a leak.
type Resource struct {
	Name string
	List func() ([]string, error)
}

// Main runs the tests of a package and ends the process.
func Main(m *testing.M, resources ...Resource) { os.Exit(Run(m, resources...)) }

// Run is Main without the exit: it returns the exit code.
func Run(m *testing.M, resources ...Resource) int {
	check, err := begin(append([]Resource{Descriptors()}, resources...))
	if err != nil {
		fmt.Fprintf(os.Stderr, "leaktest: %v\n", err)
		return 1
	}
	code := m.Run()
	if code != 0 {
		return code // failed tests may leak; only their own message matters
	}
	if err := errors.Join(ended(), check()); err != nil {
		fmt.Fprintf(os.Stderr, "leaktest: %v\n", err)
		return 1
	}
	return code
}

func begin(resources []Resource) (check func() error, _ error) {
	before := make([]map[string]int, len(resources))
	for i, r := range resources {
		names, err := r.List()
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", r.Name, err)
		}
		before[i] = count(names)
	}
	return func() error {
		var errs []error
		for i, r := range resources {
			if err := gone(r, before[i]); err != nil {
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	}, nil
}

// ended waits until no goroutine of a test is left; goleak itself waits less than half a second.
func ended() error {
	for deadline := time.Now().Add(patience); ; {
		if err := goleak.Find(); err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

// gone waits until no leaked item is left.
func gone(r Resource, before map[string]int) error {
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		names, err := r.List()
		if err != nil {
			return fmt.Errorf("list %s: %w", r.Name, err)
		}
		var left []string
		for name, n := range count(names) {
			if n > before[name] {
				left = append(left, name)
			}
		}
		if left == nil {
			return nil
		}
		if time.Now().After(deadline) {
			slices.Sort(left)
			return fmt.Errorf("%d leaked %s:\n\t%s", len(left), r.Name, strings.Join(left, "\n\t"))
		}
	}
}

func count(names []string) map[string]int {
	m := map[string]int{}
	for _, n := range names {
		m[n]++
	}
	return m
}

// Descriptors lists the open files of this process.
func Descriptors() Resource {
	return Resource{Name: "file descriptors", List: func() ([]string, error) {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			return nil, err
		}
		var names []string
		for _, e := range entries {
			target, err := os.Readlink("/proc/self/fd/" + e.Name())
			if err != nil {
				continue // the descriptor of the listing itself, closed by now
			}
			// The Go runtime opens these once, on first use.
			if strings.HasPrefix(target, "anon_inode:[event") ||
				strings.Contains(target, "/cgroup/") || strings.HasPrefix(target, "/sys/fs/cgroup") {
				continue
			}
			if strings.HasPrefix(target, "pipe:") && splices(e.Name()) {
				continue
			}
			names = append(names, e.Name()+" -> "+target)
		}
		return names, nil
	}}
}

// splices reports whether a descriptor is an end of a pipe through which io.Copy moves bytes between two sockets. The
// Go runtime keeps such pipes until a later garbage collection. They hold 1 MiB; the kernel's default is 64 KiB.
func splices(descriptor string) bool {
	fd, err := strconv.Atoi(descriptor)
	if err != nil {
		return false
	}
	size, err := unix.FcntlInt(uintptr(fd), unix.F_GETPIPE_SZ, 0)
	return err == nil && size == 1<<20
}

// Files lists the paths that match a pattern of filepath.Glob, such as "/run/netns/mytest-*".
func Files(name, pattern string) Resource {
	return Resource{Name: name, List: func() ([]string, error) { return filepath.Glob(pattern) }}
}

// Mounts lists the mount points of this process below a directory.
func Mounts(below string) Resource {
	return Resource{Name: "mounts", List: func() ([]string, error) {
		b, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			return nil, err
		}
		var points []string
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], below) {
				points = append(points, f[4])
			}
		}
		return points, nil
	}}
}

// Links lists the network devices in this process's network namespace whose names match a pattern
// of path.Match.
func Links(pattern string) Resource {
	return Resource{Name: "network devices", List: func() ([]string, error) {
		entries, err := os.ReadDir("/proc/self/net/dev_snmp6")
		if errors.Is(err, fs.ErrNotExist) {
			entries, err = os.ReadDir("/sys/class/net")
		}
		if err != nil {
			return nil, err
		}
		var names []string
		for _, e := range entries {
			matches, err := path.Match(pattern, e.Name())
			if err != nil {
				return nil, err
			}
			if matches {
				names = append(names, e.Name())
			}
		}
		return names, nil
	}}
}
