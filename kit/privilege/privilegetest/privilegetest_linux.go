// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package privilegetest reads the credentials of running processes for tests.
package privilegetest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Threads returns the fields of /proc/<pid>/task/*/status, one map per thread, because the kernel
// keeps credentials per thread.
func Threads(t testing.TB, pid int) []map[string]string {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(tasks) == 0 {
		t.Fatalf("threads of %d: %v, %v", pid, tasks, err)
	}
	var all []map[string]string
	for _, task := range tasks {
		b, err := os.ReadFile(task)
		if err != nil {
			continue // the thread has ended
		}
		have := map[string]string{}
		for line := range strings.Lines(string(b)) {
			k, v, _ := strings.Cut(line, ":")
			have[k] = strings.TrimSpace(v)
		}
		all = append(all, have)
	}
	return all
}
