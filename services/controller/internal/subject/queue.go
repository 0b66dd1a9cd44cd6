// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package subject

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/shares"
)

// Timing of a Queue.
const (
	FirstPause   = time.Second // delay after a request that got no answer
	longestPause = 30 * time.Second
)

// MaxBatch is the number of requests in one batch. Objects that become due during a batch take part in the next one.
const MaxBatch = 20

// Queue has the objects of a subject that may need a request, and when. The number of requests per second is limited.
// Tenants take turns, so that many objects of one tenant do not delay the requests about other tenants' objects.
type Queue[K comparable] struct {
	compare func(a, b K) int
	tenant  func(K) shares.Tenant
	now     func() time.Time
	wake    chan struct{} // has a token when an object may be due
	turns   *shares.Turns // used by Lead

	mu  sync.Mutex
	due map[K]time.Time
}

// NewQueue returns an empty Queue. compare orders objects that are due at the same time.
func NewQueue[K comparable](compare func(a, b K) int, tenant func(K) shares.Tenant, now func() time.Time) *Queue[K] {
	return &Queue[K]{
		compare: compare, tenant: tenant, now: now, wake: make(chan struct{}, 1), turns: shares.NewTurns(),
		due: make(map[K]time.Time),
	}
}

// Soon makes an object due now, unless it is due already.
func (q *Queue[K]) Soon(k K) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.now()
	if at, ok := q.due[k]; !ok || at.After(now) {
		q.due[k] = now
	}
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// Later makes an object due after an interval, unless it is due earlier.
func (q *Queue[K]) Later(k K, in time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if _, ok := q.due[k]; !ok {
		q.due[k] = q.now().Add(in)
	}
}

// Forget removes an object.
func (q *Queue[K]) Forget(k K) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.due, k)
}

// Pending returns the number of objects.
func (q *Queue[K]) Pending() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.due)
}

// Lead removes each object when it is due and calls write for it, until ctx ends. requested reports whether write has
// sent a request. After an error, which means that the API server did not respond, the object is due as before, and
// Lead pauses.
func (q *Queue[K]) Lead(ctx context.Context, l *slog.Logger, what string,
	write func(ctx context.Context, k K) (requested bool, err error),
) {
	wait := FirstPause
	for ctx.Err() == nil {
		waiting, next := q.waiting()
		some := len(waiting.tenants) > 0
		failed := q.writeBatch(ctx, waiting, write)
		var timer <-chan time.Time
		wake := q.wake
		switch {
		case ctx.Err() != nil:
			return
		case failed != nil:
			l.Warn("cannot write to the API server", "subject", what, log.Err(failed), "again", wait)
			timer, wake, wait = time.After(wait), nil, min(2*wait, longestPause)
		case some:
			wait = FirstPause
			continue
		case !next.IsZero():
			timer = time.After(max(0, next.Sub(q.now())))
		}
		select {
		case <-timer:
		case <-wake:
		case <-ctx.Done():
		}
	}
}

// writeBatch sends at most MaxBatch requests about waiting objects.
func (q *Queue[K]) writeBatch(ctx context.Context, waiting *agenda[K], write func(context.Context, K) (bool, error),
) error {
	for sent := 0; sent < MaxBatch; {
		tenant, k, ok := waiting.next(q.turns, q.compare)
		if !ok {
			return nil
		}
		q.Forget(k)
		requested, err := write(ctx, k)
		if err != nil {
			q.mu.Lock()
			defer q.mu.Unlock()
			q.due[k] = waiting.due[k]
			return err
		}
		if requested {
			q.turns.Serve(tenant)
			sent++
		}
	}
	return nil
}

// agenda has the objects that are due, by tenant.
type agenda[K comparable] struct {
	tenants map[shares.Tenant][]K
	sorted  map[shares.Tenant]bool
	due     map[K]time.Time
}

// next selects the tenant whose turn it is. It removes and returns the object of this tenant that has waited longest.
func (a *agenda[K]) next(turns *shares.Turns, compare func(a, b K) int) (of shares.Tenant, k K, ok bool) {
	for t := range a.tenants {
		if !ok || turns.Compare(t, of) < 0 {
			of, ok = t, true
		}
	}
	if !ok {
		return of, k, false
	}
	keys := a.tenants[of]
	if !a.sorted[of] {
		a.sorted[of] = true
		slices.SortFunc(keys, func(x, y K) int { return cmp.Or(a.due[x].Compare(a.due[y]), compare(x, y)) })
	}
	if k = keys[0]; len(keys) == 1 {
		delete(a.tenants, of)
	} else {
		a.tenants[of] = keys[1:]
	}
	return of, k, true
}

// waiting returns the objects that are due, and the time at which the next one is due.
func (q *Queue[K]) waiting() (due *agenda[K], next time.Time) {
	q.mu.Lock()
	all := maps.Clone(q.due)
	q.mu.Unlock()
	due = &agenda[K]{
		tenants: make(map[shares.Tenant][]K), sorted: make(map[shares.Tenant]bool), due: make(map[K]time.Time),
	}
	now := q.now()
	for k, at := range all {
		switch {
		case !at.After(now):
			t := q.tenant(k)
			q.turns.Join(t)
			due.tenants[t] = append(due.tenants[t], k)
			due.due[k] = at
		case next.IsZero() || at.Before(next):
			next = at
		}
	}
	q.turns.Keep(func(t shares.Tenant) bool { return due.tenants[t] != nil })
	return due, next
}

// Shorten cuts a text to limit bytes.
func Shorten(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	const more = "…"
	return strings.ToValidUTF8(text[:limit-len(more)], "") + more
}
