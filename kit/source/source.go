// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package source joins the objects of several kinds, as informers deliver them,
// into one set for a watch.Sink.
//
// Each kind is listed and watched by itself. The set is complete when every kind
// has said that it is; until then the sink gets what is there, and keeps what it
// has beside it. So a kind that is never listed, because the rights for it are
// missing or its API is away, deletes nothing.
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

// Options of a Joint. All are needed.
type Options struct {
	// RetryMin and RetryMax bound the pause after the sink failed; it doubles.
	RetryMin, RetryMax time.Duration
	// Refresh is how long the sink gets nothing before it gets a call of Apply
	// without changes, in which it may try again what it refused.
	Refresh time.Duration
	Log     *slog.Logger
}

// batch is how many changes the sink gets at once.
const batch = 512

// Joint is the set. Upsert, Delete, Complete and Failed may be called from any
// goroutine and do not wait for the sink: changes that it has not taken are
// merged by key, so that there are never more than keys.
type Joint[K comparable, V any] struct {
	sink    watch.Sink[K, V]
	options Options
	wake    chan struct{} // has a token when there may be something to do

	mu        sync.Mutex
	pending   map[K]change[V]  // guarded by mu; not taken by the sink
	keys      map[K]struct{}   // guarded by mu; of all kinds
	kinds     map[string]*kind // guarded by mu
	completed bool             // guarded by mu; the sink knows that the set is complete
}

// kind is what is known of one.
type kind struct {
	complete bool
	failure  error // why nothing comes from it; nil if that is not known
}

type change[V any] struct {
	value  V
	delete bool
}

// New returns a Joint of the kinds that the source has.
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

// Upsert sets an object. It is shared and must not be changed.
func (j *Joint[K, V]) Upsert(key K, value V) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.keys[key] = struct{}{}
	j.pending[key] = change[V]{value: value}
	j.notify()
}

// Delete removes an object that was there.
func (j *Joint[K, V]) Delete(key K) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.keys, key)
	j.pending[key] = change[V]{delete: true}
	j.notify()
}

// Complete says that every object of a kind of New that exists was set, and
// takes back its failure.
func (j *Joint[K, V]) Complete(name string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	*j.kinds[name] = kind{complete: true}
	j.notify()
}

// Failed says why nothing comes from a kind of New; nil takes it back. A kind
// that is complete stays so: what it misses it will say later.
func (j *Joint[K, V]) Failed(name string, why error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.kinds[name].failure = why
	j.notify()
}

// Run hands everything to the sink until ctx is done; it then returns nil.
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
		if text != reported || retry || completed { // which the sink takes for the end of what failed
			if text != "" && text != reported {
				j.options.Log.Warn("the source is not taken over completely", log.Err(err))
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
			wake = nil // changes do not make a sink that failed work again
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

// refresh is a call without changes. What comes of it the next one says.
func (j *Joint[K, V]) refresh(ctx context.Context) {
	if err := j.sink.Apply(ctx, watch.Changes[K, V]{}); err != nil {
		j.options.Log.Debug("the sink did not take a call without changes", log.Err(err))
	}
}

// missing says from which kinds nothing comes, those together that fail alike;
// nil if it is not known that something is wrong.
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

// deliver hands on what is pending, and then completeness.
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

// take returns some changes that are pending. If there are none, it returns the
// keys when the sink has to know that they are all; else nothing.
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

// putBack makes changes pending again, unless newer ones are.
func (j *Joint[K, V]) putBack(taken map[K]change[V]) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for key, x := range taken {
		if _, newer := j.pending[key]; !newer {
			j.pending[key] = x
		}
	}
}
