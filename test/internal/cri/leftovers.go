// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cri

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// mountsBelow lists the mount points below dir in the order of mounting.
func mountsBelow(dir string) ([]string, error) {
	content, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var mounts []string
	for line := range strings.Lines(string(content)) {
		fields := strings.Fields(line)
		if len(fields) > 4 && strings.HasPrefix(fields[4], dir+"/") {
			mounts = append(mounts, fields[4])
		}
	}
	return mounts, nil
}

// removeCgroups removes the cgroup and its children, given by the path below each hierarchy's root. The kernel
// refuses to remove cgroups with processes.
func removeCgroups(cgroup string) error {
	roots, err := filepath.Glob("/sys/fs/cgroup/*" + cgroup)
	if err != nil {
		return err
	}
	roots = append(roots, "/sys/fs/cgroup"+cgroup)
	var errs []error
	for _, root := range roots {
		var dirs []string
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		if err != nil {
			errs = append(errs, err)
		}
		for i := len(dirs) - 1; i >= 0; i-- {
			if err := os.Remove(dirs[i]); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, fmt.Errorf("remove cgroup: %w", err))
			}
		}
	}
	return errors.Join(errs...)
}
