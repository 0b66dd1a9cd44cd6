// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package allocator assigns numbers to label sets.
//
// The allocator owns the mirror of the cluster's identities, this node's references to identities, and the references
// that still have to be written to the store. It does not depend on etcd, files or gRPC, but on interfaces: the nodes
// share the Store, the Records survive this process, and the Publisher passes changes on to readers.
//
// The identities that holders on this node use, kept in memory, are the desired state; this node's references in the
// store are the actual state. One loop, Run, makes the two equal whenever the store responds. A release therefore does
// not wait for the store, and a comparison finds a reference that a killed process left behind.
//
// The index contains both states under one lock. An Allocator executes the calls of holders: claims gets a number from
// the store, and the recorder saves the references of holders in the Records. In Run, the reconciler maintains the
// session and the references in the store, the follower receives the changes of other nodes, and the collector removes
// unused identities. A View reads the index.
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

// Fault points, in the order in which a call reaches them.
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

// Config configures an Allocator. Every field except Tenant and Leading is required.
type Config struct {
	Quota        int           // maximum number of cluster identities that this node may hold
	StoreTimeout time.Duration // timeout of one request to the store
	Heartbeat    time.Duration // interval at which the session is checked
	// Reconcile is the interval at which references in the store are compared with the holders, and at which the
	// leader collects unused identities.
	Reconcile  time.Duration
	Grace      time.Duration // time without references after which an identity is collected
	Quarantine time.Duration // time for which a collected number stays reserved for its former label set
	KnownDelay time.Duration // time for which changes of the cache are batched before it is written
	RetryMin   time.Duration // first pause after the store has failed; it doubles
	RetryMax   time.Duration // longest pause
	Log        *slog.Logger
	// Tenant returns the tenant of a namespace. Nil: each namespace is a tenant.
	Tenant func(namespace string) shares.Tenant
	// Leading is called in each round of the collector. leads reports whether this node is the leader, which
	// collects identities. Leading must not block; it may be nil.
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
	case <-time.After(*d/2 + rand.N(*d)): // random, so that not all nodes retry at once
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

// Names of the operations for which the allocator measures how long they hold its lock.
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

// Allocator executes the calls of holders. Its methods may be called concurrently, before and during Run.
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

	byHolder keymutex.Mutexes[Holder] // serialises the changes of one holder
}

// New returns an Allocator with the saved state of the last process. If cached is set, known is a complete listing of
// the cluster, although it may be old, and the allocator is ready at once.
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
	clear(x.held.unsaved) // the state comes from the records, so there is nothing to save
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

// Run maintains the session, the mirror, the references and the cache until ctx ends; it then returns nil. It must be
// called once.
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

// Hold assigns the cluster-wide number of a label set to the holder. If the holder has another label set, Hold moves it
// if move is set, and otherwise returns ErrHeldOther. The assignment is saved before Hold returns, so it survives this
// process.
func (a *Allocator) Hold(ctx context.Context, holder Holder, labels label.Canonical, move bool,
) (identity.Identity, error) {
	return a.hold(ctx, holder, labels, Workload{}, move)
}

// HoldEndpoint is like Hold, for an endpoint: it moves the endpoint to a new identity and stores its workload. For
// empty fields of w, the former values are kept. If no number is free, or the share of the tenant is used up,
// HoldEndpoint waits for a while and then returns a *QuotaError.
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

// answer returns an identity to a caller after it was saved, so that the answer survives this process.
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

// holdLabels claims the label set, unless this node already has a reference to it, and assigns it to the holder. If
// keep is set, the holder's former number stays held. The caller has locked the label set.
func (a *Allocator) holdLabels(ctx context.Context, holder Holder, labels label.Canonical, keep bool,
) (identity.Identity, error) {
	if IsIsolated(labels) {
		return a.isolate(holder, keep), nil
	}
	a.index.mu.Lock(opHold)
	number, isKnown := a.index.mirror.byText[labels.Text()]
	if isKnown && a.index.held.as(number, labels) != nil {
		// This node already has a reference, or is about to write it.
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
			// Reserve time for an answer from memory, in case the store hangs.
			limited, cancel = context.WithDeadline(ctx, time.Now().Add(time.Until(end)/2))
		}
		claim, err = a.claims.claim(limited, labels, number)
		cancel()
	}
	if err != nil {
		if !isKnown || !errors.Is(err, ErrUnavailable) && !errors.Is(err, ErrSessionLost) || ctx.Err() != nil {
			return identity.Identity{}, err
		}
		// The store is unreachable, but the label set is known. The known number is still valid, and Run writes
		// the reference once the store answers again. There is one exception: a number that was collected after
		// the last contact with the store may be assigned to another label set once its quarantine is over.
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
		// While this node was disconnected, another node assigned the number to this label set, but this node
		// still holds it for another label set. Run first moves the holders of that set to another number. If
		// the caller does not retry, the next comparison removes the reference that was just written.
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

// Release removes the number of a holder and returns it; 0 if it had none. It does not wait for the store, in which Run
// removes the reference.
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
	// Wait even if the holder had no number, because an earlier call may have failed to save the removal.
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
