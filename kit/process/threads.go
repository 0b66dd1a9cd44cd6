// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process

import (
	"log/slog"
	"runtime"

	"github.com/sluice-net/sluice/kit/tasks"
)

// Threads that a service needs beside those that it has when it begins: the fewest with
// which the smallest one has been seen to serve, and what a busy one may have on a
// machine of one processor.
const (
	leastThreads = 6
	usualThreads = 16
)

// roomForThreads refuses a start for which a cgroup leaves too few threads, and warns of
// one that may end later: the Go runtime ends a process that gets none, without a line
// in the log.
func roomForThreads(logger *slog.Logger) error {
	if err := tasks.Need(leastThreads, "a service"); err != nil {
		return err
	}
	usual := usualThreads + runtime.GOMAXPROCS(0)
	if r, limited := tasks.Left(); limited && r.Left < usual {
		logger.Warn("few threads are left in the cgroup; a busy service that gets none is ended by the Go runtime",
			"limit", r.File, "left", r.Left, "of", r.Limit, "usual", usual)
	}
	return nil
}
