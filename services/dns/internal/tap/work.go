// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package tap

import (
	"context"
	"sync"

	"github.com/sluice-net/sluice/services/dns/internal/fair"
)

// Limits of the work that no reader waits for. Sizes are in bytes; each job counts jobCost in addition to its frames.
const (
	MaxHeldBytes       = 16 << 20
	MaxHeldBytesPerPod = 2 << 20
	jobCost            = 4 << 10

	maxRunning       = 16 // jobs that run at a time
	maxRunningPerPod = 4
)

// job is work that no reader waits for: to evaluate a large answer, or to hold one.
type job struct {
	run func(context.Context)
	// abandon is called instead of run if other jobs need the memory.
	abandon func()

	item *fair.Item
}

// line has the jobs of one pod.
type line struct {
	endpoint uint16
	jobs     []*job // that do not run yet, oldest first
	running  int
	inTurn   bool
}

// work runs jobs. Pods take turns, and each one has a limit of the jobs that run, so that a pod with many jobs does not
// delay the others.
type work struct {
	ctx context.Context

	mu      sync.Mutex
	limit   *fair.Limit      // guarded by mu
	lines   map[uint16]*line // guarded by mu; the pods with jobs
	turn    []*line          // guarded by mu; with a job that may run, in their order
	dropped []*job           // guarded by mu; to be abandoned
	workers int              // guarded by mu
	closed  bool             // guarded by mu
	running sync.WaitGroup
}

func newWork(ctx context.Context) *work {
	return &work{
		ctx: ctx, limit: fair.New(MaxHeldBytes, MaxHeldBytesPerPod), lines: make(map[uint16]*line),
	}
}

// add adds a job of a pod. size is the size of its frames. Jobs that do not fit into the limits are abandoned: the
// oldest ones of the pod that uses most, or else the new one. Running jobs count no more, because they are few.
func (w *work) add(endpoint uint16, size int, j *job) {
	w.mu.Lock()
	if !w.closed {
		j.item = w.limit.Add(endpoint, size+jobCost, func() {
			l := w.lines[endpoint]
			l.jobs = l.jobs[1:] // the oldest one is the first
			w.settle(l)
			w.dropped = append(w.dropped, j)
		})
	}
	if j.item == nil {
		w.dropped = append(w.dropped, j)
	} else {
		l := w.lines[endpoint]
		if l == nil {
			l = &line{endpoint: endpoint}
			w.lines[endpoint] = l
		}
		l.jobs = append(l.jobs, j)
		w.settle(l)
		if w.workers < maxRunning && len(w.turn) > 0 {
			w.workers++
			w.running.Go(w.serve)
		}
	}
	dropped := w.dropped
	w.dropped = nil
	w.mu.Unlock()
	for _, j := range dropped {
		j.abandon()
	}
}

// settle adds a line to those that have a turn if it should be there, or forgets it if it has no jobs.
func (w *work) settle(l *line) {
	switch {
	case len(l.jobs) == 0 && l.running == 0 && !l.inTurn:
		delete(w.lines, l.endpoint)
	case len(l.jobs) > 0 && l.running < maxRunningPerPod && !l.inTurn:
		l.inTurn = true
		w.turn = append(w.turn, l)
	}
}

// serve runs jobs until no job may run.
func (w *work) serve() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.turn) > 0 {
		l := w.turn[0]
		w.turn = w.turn[1:]
		l.inTurn = false
		if len(l.jobs) == 0 { // its jobs were abandoned meanwhile
			w.settle(l)
			continue
		}
		j := l.jobs[0]
		l.jobs = l.jobs[1:]
		l.running++
		w.limit.Remove(j.item)
		w.settle(l)
		w.mu.Unlock()
		j.run(w.ctx)
		w.mu.Lock()
		l.running--
		w.settle(l)
	}
	w.workers--
}

// close waits for the jobs. Further ones are abandoned.
func (w *work) close() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.running.Wait()
}
