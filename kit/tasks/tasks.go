// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package tasks determines how many more threads and processes the cgroups of this process allow.
//
// If the kernel refuses a new thread, the Go runtime ends the process at once, with stack traces instead of a message,
// which a program cannot prevent. Therefore a process checks the limits before it needs the threads.
package tasks

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Room is the remaining capacity of the most restrictive cgroup.
type Room struct {
	Left  int    // number of further tasks; never negative
	Limit int    // the limit of the cgroup
	File  string // path of its pids.max
}

// Left returns the remaining capacity of this process's mounted cgroups. It returns false if no cgroup has a limit,
// or if the limits cannot be read.
func Left() (Room, bool) { return left("/proc/self") }

// Need returns an error that names the limit if fewer than least tasks are left.
func Need(least int, what string) error { return need("/proc/self", least, what) }

func need(proc string, least int, what string) error {
	if r, limited := left(proc); limited && r.Left < least {
		return fmt.Errorf("%s allows %d more threads of %d, and %s needs %d: raise the limit "+
			"(TasksMax= of a unit, podPidsLimit of the kubelet, --pids-limit of a container)",
			r.File, r.Left, r.Limit, what, least)
	}
	return nil
}

func left(proc string) (tightest Room, limited bool) {
	for _, dir := range directories(proc) {
		limit, err := number(filepath.Join(dir, "pids.max"))
		if err != nil {
			continue // "max", or the root, which has no file
		}
		current, err := number(filepath.Join(dir, "pids.current"))
		if err != nil {
			continue
		}
		r := Room{Left: max(0, limit-current), Limit: limit, File: filepath.Join(dir, "pids.max")}
		if !limited || r.Left < tightest.Left {
			tightest, limited = r, true
		}
	}
	return tightest, limited
}

func number(path string) (int, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(content)))
}

// directories returns the directories of the cgroup that counts the tasks of the process, and of
// all its mounted parents.
func directories(proc string) (dirs []string) {
	cgroups, err := os.ReadFile(filepath.Join(proc, "cgroup"))
	if err != nil {
		return nil
	}
	mounts, err := os.ReadFile(filepath.Join(proc, "mountinfo"))
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(cgroups)) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(parts) != 3 {
			continue
		}
		unified := parts[0] == "0" && parts[1] == ""
		if !unified && !slices.Contains(strings.Split(parts[1], ","), "pids") {
			continue
		}
		for mount := range strings.Lines(string(mounts)) {
			root, point, ok := hierarchy(mount, unified)
			below, within := strings.CutPrefix(parts[2]+"/", strings.TrimSuffix(root, "/")+"/")
			if !ok || !within {
				continue
			}
			for dir := filepath.Join(point, below); ; dir = filepath.Dir(dir) {
				dirs = append(dirs, dir)
				if dir == point || len(dir) < len(point) {
					break
				}
			}
			break // other mounts show the same hierarchy
		}
	}
	return dirs
}

// hierarchy parses a line of mountinfo. If unified is set, it looks for the cgroup2 hierarchy,
// otherwise for the pids controller. It returns which part of the hierarchy is mounted, and where.
func hierarchy(line string, unified bool) (root, point string, ok bool) {
	before, after, found := strings.Cut(line, " - ")
	fields, of := strings.Fields(before), strings.Fields(after)
	if !found || len(fields) < 5 || len(of) < 3 {
		return "", "", false
	}
	if unified {
		ok = of[0] == "cgroup2"
	} else {
		ok = of[0] == "cgroup" && slices.Contains(strings.Split(of[2], ","), "pids")
	}
	return fields[3], fields[4], ok
}
