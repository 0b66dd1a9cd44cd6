// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/identity"
)

// learn puts an identity into the mirror as the store had it at a revision;
// what the mirror has from a later revision stays. It runs with mu held.
func (a *Allocator) learn(id identity.Identity, revision int64) {
	text := id.Labels.Text()
	if e, ok := a.known[id.Number]; ok {
		if e.revision > revision {
			return
		}
		if e.labels.Text() != text && a.byText[e.labels.Text()] == id.Number {
			delete(a.byText, e.labels.Text())
		}
	}
	e, ok := a.known[id.Number]
	if !ok || e.labels.Text() != text {
		a.unsavedKnown[id.Number] = struct{}{}
		a.dirtyKnown()
		if ok {
			a.count(e.labels, -1)
		}
		a.count(id.Labels, 1)
		e.since = time.Time{}
		if a.available.ready {
			e.since = time.Now()
		}
		a.candidates.short.unset(id.Number)
	}
	a.known[id.Number] = knownEntry{labels: id.Labels, revision: revision, since: e.since}
	a.byText[text] = id.Number
	if h := a.holds[id.Number]; h != nil && h.labels.Text() != text {
		// What we hold is something else to the cluster. Until that is settled
		// readers see what our own endpoints have.
		h.ref = 0
		a.wake()
		return
	}
	a.pub.Upsert(id.Number, id)
}

// forget takes a number out of the mirror. It runs with mu held.
func (a *Allocator) forget(n identity.Numeric) {
	e, ok := a.known[n]
	if !ok {
		return
	}
	h := a.holds[n]
	if h != nil {
		// It vanished under us: refer to it again, which creates it again.
		h.ref = 0
		a.wake()
		if h.labels.Text() == e.labels.Text() {
			// byText keeps it too: the next call for this set joins the hold.
			a.known[n] = knownEntry{labels: e.labels, gone: true, since: e.since}
			return
		}
	}
	delete(a.known, n)
	a.count(e.labels, -1)
	a.noteLife(n, e)
	a.candidates.unassign(n)
	a.unsavedKnown[n] = struct{}{}
	if a.byText[e.labels.Text()] == n {
		delete(a.byText, e.labels.Text())
	}
	a.dirtyKnown()
	if h == nil {
		a.pub.Delete(n)
	}
}

// note remembers what an update changes before any reader is told: what this
// node has said exists must be known to the next process too.
func (a *Allocator) note(u Update) {
	var c KnownChange
	a.mu.Lock(opUpdate)
	for _, e := range u.Upserts {
		if have, ok := a.known[e.Identity.Number]; !ok || have.revision <= e.Revision && have.labels.Text() != e.Identity.Labels.Text() {
			c.Put = append(c.Put, e.Identity)
		}
	}
	for _, d := range u.Deletes {
		if have, ok := a.known[d.Number]; ok && have.revision < d.Revision && a.holds[d.Number] == nil {
			c.Drop = append(c.Drop, d.Number)
		}
	}
	a.mu.Unlock()
	if len(c.Put)+len(c.Drop) == 0 {
		return
	}
	if err := a.records.NoteKnown(c); err != nil {
		// Readers wait for it all the same: it is a cache.
		a.cfg.Log.Error("what is known of the cluster was not written; a restart without etcd would know less", log.Err(err))
	}
}

// takeStep is how many identities are taken over before the lock is given up:
// a listing of the whole cluster must not keep callers waiting.
const takeStep = 1024

// observe is the sink of Store.Follow. Between two steps callers see a mirror
// that is partly of before; it is said to be complete, and as new as the update,
// after the last one.
func (a *Allocator) observe(u Update) {
	if u.Complete {
		for some := range slices.Chunk(a.unlisted(u), takeStep) {
			a.mu.Lock(opUpdate)
			for _, n := range some {
				// A claim may have written it since.
				if e, ok := a.known[n]; ok && e.revision <= u.Revision {
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
			if e, ok := a.known[d.Number]; ok && e.revision < d.Revision {
				a.forget(d.Number)
			}
		}
		a.mu.Unlock()
	}
	a.mu.Lock(opUpdate)
	defer a.mu.Unlock()
	a.pub.Reach(u.Cluster, u.Revision)
	a.revision = u.Revision
	if u.Heard.After(a.heard) || a.heard.After(time.Now()) {
		a.heard = u.Heard
		if a.heard.Sub(a.heardKept) > a.cfg.Quarantine/heardSteps {
			a.dirtyKnown()
		}
	}
	if u.Complete {
		a.becomeReady()
	}
	if u.Complete || u.Beside {
		a.dirtyKnown() // also an empty listing is something to know
	}
}

// unlisted returns the numbers that a complete listing does not have, of those
// that are not newer. What another history of the store said is older than any.
func (a *Allocator) unlisted(u Update) []identity.Numeric {
	listed := make(map[identity.Numeric]struct{}, len(u.Upserts))
	for _, e := range u.Upserts {
		listed[e.Identity.Number] = struct{}{}
	}
	a.mu.Lock(opUpdate)
	defer a.mu.Unlock()
	var out []identity.Numeric
	for n, e := range a.known {
		if u.Reset {
			e.revision = 0
			a.known[n] = e
		}
		if _, ok := listed[n]; !ok && e.revision <= u.Revision {
			out = append(out, n)
		}
	}
	return out
}

// heardSteps bounds how far the cache's time of the last sign of the store may
// be behind, as a part of the quarantine time.
const heardSteps = 8

// dirtyKnown asks for the cache to be written.
func (a *Allocator) dirtyKnown() {
	select {
	case a.knownDirty <- struct{}{}:
	default:
	}
}
