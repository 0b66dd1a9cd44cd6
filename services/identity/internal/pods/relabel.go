// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pods

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
)

const (
	// settle is how long changes are gathered: the labels of a namespace are those
	// of many pods.
	settle = 100 * time.Millisecond
	// inFlight is how many endpoints are moved at once.
	inFlight = 8
	// firstPause and longestPause bound the pause after a failure; it doubles.
	firstPause, longestPause = time.Second, 30 * time.Second
)

// Labels that change all the time would use up the numbers of the cluster. A
// node may ask for a number of its own for each of its pods at once, and after
// that for one each second.
const (
	newNumbers      = 256
	newNumbersEvery = time.Second
)

// errMany: the node has asked for too many new numbers.
var errMany = fmt.Errorf("more than %d new label sets, and one more each %s", newNumbers, newNumbersEvery)

// Allocator is what a Relabeler needs of an allocator.Allocator.
type Allocator interface {
	Find(labels label.Canonical, nodeLocal bool) identity.Identity
	Relabel(context.Context, allocator.Holder, label.Canonical) error
}

// Relabeler moves endpoints to the label set that their pod has now. It compares
// all of them after each change: what it missed, or could not do, it finds then.
type Relabeler struct {
	set       *Set
	allocator Allocator
	endpoints *watch.Hub[allocator.Holder, allocator.Endpoint]
	log       *slog.Logger
	limit     *rate.Limiter

	mu      sync.Mutex
	unused  int   // guarded by mu; what the limit allowed and no number was made for
	problem error // guarded by mu; of the last comparison
}

// NewRelabeler returns a Relabeler; endpoints are those that the allocator publishes.
func NewRelabeler(s *Set, a Allocator, endpoints *watch.Hub[allocator.Holder, allocator.Endpoint], l *slog.Logger,
) *Relabeler {
	return &Relabeler{
		set: s, allocator: a, endpoints: endpoints, log: l, limit: rate.NewLimiter(rate.Every(newNumbersEvery), newNumbers),
	}
}

// Problem says why endpoints have another identity than their pod; nil if none has.
func (r *Relabeler) Problem() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.problem
}

// Run compares until ctx is done; it then returns nil.
func (r *Relabeler) Run(ctx context.Context) error {
	pause := firstPause
	for {
		pods, endpoints := r.set.Changed(), r.endpoints.Changed()
		var again <-chan time.Time
		if r.compare(ctx) {
			again, pause = time.After(pause), min(2*pause, longestPause)
		} else {
			pause = firstPause
		}
		select {
		case <-pods:
		case <-endpoints:
		case <-again:
		case <-ctx.Done():
			return nil
		}
		select {
		case <-time.After(settle):
		case <-ctx.Done():
		}
	}
}

// compare moves every endpoint whose pod has another label set, and says whether
// something is to be tried again. An endpoint that owes a confirmation comes later.
func (r *Relabeler) compare(ctx context.Context) (retry bool) {
	var (
		mu       sync.Mutex
		failures []error // guarded by mu
		moved    int     // guarded by mu
	)
	note := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		if err == nil {
			moved++
		} else {
			failures = append(failures, err)
		}
	}
	var moves errgroup.Group
	moves.SetLimit(inFlight)
	for _, holder := range r.endpoints.Keys() {
		e, held := r.endpoints.Get(holder)
		if !held || e.Former != 0 || !Named(e.Workload.Pod) {
			continue
		}
		set, known, err := r.set.Labels(e.Workload.Pod)
		switch {
		case err != nil:
			note(err)
		case known && set.Text() != e.Identity.Labels.Text():
			moves.Go(func() error {
				if err := r.move(ctx, holder, set); !errors.Is(err, allocator.ErrUnconfirmed) {
					note(err)
				}
				return nil
			})
		}
	}
	_ = moves.Wait() // they note
	if moved > 0 {
		r.log.Info("endpoints were moved to the labels that their pods have now", "endpoints", moved)
	}
	r.report(ctx, failures)
	return len(failures) > 0
}

// move moves an endpoint, within the limit on new numbers.
func (r *Relabeler) move(ctx context.Context, holder allocator.Holder, set label.Canonical) error {
	fresh := r.allocator.Find(set, false).Number == 0
	if fresh && !r.allow() {
		return errMany
	}
	err := r.allocator.Relabel(ctx, holder, set)
	if fresh && err != nil {
		r.mu.Lock()
		r.unused++
		r.mu.Unlock()
	}
	return err
}

// allow says whether a new number may be asked for now.
func (r *Relabeler) allow() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.unused > 0 {
		r.unused--
		return true
	}
	return r.limit.Allow()
}

// report keeps what went wrong, and logs it when it begins or changes.
func (r *Relabeler) report(ctx context.Context, failures []error) {
	if ctx.Err() != nil {
		return
	}
	var problem error
	if len(failures) > 0 {
		problem = fmt.Errorf("%d endpoints do not have the identity of their pod's labels; the first: %w",
			len(failures), failures[0])
	}
	r.mu.Lock()
	before := r.problem
	r.problem = problem
	r.mu.Unlock()
	if problem != nil && (before == nil || before.Error() != problem.Error()) {
		r.log.Warn("endpoints keep their former identity; they are tried again", log.Err(problem))
	}
}
