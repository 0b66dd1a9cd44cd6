// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pods

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
)

const (
	// batchDelay is the time for which changes are batched: a changed label of a namespace changes many pods.
	batchDelay = 100 * time.Millisecond
	// inFlight is the number of endpoints that are moved concurrently.
	inFlight = 8
	// firstPause and longestPause bound the pause after a failure; it doubles.
	firstPause, longestPause = time.Second, 30 * time.Second
	// patience is the time for which an endpoint keeps its former identity while its new one waits for its rate or for the
	// store, and the change was not admitted. After that it is isolated.
	patience = 15 * time.Second
)

// Reasons why an endpoint waits for its identity.
var (
	errRate = fmt.Errorf("labels change too often: the limits are %d changes at once and one more every %s for a pod, "+
		"%d and one more every %s for the pods of one controller, "+
		"and %d new label sets and one more every %s for this node",
		podRate.burst, podRate.every, controllerRate.burst, controllerRate.every, nodeRate.burst, nodeRate.every)
	errStore = errors.New("etcd is unavailable, and the label set is new to this node")
)

// Allocator is the part of allocator.Allocator that a Relabeler needs.
type Allocator interface {
	Find(labels label.Canonical, nodeLocal bool) identity.Identity
	Relabel(context.Context, allocator.Holder, label.Canonical) error
	Connected() (bool, <-chan struct{})
}

// Relabeler moves endpoints to the current label set of their pod. It compares all endpoints after each change, and
// therefore also makes moves that it missed or that failed before.
//
// If there is no number for its new label set, or it does not get one within patience, an endpoint is isolated: it
// never keeps the permissions of its former labels. A change after which it may do less does not wait: it needs no
// rate, and if the store is unavailable, the endpoint is isolated at once.
type Relabeler struct {
	set       *Set
	allocator Allocator
	endpoints *watch.Hub[allocator.Holder, allocator.Endpoint]
	log       *slog.Logger
	turns     *turns                           // Run's alone
	waiting   map[allocator.Holder]waitingMove // Run's alone

	mu      sync.Mutex
	problem error // guarded by mu; of the last comparison

	// Changes that wait for a rate or for the store, by endpoint, and changes that were admitted.
	held     map[allocator.Holder]HeldChange // guarded by mu
	last     uint64                          // guarded by mu; number of a change
	admitted map[allocator.Holder]uint64     // guarded by mu; numbers of changes
	changed  chan struct{}                   // guarded by mu; closed and replaced when held changes
	admits   chan struct{}                   // something was admitted
}

// HeldChange is a change of labels that waits for a rate or for the store.
type HeldChange struct {
	Number   uint64 // in this run of the process
	Identity identity.Numeric
	Labels   label.Canonical
}

// waitingMove is an endpoint whose labels differ from its pod's.
type waitingMove struct {
	since time.Time     // it has waited without a move
	err   error         // of the last attempt
	less  bool          // the change was admitted: the endpoint may do less after it
	again time.Time     // not before this time
	pause time.Duration // after the next failure
}

// NewRelabeler returns a Relabeler; endpoints is the allocator's publication of endpoints.
func NewRelabeler(s *Set, a Allocator, endpoints *watch.Hub[allocator.Holder, allocator.Endpoint], l *slog.Logger,
) *Relabeler {
	return &Relabeler{
		set: s, allocator: a, endpoints: endpoints, log: l, turns: newTurns(time.Now),
		waiting: map[allocator.Holder]waitingMove{}, held: map[allocator.Holder]HeldChange{},
		admitted: map[allocator.Holder]uint64{}, changed: make(chan struct{}), admits: make(chan struct{}, 1),
	}
}

// Held returns the changes that wait for a rate or for the store, ordered by number, and a channel that is closed when
// other changes wait.
func (r *Relabeler) Held() ([]HeldChange, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := slices.Collect(maps.Values(r.held))
	slices.SortFunc(all, func(a, b HeldChange) int { return cmp.Compare(a.Number, b.Number) })
	return all, r.changed
}

// Admit applies a change that waits, because the endpoint may do less after it. If the store is unavailable, the
// endpoint is isolated instead. The number of a change that does not wait is ignored.
func (r *Relabeler) Admit(number uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for holder, h := range r.held {
		if h.Number == number {
			r.admitted[holder] = number
			select {
			case r.admits <- struct{}{}:
			default:
			}
		}
	}
}

// isAdmitted reports whether a label change of an endpoint was admitted.
func (r *Relabeler) isAdmitted(holder allocator.Holder, from identity.Numeric, to label.Canonical) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	h, ok := r.held[holder]
	return ok && r.admitted[holder] == h.Number && h.Identity == from && h.Labels.Text() == to.Text()
}

// hold records which changes wait for a rate or for the store.
func (r *Relabeler) hold(sets map[allocator.Holder]Labels, endpoints map[allocator.Holder]allocator.Endpoint) {
	var waiting []want
	for _, holder := range slices.Sorted(maps.Keys(r.waiting)) {
		l, ok := sets[holder]
		if ok && r.waiting[holder].err != nil && l.Isolated == nil && endpoints[holder].Former == 0 {
			waiting = append(waiting, want{holder: holder, labels: l})
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	before := r.held
	r.held = make(map[allocator.Holder]HeldChange, len(waiting))
	moved := false
	for _, w := range waiting {
		from := endpoints[w.holder].Identity.Number
		h, ok := before[w.holder]
		if !ok || h.Identity != from || h.Labels.Text() != w.labels.Set.Text() {
			r.last++
			h, moved = HeldChange{Number: r.last, Identity: from, Labels: w.labels.Set}, true
		}
		r.held[w.holder] = h
	}
	for holder, number := range r.admitted {
		if h, ok := r.held[holder]; !ok || h.Number != number {
			delete(r.admitted, holder)
		}
	}
	if moved {
		close(r.changed)
		r.changed = make(chan struct{})
	}
}

// Problem returns why endpoints do not have the identity of their pod, or lack named ports of it; nil if there is no
// problem.
func (r *Relabeler) Problem() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.problem
}

// Run compares endpoints with their pods until ctx is done; it then returns nil.
func (r *Relabeler) Run(ctx context.Context) error {
	for {
		pods, endpoints := r.set.Changed(), r.endpoints.Changed()
		_, store := r.allocator.Connected()
		var again <-chan time.Time
		if at := r.compare(ctx); !at.IsZero() {
			again = time.After(time.Until(at))
		}
		select {
		case <-pods:
		case <-endpoints:
		case <-store:
		case <-again:
		case <-r.admits:
			continue // without the pause, because this change has already waited
		case <-ctx.Done():
			return nil
		}
		select {
		case <-time.After(batchDelay):
		case <-ctx.Done():
		}
	}
}

// outcome is the result of a comparison.
type outcome struct {
	isolated []error // reasons, one for each endpoint that is isolated
	kept     []error // reasons, one for each endpoint that keeps its former identity
	ports    []error // one for each endpoint without all named ports
}

// compare moves every endpoint whose pod has another label set, and returns when to compare again; zero: with the next
// change. Endpoints with a pending confirmation are moved later.
func (r *Relabeler) compare(ctx context.Context) (next time.Time) {
	now := time.Now()
	connected, _ := r.allocator.Connected()
	var (
		out     outcome
		moves   []move
		wants   []want
		differ  = map[allocator.Holder]waitingMove{}
		soonest = func(t time.Time) {
			if next.IsZero() || t.Before(next) {
				next = t
			}
		}
	)
	endpoints, sets := map[allocator.Holder]allocator.Endpoint{}, map[allocator.Holder]Labels{}
	for _, holder := range r.endpoints.Keys() {
		e, held := r.endpoints.Get(holder)
		if !held || !Named(e.Workload.Pod) {
			continue
		}
		l, known := r.set.Labels(e.Workload.Pod)
		if !known {
			continue
		}
		if l.Ports != nil {
			out.ports = append(out.ports, l.Ports)
		}
		if l.Isolated != nil {
			out.isolated = append(out.isolated, l.Isolated)
		}
		if l.Set.Text() == e.Identity.Labels.Text() {
			continue
		}
		w, waits := r.waiting[holder]
		if !waits {
			w = waitingMove{since: now, pause: firstPause}
		}
		w.less = r.isAdmitted(holder, e.Identity.Number, l.Set)
		differ[holder], endpoints[holder], sets[holder] = w, e, l
		switch {
		case e.Former != 0:
			// The datapath must confirm the last move first: until then the endpoint holds two numbers, and none can be
			// released.
		case l.Isolated != nil:
			moves = append(moves, move{want: want{holder: holder, labels: l}, to: l.Set})
		case now.Before(w.again):
			soonest(w.again)
		default:
			fresh := r.allocator.Find(l.Set, false).Number == 0
			if fresh && !connected {
				w.err = errStore
				differ[holder] = w
				continue
			}
			to := want{holder: holder, labels: l, fresh: fresh}
			if w.less {
				w.err = nil
				differ[holder] = w
				moves = append(moves, move{want: want{holder: holder, labels: l}, to: l.Set})
				continue
			}
			wants = append(wants, to)
		}
	}
	r.waiting = differ
	for _, w := range wants {
		d := differ[w.holder]
		d.err = errRate // until the endpoint's turn comes
		differ[w.holder] = d
	}
	allowed, later := r.turns.take(wants)
	if !later.IsZero() {
		soonest(later)
	}
	for _, w := range allowed {
		d := differ[w.holder]
		d.err = nil
		differ[w.holder] = d
		moves = append(moves, move{want: w, to: w.labels.Set})
	}
	r.hold(sets, endpoints)
	r.carryOut(ctx, moves, soonest)
	r.hold(sets, endpoints) // including the moves that failed
	r.isolate(ctx, endpoints, soonest)
	for _, holder := range slices.Sorted(maps.Keys(r.waiting)) {
		switch w := r.waiting[holder]; {
		case w.err == nil:
		case allocator.IsIsolated(endpoints[holder].Identity.Labels):
			out.isolated = append(out.isolated, w.err)
		default:
			out.kept = append(out.kept, w.err)
		}
	}
	r.report(ctx, out)
	return next
}

// move is one change of an endpoint's label set.
type move struct {
	want
	to label.Canonical
}

// carryOut moves several endpoints concurrently. Moved endpoints no longer wait.
func (r *Relabeler) carryOut(ctx context.Context, moves []move, soonest func(time.Time)) {
	errs := make([]error, len(moves))
	var group errgroup.Group
	group.SetLimit(inFlight)
	for i, m := range moves {
		group.Go(func() error {
			errs[i] = r.allocator.Relabel(ctx, m.holder, m.to)
			return nil
		})
	}
	_ = group.Wait() // the errors of the moves are in errs
	moved := 0
	for i, m := range moves {
		switch err := errs[i]; {
		case errors.Is(err, allocator.ErrUnconfirmed):
		case err != nil:
			r.turns.giveBack(m.want)
			w := r.waiting[m.holder]
			w.err, w.again = err, time.Now().Add(w.pause)
			w.pause = min(2*w.pause, longestPause)
			r.waiting[m.holder] = w
			soonest(w.again)
		default:
			moved++
			delete(r.waiting, m.holder)
		}
	}
	if moved > 0 {
		r.log.Info("endpoints relabelled to the current labels of their pods", "endpoints", moved)
	}
}

// isolate isolates endpoints that do not get the label set of their pod: at once if there is no number for it, or if
// they may do less with it, and otherwise after patience.
func (r *Relabeler) isolate(ctx context.Context, endpoints map[allocator.Holder]allocator.Endpoint,
	soonest func(time.Time),
) {
	now := time.Now()
	for _, holder := range slices.Sorted(maps.Keys(r.waiting)) {
		w, e := r.waiting[holder], endpoints[holder]
		if w.err == nil || e.Former != 0 || allocator.IsIsolated(e.Identity.Labels) {
			continue
		}
		_, full := errors.AsType[*allocator.QuotaError](w.err)
		if end := w.since.Add(patience); !full && !w.less && now.Before(end) {
			soonest(end)
			continue
		}
		if err := r.allocator.Relabel(ctx, holder, allocator.Isolated()); err != nil {
			if !errors.Is(err, allocator.ErrUnconfirmed) {
				w.err = fmt.Errorf("%w (it cannot be isolated either: %w)", w.err, err)
				r.waiting[holder] = w
				soonest(now.Add(firstPause))
			}
			continue
		}
		r.log.WarnContext(ctx, "an endpoint is isolated until its pod's labels have a number",
			"endpoint", holder.String(), "pod", e.Workload.Pod.Namespace+"/"+e.Workload.Pod.Name, log.Err(w.err))
		e.Identity.Labels = allocator.Isolated()
		endpoints[holder] = e
	}
}

// report stores the problems of a comparison, and logs them when they begin or change.
func (r *Relabeler) report(ctx context.Context, out outcome) {
	if ctx.Err() != nil {
		return
	}
	var all []error
	if len(out.isolated) > 0 {
		all = append(all, fmt.Errorf("%d endpoints are isolated, because the labels of their pods have no identity; "+
			"the first: %w", len(out.isolated), out.isolated[0]))
	}
	if len(out.kept) > 0 {
		all = append(all, fmt.Errorf("%d endpoints do not have the identity of their pod's labels; the first: %w",
			len(out.kept), out.kept[0]))
	}
	if len(out.ports) > 0 {
		all = append(all, fmt.Errorf("%d endpoints do not have all named ports; the first: %w", len(out.ports), out.ports[0]))
	}
	problem := errors.Join(all...)
	r.mu.Lock()
	before := r.problem
	r.problem = problem
	r.mu.Unlock()
	if problem != nil && (before == nil || before.Error() != problem.Error()) {
		r.log.Warn("endpoints do not have the labels of their pods yet; retrying", log.Err(problem))
	}
}
