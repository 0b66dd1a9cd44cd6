// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/identity"
)

// collector removes identities to which no node has had a reference for the grace period. Any number of nodes may
// collect at the same time; only one does, to reduce the load of the store.
//
// It is not part of the session: its requests have their own deadlines, and if one fails, it is tried again without
// losing state. Only a new session restarts the grace period, so that each node can write its references again within
// the whole period after an outage of the store.
type collector struct {
	index   *index
	store   Store
	cfg     *Config
	session uint64 // the session in which the times in since were recorded
	stop    func() // stops following references; nil if they are not followed
	since   map[identity.Numeric]unusedSince
	tidied  time.Time

	resting   map[identity.Numeric]resting // nil: not listed yet
	published *Numbers                     // last counts published by this collector; nil: none yet

	mu   sync.Mutex
	refs References // guarded by mu; references per number and node, if Complete
	// guarded by mu; numbers to which a node has referred since the last round
	touched map[identity.Numeric]struct{}
}

type unusedSince struct {
	fence int64
	at    time.Time
}

func newCollector(x *index, store Store, cfg *Config) *collector {
	return &collector{
		index: x, store: store, cfg: cfg,
		since: map[identity.Numeric]unusedSince{}, touched: map[identity.Numeric]struct{}{},
	}
}

// run collects once per Reconcile interval.
func (c *collector) run(ctx context.Context) {
	defer func() { c.rest() }()
	tick := time.NewTicker(c.cfg.Reconcile)
	defer tick.Stop()
	publish := time.NewTicker(publishEvery)
	defer publish.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-publish.C:
			if c.stop == nil {
				continue // another node is the collector
			}
			if err := c.publish(ctx); err != nil && ctx.Err() == nil {
				c.cfg.Log.Debug("publishing the counts of numbers", log.Err(err))
			}
			continue
		case <-tick.C:
		}
		if err := c.round(ctx); err != nil && ctx.Err() == nil {
			c.cfg.Log.Warn("collection of unused identities was interrupted; it continues in the next round", log.Err(err))
		}
	}
}

// rest stops following references, because this node is not the collector.
func (c *collector) rest() {
	if c.stop != nil {
		c.stop()
		c.stop = nil
	}
	clear(c.since)
	c.tidied = time.Time{}
	c.resting, c.published = nil, nil
}

func (c *collector) round(ctx context.Context) error {
	c.index.mu.Lock(opCollect)
	connected, session := c.index.available.connected, c.index.sessions
	c.index.mu.Unlock()
	if !connected || session != c.session {
		c.rest()
		c.session = session
	}
	if !connected {
		return nil
	}
	lead, err := within(ctx, c.cfg, c.store.Lead)
	if err != nil {
		return err
	}
	if c.cfg.Leading != nil {
		c.cfg.Leading(lead)
	}
	if !lead {
		c.rest()
		return nil
	}
	if c.stop == nil {
		c.start(ctx)
	}
	unused, refs, complete := c.unused()
	if !complete {
		return nil // the listing is not complete yet
	}
	err = c.collect(ctx, unused, refs.Revision)
	if err != nil && !errors.Is(err, ErrNoSpace) {
		return err
	}
	// Tidy only deletes, which is possible even if the store has no space.
	if now := time.Now(); now.Sub(c.tidied) >= max(c.cfg.Grace, c.cfg.Reconcile) {
		if err := c.store.Tidy(ctx, refs); err != nil {
			return err
		}
		c.tidied = now
	}
	return err
}

// start follows the references of all nodes until stop is called.
func (c *collector) start(ctx context.Context) {
	c.mu.Lock()
	c.refs = References{}
	c.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	c.stop = func() { cancel(); wg.Wait() }
	wg.Go(func() {
		var wait time.Duration
		for ctx.Err() == nil {
			if err := c.store.FollowReferences(ctx, c.observe); err != nil && ctx.Err() == nil {
				c.cfg.Log.Warn("following the references of all nodes", log.Err(err))
			}
			c.cfg.pause(ctx, &wait)
		}
	})
}

// observe receives the updates of Store.FollowReferences.
func (c *collector) observe(r References) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.Complete {
		c.refs = r
		return
	}
	c.refs.Revision = r.Revision
	add(c.refs.Numbers, r.Numbers)
	add(c.refs.Nodes, r.Nodes)
	for n := range r.Numbers {
		c.touched[n] = struct{}{}
	}
}

func add[K comparable](to, by map[K]int) {
	for k, n := range by {
		if to[k] += n; to[k] == 0 {
			delete(to, k)
		}
	}
}

// unused returns the identities without references, and the number of references of each node, at one revision.
// complete is false as long as these are not known. An identity that this node holds is never unused, even if its
// reference could not be written.
func (c *collector) unused() (unused []identity.Identity, refs References, complete bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.refs.Complete {
		return nil, References{}, false
	}
	refs = References{Complete: true, Revision: c.refs.Revision, Numbers: make(map[identity.Numeric]int, len(c.refs.Numbers)), Nodes: map[string]int{}}
	add(refs.Numbers, c.refs.Numbers)
	add(refs.Nodes, c.refs.Nodes)
	for n := range c.touched {
		delete(c.since, n)
	}
	clear(c.touched)
	c.index.mu.Lock(opCollect)
	defer c.index.mu.Unlock()
	for n, e := range c.index.mirror.known {
		if refs.Numbers[n] == 0 && !c.index.held.has(n) && !e.gone {
			unused = append(unused, identity.Identity{Number: n, Labels: e.labels})
		}
	}
	slices.SortFunc(unused, identity.Compare)
	return unused, refs, true
}

// Limits of one removal of unused identities. It is divided into steps, each of which is one request to the store.
const (
	collectStep = 256    // identities in one step
	maxCollect  = 16_384 // maximum number of identities in one round
)

// plan returns the identities that have become unused, and the identities that have been unused for the whole grace
// period, longest first.
func (c *collector) plan(unused []identity.Identity, now time.Time, grace time.Duration) (fresh []identity.Identity, due []Candidate) {
	is := make(map[identity.Numeric]struct{}, len(unused))
	for _, id := range unused {
		is[id.Number] = struct{}{}
		switch s, ok := c.since[id.Number]; {
		case !ok:
			fresh = append(fresh, id)
		case now.Sub(s.at) >= grace:
			due = append(due, Candidate{Identity: id, Fence: s.fence})
		}
	}
	maps.DeleteFunc(c.since, func(n identity.Numeric, _ unusedSince) bool {
		_, ok := is[n]
		return !ok
	})
	slices.SortStableFunc(due, func(x, y Candidate) int {
		return c.since[x.Identity.Number].at.Compare(c.since[y.Identity.Number].at)
	})
	return fresh, due
}

// collect processes the identities that are unused at a revision: it records the fences of the newly unused ones, and
// removes the identities that have been unused for the grace period.
func (c *collector) collect(ctx context.Context, unused []identity.Identity, revision int64) error {
	now := time.Now()
	fresh, due := c.plan(unused, now, c.cfg.Grace)
	for step := range slices.Chunk(fresh, collectStep) {
		candidates, err := within(ctx, c.cfg, func(ctx context.Context) ([]Candidate, error) {
			return c.store.Candidates(ctx, step)
		})
		if err != nil {
			return err
		}
		for _, f := range candidates {
			// A fence at or before the revision of the count shows that no reference was written since.
			if f.Fence <= revision {
				c.since[f.Identity.Number] = unusedSince{fence: f.Fence, at: now}
			}
		}
	}
	for step := range slices.Chunk(due[:min(len(due), maxCollect)], collectStep) {
		gone, err := within(ctx, c.cfg, func(ctx context.Context) ([]identity.Numeric, error) {
			return c.store.Collect(ctx, step, c.cfg.Quarantine)
		})
		c.index.mu.Lock(opCollect)
		c.index.counters.Collected += uint64(len(gone))
		c.index.mu.Unlock()
		if len(gone) > 0 {
			c.cfg.Log.Info("identities collected", "identities", gone)
		}
		if err != nil {
			return err
		}
		for _, d := range step {
			if c.resting != nil && slices.Contains(gone, d.Identity.Number) {
				c.resting[d.Identity.Number] = resting{namespaceOf(d.Identity.Labels), time.Now().Add(c.cfg.Quarantine)}
			}
			delete(c.since, d.Identity.Number) // the identity was removed, or referred to again
		}
	}
	return nil
}
