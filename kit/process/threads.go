// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process

import (
	"log/slog"
	"runtime"

	"github.com/sluice-net/sluice/kit/tasks"
)

// Threads that a service needs in addition to the threads that it has when it starts: the smallest number with which
// the smallest service worked in tests, and the number that a busy service may use on a machine with one CPU.
const (
	leastThreads = 6
	usualThreads = 16
)

// roomForThreads returns an error if the cgroup allows too few further threads to start, and logs a warning if it
// allows too few for a busy service. The check is needed because the Go runtime ends a process that cannot create a
// thread, without a log line.
func roomForThreads(logger *slog.Logger) error {
	if err := tasks.Need(leastThreads, "a service"); err != nil {
		return err
	}
	usual := usualThreads + runtime.GOMAXPROCS(0)
	if r, limited := tasks.Left(); limited && r.Left < usual {
		logger.Warn("few threads are left in the cgroup; if the service cannot create a thread, the Go runtime ends it",
			"limit", r.File, "left", r.Left, "of", r.Limit, "usual", usual)
	}
	return nil
}
