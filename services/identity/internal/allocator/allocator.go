// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package allocator decides which number a label set has.
//
// The allocator owns the mirror of the cluster's identities, this node's references to identities, and the references
// that still have to be written to the store. It does not know etcd, files or gRPC: the Store is shared with the other
// nodes, the Records survive this process, and the Publisher passes changes on to readers.
//
// The identities that holders on this node use, kept in memory, are the desired state; this node's references in the
// store are the actual state. One loop, Run, makes the two equal whenever the store responds. A release therefore does
// not wait for the store, and a comparison finds a reference that a killed process left behind.
//
// The index has both states under one lock. An Allocator executes the calls of holders on it: claims gets a number from
// the store, and the recorder writes the holds. In Run, the reconciler keeps the session and the references, the
// follower takes over what other nodes write, and the collector removes unused identities. A View reads.
package allocator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/keymutex"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/shares"
)

// Fault points, in the order in which a call meets them.
var (
	faultResolveStart    = fault.Register("identity/resolve/before-txn")
	faultResolveClaimed  = fault.Register("identity/resolve/after-txn")
	faultResolveRecorded = fault.Register("identity/resolve/before-snapshot")
	faultResolveDurable  = fault.Register("identity/resolve/before-answer")
	faultReleaseStart    = fault.Register("identity/release/before-snapshot")
	faultReleaseDurable  = fault.Register("identity/release/before-answer")
	faultReleaseStore    = fault.Register("identity/release/before-txn")
	faultReleasedStore   = fault.Register("identity/release/after-txn")
)

// Config of an Allocator. Every field but Tenant is required.
type Config struct {
	Quota        int           // cluster identities that this node may hold
	StoreTimeout time.Duration // how long one request to the store may take
	Heartbeat    time.Duration // between two signs of life of the session
	Reconcile    time.Duration // between two comparisons of held and referred to; also between collections
	Grace        time.Duration // how long an identity has no references before it is collected
	Quarantine   time.Duration // how long a collected number stays reserved for its former label set
	KnownDelay   time.Duration // how long changes of the cache are gathered before it is written
	RetryMin     time.Duration // first pause after the store failed; doubles
	RetryMax     time.Duration // longest pause
	Log          *slog.Logger
	// Tenant returns the tenant of a namespace. Nil: each namespace is a tenant.
	Tenant func(namespace string) shares.Tenant
	// Leading is called in each round of the collector. leads reports whether this node is the leader, which collects
	// identities. Leading must not block. Nil: not called.
	Leading func(leads bool)
}

func (c *Config) tenant(namespace string) shares.Tenant {
	if c.Tenant != nil {
		return c.Tenant(namespace)
	}
	return shares.NewTenants(shares.Settings{}).Of(namespace)
}

// pause sleeps between two attempts; it doubles up to RetryMax.
func (c *Config) pause(ctx context.Context, d *time.Duration) {
	*d = min(max(2**d, c.RetryMin), c.RetryMax)
	select {
	case <-time.After(*d/2 + rand.N(*d)): // not all nodes at once
	case <-ctx.Done():
	}
}

// within runs a method of the store for at most StoreTimeout.
func within[T any](ctx context.Context, cfg *Config, f func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.StoreTimeout)
	defer cancel()
	return f(ctx)
}

// bounded runs one request to the store.
func bounded(ctx context.Context, cfg *Config, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, cfg.StoreTimeout)
	defer cancel()
	return f(ctx)
}

// Operations that the time of the lock is counted by.
const (
	opHold       = "hold"
	opChoose     = "choose a number"
	opRelease    = "release"
	opUpdate     = "take over an update"
	opSave       = "copy for the disk"
	opSession    = "follow the session"
	opCompare    = "compare references"
	opReferences = "write references"
	opCollect    = "find unused"
	opRead       = "read"
)

// Allocator is the core. Its methods may be called concurrently, before and
// while Run runs.
type Allocator struct {
	*View
	index      *index
	cfg        *Config
	store      Store
	claims     *claims
	recorder   *recorder
	follower   *follower
	reconciler *reconciler
	collector  *collector

	byHolder keymutex.Mutexes[Holder] // one change of a holder at a time
}

// New returns an Allocator that starts from the last process's state. cached means that known is a complete listing of
// the cluster, however old: then the allocator is ready at once.
func New(cfg Config, store Store, records Records, pub Publisher, endpoints EndpointPublisher,
	holds Holds, known Known, cached bool,
) (*Allocator, error) {
	x := newIndex(&cfg, pub, holds, known.Heard)
	r := newRecorder(x, records, endpoints)
	if err := x.restore(holds.Holders, known.Identities); err != nil {
		return nil, err
	}
	if cached {
		x.becomeReady()
	}
	for _, e := range x.held.endpoints(holds.Holders) {
		endpoints.Upsert(e.Holder, e)
	}
	clear(x.held.unsaved) // it came from there
	if cached {
		clear(x.mirror.unsaved)
	}
	view := &View{index: x, store: store}
	conn := &connection{index: x, store: store, cfg: &cfg, lost: make(chan error, 1)}
	c := &claims{index: x, view: view, conn: conn, store: store, cfg: &cfg}
	f := &follower{index: x, view: view, store: store, records: records, cfg: &cfg, uncached: !cached}
	return &Allocator{
		View: view, index: x, cfg: &cfg, store: store, claims: c, recorder: r, follower: f,
		reconciler: &reconciler{index: x, conn: conn, claims: c, follower: f, store: store, cfg: &cfg},
		collector:  newCollector(x, store, &cfg),
	}, nil
}

// Run keeps session, mirror, references and cache until ctx is done, and
// returns nil then. It is called once.
func (a *Allocator) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { a.reconciler.run(ctx) })
	wg.Go(func() { a.follower.run(ctx) })
	wg.Go(func() { a.follower.runCache(ctx) })
	wg.Go(func() { a.recorder.run(ctx) })
	wg.Go(func() { a.collector.run(ctx) })
	wg.Go(func() { a.follower.runNumbers(ctx) })
	wg.Wait()
	return nil
}

// Hold assigns to the holder the number of a label set, which the cluster shares. If the holder has another label set,
// it moves when move is set, and gets ErrHeldOther otherwise. The answer survives this process.
func (a *Allocator) Hold(ctx context.Context, holder Holder, labels label.Canonical, move bool,
) (identity.Identity, error) {
	return a.hold(ctx, holder, labels, Workload{}, move)
}

// HoldEndpoint is like Hold, for an endpoint: it moves the endpoint to a new identity and stores its workload. Empty
// fields of w keep their former values. If no number is free, or the tenant's share is used up, it waits for a while
// and then returns a *QuotaError.
func (a *Allocator) HoldEndpoint(ctx context.Context, holder Holder, labels label.Canonical, w Workload,
) (identity.Identity, error) {
	return awaitNumber(ctx, func() (identity.Identity, error) { return a.hold(ctx, holder, labels, w, true) })
}

func (a *Allocator) hold(ctx context.Context, holder Holder, labels label.Canonical, w Workload, move bool,
) (identity.Identity, error) {
	if err := holder.check(); err != nil {
		return identity.Identity{}, err
	}
	unlock, err := a.byHolder.Lock(ctx, holder)
	if err != nil {
		return identity.Identity{}, err
	}
	defer unlock()

	a.index.mu.Lock(opHold)
	n, held := a.index.held.byHolder[holder]
	if held {
		h := a.index.held.byNumber[n]
		if n.Scope() != identity.ScopeNodeLocal && h.labels.Text() == labels.Text() {
			a.index.describe(holder, w)
			a.index.mu.Unlock()
			return a.answer(ctx, identity.Identity{Number: n, Labels: labels})
		}
		if !move {
			a.index.mu.Unlock()
			return identity.Identity{}, fmt.Errorf("%w: %s holds %d %s", ErrHeldOther, holder, n, clip(h.labels.Text(), 200))
		}
	}
	a.index.mu.Unlock()

	if err := faultResolveStart.Hit(ctx); err != nil {
		return identity.Identity{}, err
	}
	unlockLabels, err := a.claims.byLabels.Lock(ctx, labels.Text())
	if err != nil {
		return identity.Identity{}, err
	}
	id, err := a.holdLabels(ctx, holder, labels, false)
	unlockLabels()
	if err != nil {
		return identity.Identity{}, err
	}
	a.index.mu.Lock(opHold)
	a.index.describe(holder, w)
	a.index.mu.Unlock()
	return a.answer(ctx, id)
}

// answer waits until the data in the answer is saved, so that it survives this process.
func (a *Allocator) answer(ctx context.Context, id identity.Identity) (identity.Identity, error) {
	if err := faultResolveRecorded.Hit(ctx); err != nil {
		return identity.Identity{}, err
	}
	if err := a.index.saver.wait(ctx); err != nil {
		return identity.Identity{}, err
	}
	if err := faultResolveDurable.Hit(ctx); err != nil {
		return identity.Identity{}, err
	}
	return id, nil
}

// holdLabels claims the label set, unless this node refers to it already, and
// puts the holder onto it; with keep the number that it had stays held. The label
// set is locked.
func (a *Allocator) holdLabels(ctx context.Context, holder Holder, labels label.Canonical, keep bool,
) (identity.Identity, error) {
	if IsIsolated(labels) {
		return a.isolate(holder, keep), nil
	}
	a.index.mu.Lock(opHold)
	number, isKnown := a.index.mirror.byText[labels.Text()]
	if isKnown && a.index.held.as(number, labels) != nil {
		// Referred to already, or about to be.
		id := identity.Identity{Number: number, Labels: labels}
		a.index.move(holder, id, 0, keep)
		a.index.mu.Unlock()
		return id, nil
	}
	if err := a.index.reserve(holder, labels); err != nil {
		a.index.mu.Unlock()
		err.Keys = a.topKeys()
		return identity.Identity{}, err
	}
	connected := a.index.available.connected
	var refused error
	if a.index.available.refused {
		refused = a.index.available.storeErr
	}
	a.index.mu.Unlock()
	defer func() {
		a.index.mu.Lock(opHold)
		a.index.places.done(namespaceOf(labels))
		a.index.mu.Unlock()
	}()

	var claim Claim
	err := ErrUnavailable
	if refused != nil {
		// The store would not count this node's reference, so the identity must not be used.
		return identity.Identity{}, &StoreError{Endpoints: a.store.Endpoints(), Labels: labels, Err: refused}
	}
	if connected || !isKnown {
		limited, cancel := ctx, context.CancelFunc(func() {})
		if end, ok := ctx.Deadline(); ok && isKnown {
			// A store that hangs must leave time for the answer from memory.
			limited, cancel = context.WithDeadline(ctx, time.Now().Add(time.Until(end)/2))
		}
		claim, err = a.claims.claim(limited, labels, number)
		cancel()
	}
	if err != nil {
		if !isKnown || !errors.Is(err, ErrUnavailable) && !errors.Is(err, ErrSessionLost) || ctx.Err() != nil {
			return identity.Identity{}, err
		}
		// The store is unreachable and the set is known: the known number is still valid, and Run writes the reference
		// once the store answers again. But a number that was collected after the store was last heard may get another
		// set as soon as its quarantine is over.
		if age, ok := a.sinceHeard(); !ok || age >= a.cfg.Quarantine {
			return identity.Identity{}, &StaleError{Labels: labels, Number: number, Age: age, Never: !ok, Limit: a.cfg.Quarantine, Err: err}
		}
		claim = Claim{Number: number}
	}
	if err := faultResolveClaimed.Hit(ctx); err != nil {
		return identity.Identity{}, err
	}
	id := identity.Identity{Number: claim.Number, Labels: labels}
	if claim.Revision != 0 {
		a.follower.note(Update{Upserts: []Entry{{Identity: id, Revision: claim.Revision}}})
	}
	a.index.mu.Lock(opHold)
	defer a.index.mu.Unlock()
	if h := a.index.held.other(id.Number, labels); h != nil {
		// While this node was disconnected, the store gave the number to this label set, and this node still holds it
		// for another. Run first moves those holders to another number. If the caller does not retry, the comparison
		// removes the reference just written as a stray one.
		a.index.wake()
		return identity.Identity{}, fmt.Errorf("%w: number %d is still being taken from %s", ErrContended, id.Number, clip(h.labels.Text(), 200))
	}
	if claim.Revision == 0 {
		a.index.counters.Offline++
	} else {
		a.index.available.space(nil)
		a.index.learn(id, claim.Revision)
	}
	if claim.Created {
		a.index.counters.Allocated++
		a.index.tenants.create(claim.Revision, labels)
	}
	a.index.move(holder, id, claim.Revision, keep)
	return id, nil
}

// Release removes a holder's hold and returns the number; 0 if it held none. It needs no store: Run removes the
// reference there.
func (a *Allocator) Release(ctx context.Context, holder Holder) (identity.Numeric, error) {
	unlock, err := a.byHolder.Lock(ctx, holder)
	if err != nil {
		return 0, err
	}
	defer unlock()
	a.index.mu.Lock(opRelease)
	n := a.index.dropHolder(holder)
	if a.index.dropHolder(holder.former()) != 0 || n != 0 {
		a.index.saver.dirty()
	}
	a.index.mu.Unlock()
	if err := faultReleaseStart.Hit(ctx); err != nil {
		return 0, err
	}
	// Wait even if the holder held nothing: an earlier call may have failed to save the removal of its hold.
	if err := a.index.saver.wait(ctx); err != nil {
		return 0, err
	}
	if n != 0 {
		a.index.wake()
	}
	if err := faultReleaseDurable.Hit(ctx); err != nil {
		return 0, err
	}
	return n, nil
}
