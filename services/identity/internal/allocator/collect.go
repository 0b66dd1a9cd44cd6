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

// collector removes identities that no node referred to for the grace period.
// Any number of nodes may do it at once; one leads only to spare the store.
//
// It is not part of the session: its requests have deadlines of their own, and
// when they fail it tries again and forgets nothing. Only a new session starts
// the grace period over: after the store was unavailable for every node, each node has
// the whole time to refer to its numbers again.
type collector struct {
	index   *index
	store   Store
	cfg     *Config
	session uint64 // the one that since belongs to
	stop    func() // ends the following of references; nil if it does not run
	since   map[identity.Numeric]unusedSince
	tidied  time.Time

	resting   map[identity.Numeric]resting // nil: not listed yet
	published *Numbers                     // by this collector; nil: nothing yet

	mu      sync.Mutex
	refs    References                    // guarded by mu; references per number and node, if Complete
	touched map[identity.Numeric]struct{} // guarded by mu; referred to since the last round
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
				continue // another node collects
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

// rest stops following references: this node does not collect.
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
		return nil // the listing is under way
	}
	err = c.collect(ctx, unused, refs.Revision)
	if err != nil && !errors.Is(err, ErrNoSpace) {
		return err
	}
	// A store without space takes deletions.
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

// unused returns the identities without references, and the references of each node, as of one revision. complete is
// false before they are known. An identity that this node holds is never unused, even if its reference could not be
// written.
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

// Limits of a collection, which is done in steps, each within the time of one request.
const (
	collectStep = 256
	maxCollect  = 16_384 // in one round
)

// plan returns the identities that are unused for the first time, and those that were unused for the whole grace
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

// collect continues with the identities that are unused as of a revision: it notes the fences of newly unused ones,
// and removes those that were unused for the grace period.
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
			// A reference that was written after the revision of the count moved the fence beyond it.
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
			delete(c.since, d.Identity.Number) // removed, or touched meanwhile
		}
	}
	return nil
}
