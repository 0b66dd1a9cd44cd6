// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/identity"
)

// follower receives the changes that other nodes write to the store, and maintains the cache of the identities.
type follower struct {
	index    *index
	view     *View
	store    Store
	records  Records
	cfg      *Config
	uncached bool // the previous process has left no cache
}

// takeStep is the number of identities that are added before the lock is released, so that a listing of the whole
// cluster does not make callers wait.
const takeStep = 1024

// heardSteps limits how old the time of the last contact in the cache may be: the quarantine time divided by
// heardSteps.
const heardSteps = 8

// run follows the identities in the store.
func (f *follower) run(ctx context.Context) {
	var wait time.Duration
	for ctx.Err() == nil {
		began := time.Now()
		err := f.store.Follow(ctx, f.observe)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > f.cfg.RetryMax {
			wait = 0
		}
		if errors.Is(err, ErrUnavailable) {
			f.cfg.Log.Debug("following the store", log.Err(err))
		} else {
			f.cfg.Log.Error("following the store", log.Err(err))
		}
		f.cfg.pause(ctx, &wait)
	}
}

// observe receives the updates of Store.Follow. Between two steps of one update, callers see a mirror that is only
// partly updated. Only after the last step is the mirror marked as complete at the revision of the update.
func (f *follower) observe(u Update) {
	if u.Complete {
		for some := range slices.Chunk(f.unlisted(u), takeStep) {
			f.index.mu.Lock(opUpdate)
			for _, n := range some {
				// A claim may have written a later version.
				if e, ok := f.index.mirror.known[n]; ok && e.revision <= u.Revision {
					f.index.forget(n)
				}
			}
			f.index.mu.Unlock()
		}
	}
	for some := range slices.Chunk(u.Upserts, takeStep) {
		f.note(Update{Upserts: some})
		f.index.mu.Lock(opUpdate)
		for _, e := range some {
			f.index.learn(e.Identity, e.Revision)
		}
		f.index.mu.Unlock()
	}
	for some := range slices.Chunk(u.Deletes, takeStep) {
		f.note(Update{Deletes: some})
		f.index.mu.Lock(opUpdate)
		for _, d := range some {
			if e, ok := f.index.mirror.known[d.Number]; ok && e.revision < d.Revision {
				f.index.forget(d.Number)
			}
		}
		f.index.mu.Unlock()
	}
	f.index.mu.Lock(opUpdate)
	defer f.index.mu.Unlock()
	f.index.pub.Reach(u.Cluster, u.Revision)
	f.index.mirror.reach(u.Revision, u.Heard, time.Now(), f.cfg.Quarantine/heardSteps)
	if u.Complete {
		f.index.becomeReady()
	}
	if u.Complete || u.Beside {
		f.index.mirror.save() // save an empty listing, too
	}
}

// unlisted returns the numbers that are missing from a complete listing and are not newer than it. After a reset of the
// store (u.Reset, such as a restored backup), all numbers known before are older than the listing.
func (f *follower) unlisted(u Update) []identity.Numeric {
	listed := make(map[identity.Numeric]struct{}, len(u.Upserts))
	for _, e := range u.Upserts {
		listed[e.Identity.Number] = struct{}{}
	}
	f.index.mu.Lock(opUpdate)
	defer f.index.mu.Unlock()
	return f.index.mirror.unlisted(u, listed)
}

// note saves an update before readers receive it, because the next process must know every identity that this node has
// published.
func (f *follower) note(u Update) {
	f.index.mu.Lock(opUpdate)
	c := f.index.mirror.change(u, f.index.held.has)
	f.index.mu.Unlock()
	if len(c.Put)+len(c.Drop) == 0 {
		return
	}
	if err := f.records.NoteKnown(c); err != nil {
		// Readers receive the update even if it was not saved, because the file is only a cache.
		f.cfg.Log.Error("known identities were not saved; after a restart without etcd, fewer are known", log.Err(err))
	}
}

// runNumbers follows the counts that the collector publishes.
func (f *follower) runNumbers(ctx context.Context) {
	var wait time.Duration
	for ctx.Err() == nil {
		if err := f.store.FollowNumbers(ctx, f.observeNumbers); err != nil && ctx.Err() == nil {
			f.cfg.Log.Debug("cannot watch the identity counts of tenants", log.Err(err))
		}
		f.cfg.pause(ctx, &wait)
	}
}

// observeNumbers receives the updates of Store.FollowNumbers.
func (f *follower) observeNumbers(n Numbers) {
	f.index.mu.Lock(opUpdate)
	defer f.index.mu.Unlock()
	f.index.tenants.publish(n)
}

// runCache writes changes to the cache in batches. It writes the first listing at once, and the last changes when it
// ends.
func (f *follower) runCache(ctx context.Context) {
	delay := f.cfg.KnownDelay
	if f.uncached {
		delay = 0
	}
	save := func() {
		if err := f.save(); err != nil {
			f.cfg.Log.Error("the cache of identities was not written; it is tried again with the next change", log.Err(err))
			return
		}
		delay = f.cfg.KnownDelay
	}
	for {
		select {
		case <-ctx.Done():
			if ready, _ := f.view.Ready(); ready {
				save()
			}
			return
		case <-f.index.mirror.dirty:
		}
		select {
		case <-time.After(delay):
		case <-ctx.Done():
		}
		// Do not save an incomplete listing as the content of the cluster.
		if ready, _ := f.view.Ready(); ready {
			save()
		}
	}
}

// save writes changed identities to the cache. Only one goroutine may call it at a time.
func (f *follower) save() error {
	var c KnownChange
	var was time.Time
	err := f.records.SaveKnown(func() KnownChange {
		c, was = f.take()
		return c
	})
	if err != nil {
		f.index.mu.Lock(opSave)
		defer f.index.mu.Unlock()
		f.index.mirror.putBack(c, was)
	}
	return err
}

// take returns the changes that SaveKnown has not received yet, and the previous value of heard.
func (f *follower) take() (c KnownChange, was time.Time) {
	f.index.mu.Lock(opSave)
	c, was = f.index.mirror.take()
	f.index.mu.Unlock()
	// Sort without holding the lock. Writing in the order of the file is faster.
	slices.Sort(c.Drop)
	slices.SortFunc(c.Put, identity.Compare)
	return c, was
}
