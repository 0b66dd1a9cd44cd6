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
package allocator

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/kit/deadline"
	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/keymutex"
	"github.com/sluice-net/sluice/kit/looptime"
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
	cfg     Config
	store   Store
	records Records
	pub     Publisher

	endpointPub EndpointPublisher

	byHolder keymutex.Mutexes[Holder] // one change of a holder at a time
	byLabels keymutex.Mutexes[string] // one claim of a label set at a time, by their text
	kick     chan struct{}

	mu         looptime.Mutex
	mirror     mirror            // guarded by mu; of the cluster's identities
	held       holdings          // guarded by mu; by this node
	releases   releases          // guarded by mu; of references in the store
	local      localNumbers      // guarded by mu
	candidates candidates        // guarded by mu; for label sets without a number
	tenants    tenantNumbers     // guarded by mu; their shares of the cluster's numbers
	places     places            // guarded by mu; in the quota of this node
	available  availability      // guarded by mu
	joined     string            // guarded by mu; the session of the store
	sessions   uint64            // guarded by mu; how many sessions were up
	denied     error             // guarded by mu; the grant that the store lacks
	lost       chan error        // holds the failure that a call saw; capacity 1
	counters   Counters          // guarded by mu
	host       identity.Identity // guarded by mu; this node's own

	saver     saver
	unwritten chan struct{} // the records were not written; capacity 1
	uncached  bool          // there was no cache
}

// New returns an Allocator that starts from the last process's state. cached means that known is a complete listing of
// the cluster, however old: then the allocator is ready at once.
func New(cfg Config, store Store, records Records, pub Publisher, endpoints EndpointPublisher,
	holds Holds, known Known, cached bool,
) (*Allocator, error) {
	a := &Allocator{
		cfg: cfg, store: store, records: records, pub: pub, endpointPub: endpoints,
		kick: make(chan struct{}, 1), lost: make(chan error, 1), unwritten: make(chan struct{}, 1),
		mirror: newMirror(known.Heard), held: newHoldings(), local: newLocalNumbers(holds.NextNodeLocal),
		releases: newReleases(), candidates: newCandidates(), available: newAvailability(),
		joined: holds.Session, uncached: !cached,
	}
	a.places, a.tenants = newPlaces(cfg.Quota, a.cfg.tenant), newTenantNumbers(a.cfg.tenant)
	a.saver.init(a.saveHolds, a.noteRecords)
	for _, id := range identity.Reserved() {
		if id.Number == identity.Host {
			a.host = id
		}
		pub.Upsert(id.Number, id)
	}
	// No lock: the allocator is not shared yet. Holds are learned before the cache; where they differ, the cache is
	// older.
	for _, r := range holds.Holders {
		if !holdable(r.Identity) {
			return nil, fmt.Errorf("holder %s: %d is not a number that can be held", r.Holder, r.Identity.Number)
		}
		if h := a.held.other(r.Identity.Number, r.Identity.Labels); h != nil {
			return nil, fmt.Errorf("holder %s: number %d has two label sets: %s and %s", r.Holder, r.Identity.Number, h.labels, r.Identity.Labels)
		}
		if _, ok := a.held.byHolder[r.Holder]; ok {
			return nil, fmt.Errorf("holder %s is listed twice", r.Holder)
		}
		a.addHolder(r.Holder, r.Identity, 0)
		if !r.Workload.equal(Workload{}) {
			a.held.workloads[r.Holder] = r.Workload
		}
		switch r.Identity.Number.Scope() {
		case identity.ScopeNodeLocal:
			a.local.restore(r.Identity.Labels.Text(), r.Identity.Number)
			pub.Upsert(r.Identity.Number, r.Identity)
		case identity.ScopeCluster:
			a.learn(r.Identity, 0)
		}
	}
	for _, id := range known.Identities {
		if id.Number.Scope() != identity.ScopeCluster {
			return nil, fmt.Errorf("known identity %d is not one of the cluster", id.Number)
		}
		if _, ok := a.mirror.known[id.Number]; ok {
			continue
		}
		if _, ok := a.mirror.byText[id.Labels.Text()]; ok {
			continue
		}
		a.learn(id, 0)
	}
	if cached {
		a.becomeReady()
	}
	for _, e := range a.held.endpoints(holds.Holders) {
		endpoints.Upsert(e.Holder, e)
	}
	clear(a.held.unsaved) // it came from there
	if cached {
		clear(a.mirror.unsaved)
	}
	return a, nil
}

// Ready reports whether the identities of the cluster are known, from the cache or from the store, and no other node
// owns this node's name. The channel is closed when the result may have changed.
func (a *Allocator) Ready() (bool, <-chan struct{}) {
	a.mu.Lock(opRead)
	defer a.mu.Unlock()
	return a.available.answers(), a.available.changed
}

// Numbers reports whether a label set that is new to the cluster would get a number now: the store is reachable and
// takes writes, and so does the disk. The channel is closed when that, or the result of Ready, may have changed.
func (a *Allocator) Numbers() (bool, <-chan struct{}) {
	a.mu.Lock(opRead)
	defer a.mu.Unlock()
	return a.available.numbers(), a.available.changed
}

// becomeReady is called with mu held.
func (a *Allocator) becomeReady() {
	if a.available.loaded() {
		a.pub.Loaded()
	}
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

	a.mu.Lock(opHold)
	n, held := a.held.byHolder[holder]
	if held {
		h := a.held.byNumber[n]
		if n.Scope() != identity.ScopeNodeLocal && h.labels.Text() == labels.Text() {
			a.describe(holder, w)
			a.mu.Unlock()
			return a.answer(ctx, identity.Identity{Number: n, Labels: labels})
		}
		if !move {
			a.mu.Unlock()
			return identity.Identity{}, fmt.Errorf("%w: %s holds %d %s", ErrHeldOther, holder, n, clip(h.labels.Text(), 200))
		}
	}
	a.mu.Unlock()

	if err := faultResolveStart.Hit(ctx); err != nil {
		return identity.Identity{}, err
	}
	unlockLabels, err := a.byLabels.Lock(ctx, labels.Text())
	if err != nil {
		return identity.Identity{}, err
	}
	id, err := a.holdLabels(ctx, holder, labels, false)
	unlockLabels()
	if err != nil {
		return identity.Identity{}, err
	}
	a.mu.Lock(opHold)
	a.describe(holder, w)
	a.mu.Unlock()
	return a.answer(ctx, id)
}

// describe is called with mu held.
func (a *Allocator) describe(holder Holder, w Workload) {
	if a.held.describe(holder, w) {
		a.saver.dirty()
	}
}

// answer waits until the data in the answer is saved, so that it survives this process.
func (a *Allocator) answer(ctx context.Context, id identity.Identity) (identity.Identity, error) {
	if err := faultResolveRecorded.Hit(ctx); err != nil {
		return identity.Identity{}, err
	}
	if err := a.saver.wait(ctx); err != nil {
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
	a.mu.Lock(opHold)
	number, isKnown := a.mirror.byText[labels.Text()]
	if isKnown && a.held.as(number, labels) != nil {
		// Referred to already, or about to be.
		id := identity.Identity{Number: number, Labels: labels}
		a.move(holder, id, 0, keep)
		a.mu.Unlock()
		return id, nil
	}
	if err := a.reserve(holder, labels); err != nil {
		a.mu.Unlock()
		err.Keys = a.topKeys()
		return identity.Identity{}, err
	}
	connected := a.available.connected
	var refused error
	if a.available.refused {
		refused = a.available.storeErr
	}
	a.mu.Unlock()
	defer func() {
		a.mu.Lock(opHold)
		a.places.done(namespaceOf(labels))
		a.mu.Unlock()
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
		claim, err = a.claim(limited, labels, number)
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
		a.note(Update{Upserts: []Entry{{Identity: id, Revision: claim.Revision}}})
	}
	a.mu.Lock(opHold)
	defer a.mu.Unlock()
	if h := a.held.other(id.Number, labels); h != nil {
		// While this node was disconnected, the store gave the number to this label set, and this node still holds it
		// for another. Run first moves those holders to another number. If the caller does not retry, the comparison
		// removes the reference just written as a stray one.
		a.wake()
		return identity.Identity{}, fmt.Errorf("%w: number %d is still being taken from %s", ErrContended, id.Number, clip(h.labels.Text(), 200))
	}
	if claim.Revision == 0 {
		a.counters.Offline++
	} else {
		a.available.space(nil)
		a.learn(id, claim.Revision)
	}
	if claim.Created {
		a.counters.Allocated++
		a.tenants.create(claim.Revision, labels)
	}
	a.move(holder, id, claim.Revision, keep)
	return id, nil
}

// reserve takes a place in the quota for a label set that this node does not
// hold yet. It is called with mu held; the caller gives the place back.
func (a *Allocator) reserve(holder Holder, labels label.Canonical) *QuotaError {
	// A holder that moves away from a number of its own frees a place.
	if n, ok := a.held.byHolder[holder]; ok && n.Scope() == identity.ScopeCluster && len(a.held.byNumber[n].holders) == 1 {
		return a.places.reserve(namespaceOf(labels), true, namespaceOf(a.held.byNumber[n].labels))
	}
	return a.places.reserve(namespaceOf(labels), false, "")
}

// maxAttempts bounds how many candidates one call tries. Candidates are free according to the mirror, so an attempt
// fails only if another node gave the same number to another label set first, or if the number is in quarantine.
const maxAttempts = 64

// claim gets the number of a label set from the store.
func (a *Allocator) claim(ctx context.Context, labels label.Canonical, known identity.Numeric) (Claim, error) {
	ctx, answer := deadline.Answerable(ctx)
	defer answer()
	bounded, cancel := context.WithTimeout(ctx, a.cfg.StoreTimeout)
	defer cancel()
	if err := a.awaitStore(bounded); err != nil {
		return Claim{}, a.unavailable(ctx, labels, err)
	}
	for range maxAttempts {
		// A set that has, or had, a number keeps it if it can.
		candidate, used, done := known, 0, func() {}
		var beyond *QuotaError
		if known == 0 {
			// Without a free number the set may have one nonetheless: another
			// node may have given it one that we have not seen yet.
			a.mu.Lock(opChoose)
			beyond = a.tenants.admit(&a.mirror, labels, time.Now())
			a.mu.Unlock()
			if beyond == nil {
				candidate, used, done = a.candidate(labels)
			}
		}
		c, err := a.store.Claim(bounded, labels, known, candidate)
		done()
		switch {
		case err == nil:
			return c, nil
		case errors.Is(err, ErrOccupied) && beyond != nil:
			beyond.Keys = a.topKeys()
			return Claim{}, beyond
		case errors.Is(err, ErrOccupied) && candidate == 0 && used < identity.ClusterSize:
			// Other calls of this node are about to take the last ones, or not.
			return Claim{}, fmt.Errorf("%w: the last free numbers are being given to other label sets", ErrContended)
		case errors.Is(err, ErrOccupied) && candidate == 0:
			return Claim{}, &QuotaError{Kind: ErrExhausted, Used: used, Limit: identity.ClusterSize, Keys: a.topKeys()}
		case errors.Is(err, ErrOccupied):
			a.mu.Lock(opHold)
			a.candidates.occupy(candidate, time.Now().Add(a.cfg.Reconcile))
			a.mu.Unlock()
			known = 0
		case errors.Is(err, ErrSessionLost):
			// The store changed nothing. Run joins again and restores the holds; then this claim is tried again. Run
			// is woken last, so that it acts on the state noted here.
			a.disconnected(err)
			a.fail(err)
			if err := a.awaitStore(bounded); err != nil {
				return Claim{}, a.unavailable(ctx, labels, err)
			}
		case errors.Is(err, ErrNoSpace):
			a.noSpace(err)
			return Claim{}, a.unavailable(ctx, labels, err)
		case errors.Is(err, ErrUnavailable):
			a.fail(err)
			return Claim{}, a.unavailable(ctx, labels, err)
		default:
			return Claim{}, err
		}
	}
	return Claim{}, fmt.Errorf("%w: %d candidates for %s", ErrContended, maxAttempts, clip(labels.Text(), 200))
}

func (a *Allocator) unavailable(ctx context.Context, labels label.Canonical, err error) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return ctx.Err()
	}
	return &StoreError{Endpoints: a.store.Endpoints(), Labels: labels, Err: err}
}

// errListing: it is not known yet which numbers are free.
var errListing = errors.New("the identities of the cluster are still being listed")

// awaitStore waits until the session is up, and the cluster's identities are
// known: a choice among unknown ones meets one taken number after the other.
func (a *Allocator) awaitStore(ctx context.Context) error {
	for {
		a.mu.Lock(opRead)
		v := a.available
		a.mu.Unlock()
		if v.connected && v.ready {
			return nil
		}
		select {
		case <-v.changed:
		case <-ctx.Done():
			if v.connected {
				return errListing
			}
			return v.storeErr
		}
	}
}

// fail wakes Run because a call failed at the store.
func (a *Allocator) fail(err error) {
	select {
	case a.lost <- err:
	default: // one is enough
	}
}

// candidate picks a number for a label set that has none, and keeps other calls of this node from picking it until
// done is called. It is the first free number from a start that depends on the set's hash. So two nodes rarely choose
// the same number for different sets, and a set that was collected usually gets its former number again. n is 0, and
// used is the number of taken ones, if none is free.
func (a *Allocator) candidate(labels label.Canonical) (n identity.Numeric, used int, done func()) {
	sum := labels.Hash()
	start := int(binary.BigEndian.Uint32(sum[:4]) % uint32(identity.ClusterSize))
	a.mu.Lock(opChoose)
	defer a.mu.Unlock()
	n, used = a.candidates.pick(start, time.Now(), func(n identity.Numeric) bool {
		_, known := a.mirror.known[n]
		return known || a.held.has(n)
	})
	return n, used, func() {
		a.mu.Lock(opChoose)
		defer a.mu.Unlock()
		a.candidates.drop(n)
	}
}

// move assigns an identity to a holder and releases its former identity. With keep, a holder for the former identity
// keeps that until Confirm. Called with mu held.
func (a *Allocator) move(holder Holder, id identity.Identity, ref int64, keep bool) {
	if n, ok := a.held.byHolder[holder]; ok {
		if n == id.Number {
			a.addHolder(holder, id, ref)
			return
		}
		w := a.held.workloads[holder]
		if keep {
			a.addHolder(holder.former(), identity.Identity{Number: n, Labels: a.held.byNumber[n].labels}, 0)
		}
		a.dropHolder(holder)
		a.describe(holder, w)
	}
	a.addHolder(holder, id, ref)
	a.saver.dirty()
	if id.Number.Scope() == identity.ScopeCluster && a.held.byNumber[id.Number].ref == 0 || len(a.releases.due) > 0 {
		a.wake()
	}
}

// addHolder is called with mu held.
func (a *Allocator) addHolder(holder Holder, id identity.Identity, ref int64) {
	if a.held.add(holder, id, ref) && id.Number.Scope() == identity.ScopeCluster {
		a.places.hold(namespaceOf(id.Labels))
	}
}

// dropHolder is called with mu held and returns the number that was held, 0 if none.
func (a *Allocator) dropHolder(holder Holder) identity.Numeric {
	n, ended := a.held.drop(holder)
	if ended != nil {
		a.dropHold(n, ended)
	}
	return n
}

// dropHold removes a hold without holders. Called with mu held.
func (a *Allocator) dropHold(n identity.Numeric, h *hold) {
	switch n.Scope() {
	case identity.ScopeCluster:
		a.candidates.unassign(n)
		a.places.release(namespaceOf(h.labels))
	case identity.ScopeNodeLocal:
		a.local.release(h.labels.Text(), n)
		a.pub.Delete(n)
		return
	default:
		return // reserved: it exists without holders
	}
	if h.ref != 0 {
		a.releases.due[n] = h.ref
	}
	// A held number outlives its deletion in the store; this one no more.
	switch e, ok := a.mirror.known[n]; {
	case !ok:
		a.pub.Delete(n)
	case e.gone:
		a.forget(n)
	case e.labels.Text() != h.labels.Text():
		a.pub.Upsert(n, identity.Identity{Number: n, Labels: e.labels})
	}
}

// HeldBy returns the number that a holder holds, and that Release would release; 0 if it holds none.
func (a *Allocator) HeldBy(holder Holder) identity.Numeric {
	a.mu.Lock(opRead)
	defer a.mu.Unlock()
	return a.held.byHolder[holder]
}

// Release removes a holder's hold and returns the number; 0 if it held none. It needs no store: Run removes the
// reference there.
func (a *Allocator) Release(ctx context.Context, holder Holder) (identity.Numeric, error) {
	unlock, err := a.byHolder.Lock(ctx, holder)
	if err != nil {
		return 0, err
	}
	defer unlock()
	a.mu.Lock(opRelease)
	n := a.dropHolder(holder)
	if a.dropHolder(holder.former()) != 0 || n != 0 {
		a.saver.dirty()
	}
	a.mu.Unlock()
	if err := faultReleaseStart.Hit(ctx); err != nil {
		return 0, err
	}
	// Wait even if the holder held nothing: an earlier call may have failed to save the removal of its hold.
	if err := a.saver.wait(ctx); err != nil {
		return 0, err
	}
	if n != 0 {
		a.wake()
	}
	if err := faultReleaseDurable.Hit(ctx); err != nil {
		return 0, err
	}
	return n, nil
}

func (a *Allocator) wake() {
	select {
	case a.kick <- struct{}{}:
	default:
	}
}

// saveHolds writes the changes of the holds, and then publishes the changed endpoints, so that readers only learn what
// survives this process. One call runs at a time.
func (a *Allocator) saveHolds() error {
	a.mu.Lock(opSave)
	c := HoldsChange{NextNodeLocal: a.local.next, Session: a.joined}
	c.Put, c.Drop = a.held.take()
	endpoints := a.held.endpoints(c.Put)
	a.mu.Unlock()
	slices.Sort(c.Drop)
	slices.SortFunc(c.Put, func(x, y HolderRecord) int { return strings.Compare(string(x.Holder), string(y.Holder)) })
	err := a.records.SaveHolds(c)
	if err != nil {
		a.mu.Lock(opSave)
		defer a.mu.Unlock()
		a.held.putBack(c.Put, c.Drop)
		return err
	}
	for _, e := range endpoints {
		a.endpointPub.Upsert(e.Holder, e)
	}
	for _, holder := range c.Drop {
		a.endpointPub.Delete(holder)
	}
	return nil
}

// sinceHeard returns how long ago the store was last heard; ok is false if it
// never was, or at a time that this clock has not reached: then it was set back.
func (a *Allocator) sinceHeard() (age time.Duration, ok bool) {
	a.mu.Lock(opRead)
	defer a.mu.Unlock()
	return a.mirror.age(time.Now())
}

// saveKnown writes the changes of the cluster's known identities. One call runs at a time.
func (a *Allocator) saveKnown() error {
	var c KnownChange
	var was time.Time
	err := a.records.SaveKnown(func() KnownChange {
		c, was = a.takeKnown()
		return c
	})
	if err != nil {
		a.mu.Lock(opSave)
		defer a.mu.Unlock()
		a.mirror.putBack(c, was)
	}
	return err
}

// takeKnown returns the changes that SaveKnown has not received yet, and the former time of heard.
func (a *Allocator) takeKnown() (c KnownChange, was time.Time) {
	a.mu.Lock(opSave)
	c, was = a.mirror.take()
	a.mu.Unlock()
	// Without the lock, and in the order of the file, which takes it faster.
	slices.Sort(c.Drop)
	slices.SortFunc(c.Put, identity.Compare)
	return c, was
}
