// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package source combines objects of several kinds, as informers deliver them, into one set for a
// watch.Sink.
//
// Each kind is listed and watched separately. The set is complete when all kinds are complete. Until then, the sink
// receives the known objects and deletes none, so a kind that cannot be listed, because of missing permissions or an
// unavailable API, causes no deletions.
package source

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
)

// Options of a Joint. All fields are required.
type Options struct {
	// RetryMin and RetryMax bound the pause after a failure of the sink; the pause doubles each
	// time.
	RetryMin, RetryMax time.Duration
	// Refresh is the interval at which Run calls Apply of an idle sink without changes, so that the sink can retry
	// objects that it refused.
	Refresh time.Duration
	Log     *slog.Logger
}

// batch is the maximum number of changes in one call of the sink.
const batch = 512

// Joint is the combined set. Upsert, Delete, Complete and Failed are safe for concurrent use and do
// not wait for the sink: undelivered changes are merged by key, so there is at most one per key.
type Joint[K comparable, V any] struct {
	sink    watch.Sink[K, V]
	options Options
	wake    chan struct{} // holds a token when Run may have work

	mu        sync.Mutex
	pending   map[K]change[V]  // guarded by mu; not yet delivered to the sink
	keys      map[K]struct{}   // guarded by mu; the keys of all kinds
	kinds     map[string]*kind // guarded by mu
	completed bool             // guarded by mu; the sink has received Complete
}

// kind is the state of one kind of object.
type kind struct {
	complete bool
	failure  error // why the kind delivers nothing; nil if no failure is known
}

type change[V any] struct {
	value  V
	delete bool
}

// New returns a Joint for these kinds of objects.
func New[K comparable, V any](sink watch.Sink[K, V], kinds []string, o Options) *Joint[K, V] {
	j := &Joint[K, V]{
		sink: sink, options: o, wake: make(chan struct{}, 1),
		pending: make(map[K]change[V]), keys: make(map[K]struct{}), kinds: make(map[string]*kind),
	}
	for _, name := range kinds {
		j.kinds[name] = &kind{}
	}
	return j
}

func (j *Joint[K, V]) notify() {
	select {
	case j.wake <- struct{}{}:
	default:
	}
}

// Upsert sets an object. The value is shared and must not be modified afterwards.
func (j *Joint[K, V]) Upsert(key K, value V) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.keys[key] = struct{}{}
	j.pending[key] = change[V]{value: value}
	j.notify()
}

// Delete removes an object.
func (j *Joint[K, V]) Delete(key K) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.keys, key)
	j.pending[key] = change[V]{delete: true}
	j.notify()
}

// Complete marks a kind as complete: all of its existing objects were set. It clears the failure of
// the kind.
func (j *Joint[K, V]) Complete(name string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	*j.kinds[name] = kind{complete: true}
	j.notify()
}

// Failed sets the reason why a kind delivers nothing; nil clears it. A complete kind stays
// complete: its missed changes will be delivered later.
func (j *Joint[K, V]) Failed(name string, why error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.kinds[name].failure = why
	j.notify()
}

// Run delivers the set to the sink until ctx ends, and then returns nil.
func (j *Joint[K, V]) Run(ctx context.Context) error {
	pause, reported := j.options.RetryMin, ""
	for {
		completed, err := j.deliver(ctx)
		if ctx.Err() != nil {
			return nil
		}
		wait, retry := j.options.Refresh, err != nil
		if retry {
			wait = pause/2 + rand.N(pause/2+1)
			pause = min(2*pause, j.options.RetryMax)
		} else {
			pause = j.options.RetryMin
			err = j.missing()
		}
		text := ""
		if err != nil {
			text = err.Error()
		}
		if text != reported || retry || completed { // after a retry or Complete the sink assumes that the failure has ended
			if text != "" && text != reported {
				j.options.Log.Warn("the source is applied incompletely", log.Err(err))
			}
			reported = text
			if err := j.sink.Failed(ctx, err); err != nil {
				if ctx.Err() != nil {
					return nil
				}
				return err
			}
		}
		wake := j.wake
		if retry {
			wake = nil // new changes do not shorten the pause after a failure
		}
		timer := time.NewTimer(wait)
		select {
		case <-wake:
		case <-timer.C:
			if !retry {
				j.refresh(ctx)
			}
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
		timer.Stop()
	}
}

// refresh calls Apply without changes. A failure is only logged; the next call retries.
func (j *Joint[K, V]) refresh(ctx context.Context) {
	if err := j.sink.Apply(ctx, watch.Changes[K, V]{}); err != nil {
		j.options.Log.Debug("a refresh of the sink failed", log.Err(err))
	}
}

// missing returns an error that lists the kinds that deliver nothing, grouped by failure; nil if no
// failure is known.
func (j *Joint[K, V]) missing() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	alike := make(map[string][]string)
	for _, name := range slices.Sorted(maps.Keys(j.kinds)) {
		if why := j.kinds[name].failure; why != nil {
			alike[why.Error()] = append(alike[why.Error()], name)
		}
	}
	var all []string
	for why, names := range alike {
		all = append(all, strings.Join(names, ", ")+": "+why)
	}
	if len(all) == 0 {
		return nil
	}
	slices.Sort(all)
	return errors.New(strings.Join(all, "; "))
}

// deliver sends the pending changes to the sink, and then Complete.
func (j *Joint[K, V]) deliver(ctx context.Context) (completed bool, err error) {
	for {
		taken, listed := j.take()
		if taken == nil {
			if listed == nil {
				return completed, nil
			}
			if err := j.sink.Complete(ctx, listed); err != nil {
				return completed, err
			}
			completed = true
			j.options.Log.Info("the source is complete", "keys", len(listed))
			j.mu.Lock()
			j.completed = true
			j.mu.Unlock()
			continue
		}
		c := watch.Changes[K, V]{Upserts: make(map[K]V), Deletes: make(map[K]struct{})}
		for key, x := range taken {
			if x.delete {
				c.Deletes[key] = struct{}{}
			} else {
				c.Upserts[key] = x.value
			}
		}
		if err := j.sink.Apply(ctx, c); err != nil {
			j.putBack(taken)
			return completed, err
		}
	}
}

// take returns up to a batch of pending changes. If none are pending and the sink has not received
// Complete although all kinds are complete, it returns the keys of the set instead.
func (j *Joint[K, V]) take() (some map[K]change[V], listed map[K]struct{}) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.pending) == 0 {
		for _, k := range j.kinds {
			if !k.complete {
				return nil, nil
			}
		}
		if j.completed {
			return nil, nil
		}
		return nil, maps.Clone(j.keys)
	}
	some = make(map[K]change[V], min(batch, len(j.pending)))
	for key, x := range j.pending {
		if len(some) == batch {
			break
		}
		some[key] = x
		delete(j.pending, key)
	}
	return some, nil
}

// putBack makes changes pending again, except where newer changes are pending.
func (j *Joint[K, V]) putBack(taken map[K]change[V]) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for key, x := range taken {
		if _, newer := j.pending[key]; !newer {
			j.pending[key] = x
		}
	}
}
