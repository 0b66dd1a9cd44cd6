// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package subject defines what the subjects of the controller have in common: a subject acts while the process is
// elected, and reports its pending work.
package subject

import (
	"context"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/looptime"
)

// Leadership notifies a subject when its process is elected.
type Leadership interface {
	// While calls lead whenever the process is elected, until ctx ends. The context of lead ends before another
	// process can be elected. lead must return when its context ends.
	While(ctx context.Context, lead func(ctx context.Context))
}

// Status is the state of a subject.
type Status struct {
	Name    string
	Pending int              // objects that wait for a request
	Done    uint64           // requests that succeeded
	Failed  uint64           // other requests
	Problem string           // why the last request failed; empty: it succeeded
	Times   looptime.Figures // how long requests took
}

// Requests counts the requests of a subject. The zero value is ready. It is safe for concurrent use.
type Requests struct {
	mu           sync.Mutex
	done, failed uint64           // guarded by mu
	problem      string           // guarded by mu
	times        looptime.Figures // guarded by mu
}

// Do makes a request and counts it. A request that fails because ctx ended is not counted.
func (r *Requests) Do(ctx context.Context, request func(ctx context.Context) error) error {
	began := time.Now()
	err := request(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.times.Add(time.Since(began))
	switch {
	case err == nil:
		r.done++
		r.problem = ""
	case ctx.Err() == nil:
		r.failed++
		r.problem = err.Error()
	}
	return err
}

// Status returns the status of a subject with the given name.
func (r *Requests) Status(name string, pending int) Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	return Status{Name: name, Pending: pending, Done: r.done, Failed: r.failed, Problem: r.problem, Times: r.times}
}
