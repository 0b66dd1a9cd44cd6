// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kinds publishes which kinds of policy the API server has. The elected process asks the API server every few
// seconds, so that the many nodes need to ask only rarely.
package kinds

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/controller/internal/subject"
)

// API queries the API server.
type API interface {
	// Look returns the kinds of policy that the API server has, as group/version/resource, sorted. all is true if the
	// API server has every kind that Sluice knows.
	Look(ctx context.Context) (kinds []string, all bool, err error)
}

// Board passes the kinds on to the nodes.
type Board interface {
	// Publish replaces the published kinds.
	Publish(ctx context.Context, kinds []string) error
	// Watch calls told with the published kinds, and again after every change, until ctx ends. published is false
	// while nothing was published or the board is unreachable.
	Watch(ctx context.Context, told func(kinds []string, published bool))
}

// Intervals of queries. Each is extended by up to half at random.
const (
	showEvery = time.Second      // while the published kinds differ from the kinds that this process has found
	lookEvery = 3 * time.Second  // while a kind may still appear or is not published
	allEvery  = 30 * time.Second // while the API server has every kind
)

// Kinds publishes kinds while the process is elected.
type Kinds struct {
	api      API
	board    Board
	leads    subject.Leadership
	log      *slog.Logger
	requests subject.Requests
	changed  chan struct{} // has a token after the published kinds changed

	mu        sync.Mutex
	shown     []string                                  // guarded by mu
	published bool                                      // guarded by mu; shown is valid
	found     []string                                  // guarded by mu; result of the last query
	pending   bool                                      // guarded by mu; found was not published yet
	next      int                                       // guarded by mu
	told      map[int]func(kinds []string, public bool) // guarded by mu; callbacks of Watch
}

// New returns Kinds that publish while the process is elected.
func New(api API, b Board, leads subject.Leadership, l *slog.Logger) *Kinds {
	return &Kinds{
		api: api, board: b, leads: leads, log: l, changed: make(chan struct{}, 1),
		told: make(map[int]func([]string, bool)),
	}
}

// Run follows the board, and publishes kinds while the process is elected, until ctx ends; it then returns nil.
func (k *Kinds) Run(ctx context.Context) error {
	var following sync.WaitGroup
	following.Go(func() { k.board.Watch(ctx, k.show) })
	k.leads.While(ctx, k.lead)
	following.Wait()
	return nil
}

// Watch calls told with the present kinds, and again after every change, until ctx ends. In the elected process,
// these are the kinds that it has found itself. public is false while the kinds are unknown.
func (k *Kinds) Watch(ctx context.Context, told func(kinds []string, public bool)) {
	k.mu.Lock()
	id := k.next
	k.next++
	k.told[id] = told
	told(k.shown, k.published)
	k.mu.Unlock()
	<-ctx.Done()
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.told, id)
}

// show stores the published kinds.
func (k *Kinds) show(kinds []string, published bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.shown, k.published = kinds, published
	k.tell(kinds, published)
	select {
	case k.changed <- struct{}{}:
	default:
	}
}

// tell calls the callbacks of Watch. Called with mu held.
func (k *Kinds) tell(kinds []string, published bool) {
	for _, told := range k.told {
		told(kinds, published)
	}
}

// lead queries and publishes until ctx ends.
func (k *Kinds) lead(ctx context.Context) {
	var failure string
	for ctx.Err() == nil {
		wait, err := k.publish(ctx)
		switch {
		case err == nil:
			failure = ""
		case ctx.Err() == nil && err.Error() != failure:
			failure = err.Error()
			k.log.Warn("cannot publish the kinds of policy; nodes detect new kinds later", log.Err(err))
		}
		for due := time.After(wait + rand.N(wait/2)); due != nil; {
			select {
			case <-due:
				due = nil
			case <-k.changed:
				if k.differs() {
					due = time.After(showEvery)
				}
			case <-ctx.Done():
				return
			}
		}
	}
}

// differs reports whether the published kinds differ from the result of the last query.
func (k *Kinds) differs() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return !k.published || !slices.Equal(k.shown, k.found)
}

// publish queries the API server once, and publishes the result if it differs from the published kinds. It returns
// the time until the next query.
func (k *Kinds) publish(ctx context.Context) (time.Duration, error) {
	found, all, err := k.api.Look(ctx)
	if err != nil {
		return lookEvery, err
	}
	k.mu.Lock()
	shown := k.published && slices.Equal(k.shown, found)
	k.found, k.pending = found, !shown
	if !shown {
		k.tell(found, true)
	}
	k.mu.Unlock()
	if !shown {
		if err := k.requests.Do(ctx, func(ctx context.Context) error { return k.board.Publish(ctx, found) }); err != nil {
			return lookEvery, err
		}
		k.mu.Lock()
		k.pending = false
		k.mu.Unlock()
	}
	if all {
		return allEvery, nil
	}
	return lookEvery, nil
}

// Status returns 1 pending request if the found kinds are not published yet, otherwise 0, and the statistics of the
// requests.
func (k *Kinds) Status() subject.Status {
	k.mu.Lock()
	pending := 0
	if k.pending {
		pending = 1
	}
	k.mu.Unlock()
	return k.requests.Status("kinds of policy", pending)
}
