// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package leftovers makes and removes the objects of a cluster that outlive its processes: cgroups and its run
// directory.
package leftovers

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-net/sluice/test/k8s/internal/wait"
	"golang.org/x/sys/unix"
)

const cgroupRoot = "/sys/fs/cgroup"

// Hierarchies returns the mount points of cgroup file systems: one for each controller of version 1, and one for
// version 2.
func Hierarchies() ([]string, error) {
	content, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var dirs []string
	for line := range strings.Lines(string(content)) {
		mount, rest, _ := strings.Cut(line, " - ")
		fields := strings.Fields(mount)
		if len(fields) < 5 || !strings.HasPrefix(rest, "cgroup") || !strings.HasPrefix(fields[4], cgroupRoot) {
			continue
		}
		dirs = append(dirs, fields[4])
	}
	if len(dirs) == 0 {
		return nil, fmt.Errorf("no cgroup file system below %s", cgroupRoot)
	}
	return dirs, nil
}

// JoinCgroup moves this process to a cgroup, given by its path below the root of every hierarchy. It makes the cgroup
// if it is absent.
func JoinCgroup(cgroup string) error {
	dirs, err := Hierarchies()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		path := dir
		for part := range strings.SplitSeq(strings.Trim(cgroup, "/"), "/") {
			parent := path
			path = filepath.Join(path, part)
			if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
			// In version 1, a new cpuset has neither of these set, and accepts no process.
			for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
				value, err := os.ReadFile(filepath.Join(parent, file))
				if errors.Is(err, fs.ErrNotExist) {
					continue
				}
				if err == nil {
					err = os.WriteFile(filepath.Join(path, file), value, 0)
				}
				if err != nil {
					return err
				}
			}
		}
		if err := os.WriteFile(filepath.Join(path, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
			return fmt.Errorf("join %s: %w", path, err)
		}
	}
	return nil
}

// RemoveCgroup removes a cgroup and its children. It waits for ending processes in them.
func RemoveCgroup(cgroup string) error {
	dirs, err := Hierarchies()
	if err != nil {
		return err
	}
	return wait.Until(20*time.Second, func() error {
		var errs []error
		for _, dir := range dirs {
			errs = append(errs, removeTree(filepath.Join(dir, cgroup)))
		}
		return errors.Join(errs...)
	})
}

// removeTree removes only directories, the innermost first: the kernel removes the files of a cgroup with its
// directory.
func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		if e.IsDir() {
			errs = append(errs, removeTree(filepath.Join(dir, e.Name())))
		}
	}
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
		errs = append(errs, fmt.Errorf("remove %s: %w", dir, err))
	}
	return errors.Join(errs...)
}
