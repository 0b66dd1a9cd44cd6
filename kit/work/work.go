// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package work describes the background work of a process.
package work

import (
	"context"
	"log/slog"
	"time"

	"github.com/sluice-net/sluice/kit/log"
)

// Task is work that runs until its context ends. If Run returns earlier, it returns an error that must end the process.
type Task struct {
	Name string // for logs
	Run  func(ctx context.Context) error
}

// Await is a condition without which a part of the process cannot do all of its work.
type Await struct {
	What string // for logs and status: "the pod ranges of sluice-ipam"
	Done <-chan struct{}
}

// Every calls fn at intervals until ctx ends, and returns the error of ctx. Errors of fn are logged
// with the name of the work, and fn is called again after the next interval.
func Every(ctx context.Context, interval time.Duration, l *slog.Logger, name string, fn func() error) error {
	t := time.NewTicker(interval)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
		if err := fn(); err != nil && ctx.Err() == nil {
			l.Error("work failed; retrying at the next interval", "work", name, log.Err(err))
		}
	}
}
