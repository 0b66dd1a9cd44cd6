// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package election elects one of the processes that name the same Lease, with client-go's leaderelection.
//
// Two rules are stricter than the library's. A holder stops 10 s after the start of its last successful renewal, no
// matter how long the response took: other candidates take over 15 s after they saw the renewal. And a process
// releases the Lease only after all functions that work during its term have returned.
package election

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/sluice-net/sluice/kit/log"
)

// Timing of an election. sluice-policy of earlier versions, which may compete for the same Lease, has the same
// values.
const (
	leaseDuration  = 15 * time.Second
	renewDeadline  = 10 * time.Second
	leaseRetry     = 2 * time.Second
	requestTimeout = renewDeadline / 2
)

// Election is a candidate for a Lease.
type Election struct {
	lease  *lock
	log    *slog.Logger
	status Status // guarded by mu, as are the next fields

	mu      sync.Mutex
	term    *term
	changed chan struct{} // closed and replaced when term changes
}

// Status is the state of an election from the point of view of one candidate.
type Status struct {
	Namespace, Lease string
	Identity         string // this process
	Holder           string // last seen holder; empty: none
	Elected          time.Time
	Leading          bool
	Problem          string // why the last read or write of the Lease failed
}

// term is a period in which this process holds the Lease.
type term struct {
	ctx     context.Context
	members sync.WaitGroup // running calls of lead functions
}

// New returns a candidate. identity must be different for each candidate.
func New(config *rest.Config, namespace, name, identity string, l *slog.Logger) (*Election, error) {
	c := rest.CopyConfig(config)
	c.Timeout = requestTimeout
	client, err := coordination.NewForConfig(c)
	if err != nil {
		return nil, err
	}
	e := &Election{
		log: l.With("lease", namespace+"/"+name), changed: make(chan struct{}),
		status: Status{Namespace: namespace, Lease: name, Identity: identity},
	}
	e.lease = &lock{
		Interface: &resourcelock.LeaseLock{
			LeaseMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Client: client,
			LockConfig: resourcelock.ResourceLockConfig{Identity: identity},
		},
		answered: e.answered,
	}
	return e, nil
}

// Run takes part in the election until ctx ends. It then waits for all functions that While has called, releases the
// Lease, and returns nil.
func (e *Election) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := e.serve(ctx); err != nil {
			return err
		}
		select {
		case <-time.After(leaseRetry + rand.N(leaseRetry/5)):
		case <-ctx.Done():
		}
	}
	return nil
}

// serve waits until this process is elected, and returns when it no longer is.
func (e *Election) serve(ctx context.Context) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	t := &term{ctx: ctx}
	late := time.AfterFunc(renewDeadline, func() { end(errLate) })
	late.Stop()
	defer late.Stop()
	held := false
	e.lease.begin(func(began time.Time) {
		late.Reset(time.Until(began.Add(renewDeadline)))
		if !held {
			held = true
			e.begin(t)
		}
	}, func() { end(errTaken) })
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: e.lease, LeaseDuration: leaseDuration, RenewDeadline: renewDeadline, RetryPeriod: leaseRetry,
		Callbacks: leaderelection.LeaderCallbacks{OnStartedLeading: func(context.Context) {}, OnStoppedLeading: func() {}},
	})
	if err != nil {
		return fmt.Errorf("election: %w", err)
	}
	elector.Run(ctx)
	if !held {
		return nil
	}
	why := context.Cause(ctx) // nil: the library has stopped by itself
	end(nil)
	e.end(t)
	switch {
	case errors.Is(why, errTaken), errors.Is(why, errLate):
		e.log.Warn("no longer leading", log.Err(why))
	case why == nil:
		e.log.Warn("no longer leading", log.Err(errLate))
	default:
		e.release()
	}
	return nil
}

// Reasons for the end of a term while the process continues.
var (
	errLate  = errors.New("the lease was not renewed in time")
	errTaken = errors.New("another process has the lease")
)

// begin records that this process is elected.
func (e *Election) begin(t *term) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.term, e.status.Leading, e.status.Elected = t, true, time.Now()
	close(e.changed)
	e.changed = make(chan struct{})
	e.log.Info("elected")
}

// end waits until all work of a term has returned.
func (e *Election) end(t *term) {
	e.mu.Lock()
	e.term = nil
	e.mu.Unlock()
	t.members.Wait()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.status.Leading, e.status.Elected = false, time.Time{}
}

// While implements subject.Leadership. Concurrent calls are allowed.
func (e *Election) While(ctx context.Context, lead func(ctx context.Context)) {
	for {
		t := e.join(ctx)
		if t == nil {
			return
		}
		leading, stop := context.WithCancel(ctx)
		after := context.AfterFunc(t.ctx, stop)
		lead(leading)
		after()
		stop()
		t.members.Done()
		select {
		case <-t.ctx.Done():
		case <-ctx.Done():
			return
		}
	}
}

// join waits for a term and becomes a member of it. It returns nil if ctx ended.
func (e *Election) join(ctx context.Context) *term {
	for {
		e.mu.Lock()
		t, changed := e.term, e.changed
		if t != nil && t.ctx.Err() == nil {
			t.members.Add(1)
			e.mu.Unlock()
			return t
		}
		e.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// release releases the Lease, so that another process need not wait until it expires.
func (e *Election) release() {
	ctx, cancel := context.WithTimeout(context.Background(), leaseRetry)
	defer cancel()
	record, _, err := e.lease.Interface.Get(ctx)
	if err == nil && record.HolderIdentity != e.lease.Identity() {
		return
	}
	if err == nil {
		now := metav1.Now()
		err = e.lease.Interface.Update(ctx, resourcelock.LeaderElectionRecord{
			LeaderTransitions: record.LeaderTransitions, LeaseDurationSeconds: 1, AcquireTime: now, RenewTime: now,
		})
	}
	if err != nil {
		e.log.Info("cannot release the lease; it expires by itself", log.Err(err))
	}
}

// answered records the result of a request for the Lease.
func (e *Election) answered(holder string, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err == nil {
		e.status.Holder, e.status.Problem = holder, ""
		return
	}
	if text := err.Error(); text != e.status.Problem {
		e.status.Problem = text
		e.log.Warn("cannot read or write the lease, trying again", log.Err(err))
	}
}

// Status returns the state of the election from the point of view of this process.
func (e *Election) Status() Status {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.status
}
