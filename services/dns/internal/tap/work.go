// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package tap

import (
	"context"
	"sync"

	"github.com/sluice-net/sluice/proxy/fair"
)

// Limits of the jobs that other goroutines than the readers run. Sizes are in bytes. Each job counts jobCost in
// addition to the size of its frames.
const (
	MaxHeldBytes       = 16 << 20
	MaxHeldBytesPerPod = 2 << 20
	jobCost            = 4 << 10

	maxRunning       = 16 // jobs that run at the same time
	maxRunningPerPod = 4
)

// job is work that is too slow for a reader: evaluating a large answer, or holding an answer.
type job struct {
	run func(context.Context)
	// abandon is called instead of run if other jobs need the memory.
	abandon func()

	item *fair.Item
}

// line contains the jobs of one pod.
type line struct {
	endpoint uint16
	jobs     []*job // jobs that do not run yet, oldest first
	running  int
	inTurn   bool
}

// work runs jobs. Pods take turns, and the number of running jobs of each pod is limited. So a pod with many jobs
// does not delay other pods.
type work struct {
	ctx context.Context

	mu      sync.Mutex
	limit   *fair.Limit      // guarded by mu
	lines   map[uint16]*line // guarded by mu; the pods with jobs
	turn    []*line          // guarded by mu; lines with a job that may run, in the order of their turns
	dropped []*job           // guarded by mu; jobs to be abandoned
	workers int              // guarded by mu
	closed  bool             // guarded by mu
	running sync.WaitGroup
}

func newWork(ctx context.Context) *work {
	return &work{
		ctx: ctx, limit: fair.New(MaxHeldBytes, MaxHeldBytesPerPod), lines: make(map[uint16]*line),
	}
}

// add adds a job of a pod. size is the size of its frames. If the limits are exceeded, jobs are abandoned: the oldest
// jobs of the pod that uses most, or else the new job. Running jobs do not count, because they are few.
func (w *work) add(endpoint uint16, size int, j *job) {
	w.mu.Lock()
	if !w.closed {
		j.item = w.limit.Add(endpoint, size+jobCost, func() {
			l := w.lines[endpoint]
			l.jobs = l.jobs[1:] // the dropped job is the oldest, which is the first
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

// settle adds a line to the turns if it has a job that may run, or removes the line if it has no jobs.
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
		if len(l.jobs) == 0 { // its jobs were abandoned in the meantime
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

// close waits for the jobs. Jobs that are added later are abandoned.
func (w *work) close() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.running.Wait()
}
