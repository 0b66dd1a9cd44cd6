// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package confirmed

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
)

// Exchange reports the revision that this node has applied. While this node is the collector, it also publishes the
// summary.
type Exchange struct {
	Options
	leads chan bool // capacity 1: the newest value of whether this node is the collector

	mu      sync.Mutex
	summary Summary   // guarded by mu; the published summary
	last    Report    // guarded by mu; the last report in the store, as far as this node knows
	due     time.Time // guarded by mu; time of the next report; zero: none is due
	asked   time.Time // guarded by mu; time at which Wants was last reported
	denied  error     // guarded by mu; error of the last write
}

// Options configure an Exchange. All except Interval are required.
type Options struct {
	Store       Store
	Node        Node
	Incarnation string        // of this node
	Rest        time.Duration // time for which an address is in quarantine without confirmations
	// Interval is the minimum time within which each node reports once, and the minimum time between two summaries;
	// 10 s if 0.
	Interval time.Duration
	Log      *slog.Logger
}

// New returns an Exchange, which does nothing until Run is called.
func New(o Options) *Exchange {
	o.Interval = cmp.Or(o.Interval, 10*time.Second)
	return &Exchange{Options: o, leads: make(chan bool, 1)}
}

// spread returns the interval over which all nodes spread their reports.
func (e *Exchange) spread() time.Duration {
	return max(e.Interval, time.Duration(e.Node.Nodes())*time.Second/50)
}

// Lead sets whether this node is the collector. It does not wait.
func (e *Exchange) Lead(leads bool) {
	for {
		select {
		case e.leads <- leads:
			return
		default:
		}
		select {
		case <-e.leads:
		default:
		}
	}
}

// Err returns why the etcd role of this node may not report or publish; nil if it may.
func (e *Exchange) Err() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.denied
}

// Run exchanges confirmations until ctx ends; it then returns nil.
func (e *Exchange) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() {
		e.follow(ctx, func(ctx context.Context) error { return e.Store.FollowSummary(ctx, e.take) })
	})
	wg.Go(func() { e.collect(ctx) })
	tick := time.NewTicker(min(time.Second, e.Interval)) // a step without a report reads only memory
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			e.step(ctx, time.Now())
		case <-ctx.Done():
			wg.Wait()
			return nil
		}
	}
}

// retry is the shortest pause after the store failed.
const retry = 2 * time.Second

func (e *Exchange) follow(ctx context.Context, f func(context.Context) error) {
	for {
		err := f(ctx)
		if ctx.Err() != nil {
			return
		}
		e.Log.Debug("following what nodes confirm", log.Err(err))
		select {
		case <-time.After(retry + rand.N(retry)):
		case <-ctx.Done():
			return
		}
	}
}

// take receives a published summary.
func (e *Exchange) take(s Summary, listed bool) {
	e.mu.Lock()
	if listed {
		e.last, e.due = Report{}, time.Time{} // the store may have lost the report
	}
	e.summary = s
	e.mu.Unlock()
	e.Node.SetConfirmed(s)
}

// step writes this node's report if one is due, because the node needs another revision to be confirmed, or confirms
// one itself.
func (e *Exchange) step(ctx context.Context, now time.Time) {
	at, wants := e.Node.Applied(), e.Node.Wants()
	e.mu.Lock()
	next := Report{Incarnation: e.Incarnation, Cluster: at.Cluster, Revision: at.Revision, Wants: wants}
	asks := wants != e.last.Wants && now.Sub(e.asked) >= e.Interval
	confirms := e.summary.Wanted > 0 &&
		(e.last.Cluster != e.summary.Cluster || e.last.Revision < e.summary.Wanted)
	switch {
	case !confirms:
		e.due = time.Time{}
	case e.due.IsZero():
		e.due = now.Add(rand.N(e.spread()))
	}
	reports := confirms && !now.Before(e.due) && at.Cluster == e.summary.Cluster && at.Revision >= e.summary.Wanted
	e.mu.Unlock()
	if !asks && !reports {
		return
	}
	err := e.Store.Report(ctx, next)
	e.note(err)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.asked = now
	if err == nil {
		e.last = next
		return
	}
	e.due = now.Add(rand.N(e.spread()))
}

// note records whether this node lacks a grant in the store.
func (e *Exchange) note(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case errors.Is(err, ErrDenied):
		if e.denied == nil {
			e.Log.Warn("etcd denies confirmations: released addresses stay in quarantine for the full time", log.Err(err))
		}
		e.denied = err
	case err == nil:
		e.denied = nil
	default:
		e.Log.Debug("confirming mappings", log.Err(err))
	}
}

// collect publishes the summary while this node is the collector.
func (e *Exchange) collect(ctx context.Context) {
	stop := func() {}
	defer func() { stop() }()
	var tracker *Tracker
	tick := time.NewTicker(e.Interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case leads := <-e.leads:
			switch {
			case leads && tracker == nil:
				tracker = NewTracker(e.Rest)
				stop = e.watch(ctx, tracker)
			case !leads && tracker != nil:
				stop()
				tracker, stop = nil, func() {}
			}
			continue
		case <-tick.C:
		}
		if tracker != nil {
			e.publish(ctx, tracker.Summary())
		}
	}
}

// publish publishes a summary if it is newer than the last published one.
func (e *Exchange) publish(ctx context.Context, s Summary) {
	e.mu.Lock()
	last := e.summary
	e.mu.Unlock()
	if s.Cluster == 0 || s.Wanted == 0 && last.Wanted == 0 {
		return // no node needs a confirmation
	}
	if s.Cluster == last.Cluster {
		s.Revision = max(s.Revision, last.Revision) // a confirmed revision stays confirmed
	}
	if s == last {
		return
	}
	err := e.Store.Publish(ctx, s)
	e.note(err)
}

// watch follows leases and reports until stop is called.
func (e *Exchange) watch(ctx context.Context, t *Tracker) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { e.follow(ctx, func(ctx context.Context) error { return e.Store.FollowNodes(ctx, t) }) })
	wg.Go(func() { e.follow(ctx, func(ctx context.Context) error { return e.Store.FollowReports(ctx, t) }) })
	return func() { cancel(); wg.Wait() }
}
