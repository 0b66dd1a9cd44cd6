// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/identity"
)

// learn adds an identity to the mirror as of a revision of the store; a later revision in the mirror is kept. Called
// with mu held.
func (a *Allocator) learn(id identity.Identity, revision int64) {
	var since time.Time
	if a.available.ready {
		since = time.Now()
	}
	taken, changed := a.mirror.learn(id, revision, since)
	if !taken {
		return
	}
	if changed {
		a.candidates.begin(id.Number)
	}
	if h := a.held.other(id.Number, id.Labels); h != nil {
		// In the cluster, the number belongs to another label set than the one held here. Until Run has resolved that,
		// readers see the label set of this node's endpoints.
		h.ref = 0
		a.wake()
		return
	}
	a.pub.Upsert(id.Number, id)
}

// forget takes a number out of the mirror. Called with mu held.
func (a *Allocator) forget(n identity.Numeric) {
	e, ok := a.mirror.known[n]
	if !ok {
		return
	}
	h := a.held.byNumber[n]
	if h != nil {
		// It vanished under us: refer to it again, which creates it again.
		h.ref = 0
		a.wake()
		if h.labels.Text() == e.labels.Text() {
			a.mirror.keep(n)
			return
		}
	}
	a.mirror.remove(n)
	// Collection takes the grace period, and up to two rounds of the collector.
	a.candidates.end(n, e.since, time.Now(), a.cfg.Grace+2*a.cfg.Reconcile)
	if h == nil {
		a.pub.Delete(n)
	}
}

// note records an update before readers get it: the next process must know every identity that this node has
// published.
func (a *Allocator) note(u Update) {
	a.mu.Lock(opUpdate)
	c := a.mirror.news(u, a.held.has)
	a.mu.Unlock()
	if len(c.Put)+len(c.Drop) == 0 {
		return
	}
	if err := a.records.NoteKnown(c); err != nil {
		// Readers get the update nevertheless: the file is only a cache.
		a.cfg.Log.Error("known identities were not saved; after a restart without etcd, fewer are known", log.Err(err))
	}
}

// takeStep is how many identities are taken over before the lock is given up:
// a listing of the whole cluster must not keep callers waiting.
const takeStep = 1024

// observe is the sink of Store.Follow. Between two steps, callers see a mirror that is only partly updated. Only after
// the last step is it marked complete and as new as the update.
func (a *Allocator) observe(u Update) {
	if u.Complete {
		for some := range slices.Chunk(a.unlisted(u), takeStep) {
			a.mu.Lock(opUpdate)
			for _, n := range some {
				// A claim may have written it since.
				if e, ok := a.mirror.known[n]; ok && e.revision <= u.Revision {
					a.forget(n)
				}
			}
			a.mu.Unlock()
		}
	}
	for some := range slices.Chunk(u.Upserts, takeStep) {
		a.note(Update{Upserts: some})
		a.mu.Lock(opUpdate)
		for _, e := range some {
			a.learn(e.Identity, e.Revision)
		}
		a.mu.Unlock()
	}
	for some := range slices.Chunk(u.Deletes, takeStep) {
		a.note(Update{Deletes: some})
		a.mu.Lock(opUpdate)
		for _, d := range some {
			if e, ok := a.mirror.known[d.Number]; ok && e.revision < d.Revision {
				a.forget(d.Number)
			}
		}
		a.mu.Unlock()
	}
	a.mu.Lock(opUpdate)
	defer a.mu.Unlock()
	a.pub.Reach(u.Cluster, u.Revision)
	a.mirror.reach(u.Revision, u.Heard, time.Now(), a.cfg.Quarantine/heardSteps)
	if u.Complete {
		a.becomeReady()
	}
	if u.Complete || u.Beside {
		a.mirror.save() // also an empty listing is something to know
	}
}

// unlisted returns the numbers that are missing from a complete listing and are not newer than it. After a reset of the
// store (u.Reset, such as a restored backup), all numbers known before are older than the listing.
func (a *Allocator) unlisted(u Update) []identity.Numeric {
	listed := make(map[identity.Numeric]struct{}, len(u.Upserts))
	for _, e := range u.Upserts {
		listed[e.Identity.Number] = struct{}{}
	}
	a.mu.Lock(opUpdate)
	defer a.mu.Unlock()
	return a.mirror.unlisted(u, listed)
}

// heardSteps bounds how far the cache's time of the last sign of the store may
// be behind, as a part of the quarantine time.
const heardSteps = 8
