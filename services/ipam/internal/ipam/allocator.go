// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipam

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/looptime"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/ipam/internal/pool"
)

// Limits of the loop.
const (
	maxWaiting = 1024 // number of calls in the queue; if it is full, calls fail with ErrBusy
	maxBatch   = 256  // number of calls that share a commit
	maxExpire  = 256  // number of deadlines that are handled in one commit, for which calls wait
	retryAfter = time.Second
)

// faultLeased is reached after a lease was created in memory and before the caller gets its answer.
var faultLeased = fault.Register("ipam/allocate/leased")

// faults are the fault points before and after the commit of each kind of call.
var faults = map[verb]struct{ before, after *fault.Point }{
	verbConfirm: {fault.Register("ipam/confirm/before-commit"), fault.Register("ipam/confirm/after-commit")},
	verbRelease: {fault.Register("ipam/release/before-commit"), fault.Register("ipam/release/after-commit")},
	verbExpire:  {fault.Register("ipam/expire/before-commit"), fault.Register("ipam/expire/after-commit")},
	verbRanges:  {fault.Register("ipam/ranges/before-commit"), fault.Register("ipam/ranges/after-commit")},
}

type verb int

const (
	verbConfirm verb = iota
	verbRelease
	verbExpire
	verbRanges
	verbAllocate // this and the following verbs do not change the store
	verbList
)

// Names of the operations whose durations are measured, in addition to the calls.
const (
	// opTurn is a whole turn of the loop, for which a call may have to wait. The other operations are parts of a
	// turn.
	opTurn    = "turn"
	opCommit  = "commit"
	opReload  = "reload"
	opSummary = "summarize"
)

// operations are the names under which the durations of calls and deadlines are measured.
var operations = [...]string{
	verbAllocate: "allocate", verbConfirm: "confirm", verbRelease: "release", verbExpire: "expire", verbRanges: "ranges",
	verbList: "list",
}

// Options are the settings of an Allocator.
type Options struct {
	Field      string // name of the setting that contains the ranges, for errors
	Ranges     []netip.Prefix
	Stored     bool     // ranges come from SetRanges and the store, and not from Ranges
	Families   []Family // families of which the node should have a range; empty: no requirement
	Exclude    []netip.Prefix
	Lease      time.Duration // at least a second
	Quarantine time.Duration // 0 or more
	Observe    Observer
	// AsksReuse means that no released address is allocated again before SetReuse was called.
	AsksReuse bool

	// Now returns the current time; time.Now if nil. The time should have a monotonic reading, so that deadlines do
	// not move when the wall clock is set.
	Now func() time.Time
}

// Observer receives events. Its functions may be nil and must not block.
type Observer struct {
	Committed func(took time.Duration, err error)
	Expired   func(leases int)
	// Reloaded is called after a failed commit, once the state was read again from the store.
	Reloaded func(cause error)
}

// Allocator serves calls from many goroutines. A single goroutine, Run, owns the state. It takes all queued calls,
// applies them in memory, writes all changes with one commit, and then answers the calls. Concurrent calls therefore
// share one sync of the disk, and each answer describes state that is on the disk. Leases are the exception: they exist
// only in memory, and their calls are answered at once.
type Allocator struct {
	o       Options
	store   Store
	calls   chan *call
	stopped chan struct{} // closed when Run returns
	summary atomic.Pointer[Summary]
	problem atomic.Pointer[error] // error of the last commit
	hub     *watch.Hub[netip.Prefix, Range]
	ledger  *ledger   // owned by Run
	retryAt time.Time // next attempt to write to the store; owned by Run
	tried   bool      // a write was tried in this turn; owned by Run
	times   looptime.Times
}

// call is one request in the queue.
type call struct {
	ctx  context.Context
	verb verb
	work func(*ledger, time.Time) (answer, error)
	done chan struct{} // closed when answer and err are set

	answer answer
	err    error
}

type answer struct {
	allocation *Allocation
	all        []*entry
}

// New reads the state from the store and returns an Allocator. Calls wait until Run is called.
func New(store Store, o Options) (*Allocator, error) {
	if o.Lease < time.Second {
		return nil, fmt.Errorf("lease: %s is shorter than a second", o.Lease)
	}
	if o.Quarantine < 0 {
		return nil, fmt.Errorf("quarantine: %s is negative", o.Quarantine)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	a := &Allocator{
		o: o, store: store, calls: make(chan *call, maxWaiting), stopped: make(chan struct{}),
		hub: watch.NewHub[netip.Prefix](watch.Options[Range]{Loading: true, Equal: func(a, b Range) bool { return a == b }}),
	}
	if err := a.load(); err != nil {
		return nil, err
	}
	if len(a.ledger.serving()) > 0 {
		a.hub.Loaded()
	}
	return a, nil
}

// load builds the ledger from the store, and takes over the leases of the former ledger.
func (a *Allocator) load() error {
	contents, err := a.store.Load()
	if err != nil {
		return err
	}
	// The previous version stored leases. They stay valid like all other leases, but are removed from the store.
	var leases []*Allocation
	contents.Allocations = slices.DeleteFunc(contents.Allocations, func(x *Allocation) bool {
		if x.State == Leased {
			leases = append(leases, x)
		}
		return x.State == Leased
	})
	stored := leases
	if a.ledger != nil {
		leases = a.ledger.leased()
	}
	ranges := a.o.Ranges
	if a.o.Stored {
		ranges = contents.Serving
	}
	pools, err := a.pools(ranges)
	if err != nil {
		return err
	}
	former := pool.Former(formerRanges(slices.Concat(contents.Allocations, leases)), ranges, a.o.Exclude)
	l, err := newLedger(pools, former, contents, leases, a.o.Lease, a.o.Quarantine, a.o.Now())
	if err != nil {
		return err
	}
	l.families, l.asks = a.o.Families, a.o.AsksReuse
	if a.ledger != nil {
		l.asks, l.why = a.ledger.asks, a.ledger.why
	}
	for _, x := range stored {
		l.changed().Allocations[x.Owner] = nil
	}
	if a.ledger != nil {
		l.goOn(a.ledger.pools)
		l.spaces.resume(a.ledger.spaces, l)
	}
	a.ledger = l
	a.summary.Store(l.summary())
	a.announce()
	return nil
}

// pools creates a pool for each serving range. There may be no range, unless ranges are configured.
func (a *Allocator) pools(ranges []netip.Prefix) ([]*pool.Pool, error) {
	if a.o.Stored && len(ranges) == 0 {
		return nil, nil
	}
	return pool.New(a.o.Field, ranges, a.o.Exclude)
}

// formerRanges returns the ranges from which held addresses were allocated.
func formerRanges(held []*Allocation) []netip.Prefix {
	ranges := map[netip.Prefix]struct{}{}
	for _, h := range held {
		for _, x := range h.Addresses {
			ranges[netip.PrefixFrom(x.Addr, x.PoolBits).Masked()] = struct{}{}
		}
	}
	return slices.Collect(maps.Keys(ranges))
}

// Hub returns the hub that distributes the ranges of the node.
func (a *Allocator) Hub() *watch.Hub[netip.Prefix, Range] { return a.hub }

// announce updates the hub from the ledger.
func (a *Allocator) announce() {
	here := map[netip.Prefix]bool{}
	for _, p := range a.ledger.pools {
		if p.hidden() {
			continue
		}
		here[p.Prefix()] = true
		draining := p.draining || p.refused != ""
		a.hub.Upsert(p.Prefix(), Range{
			Prefix: p.Prefix(), Gateway: p.Gateway(), Draining: draining, Primary: a.ledger.isPrimary(p),
		})
	}
	for _, p := range a.hub.Keys() {
		if !here[p] {
			a.hub.Delete(p)
		}
	}
}

// announcesTooMuch reports whether the hub contains a range that no longer belongs to the node and has no allocated
// addresses.
func (a *Allocator) announcesTooMuch() bool {
	return slices.ContainsFunc(a.ledger.pools, func(p *poolState) bool {
		if !p.hidden() {
			return false
		}
		_, ok := a.hub.Get(p.Prefix())
		return ok
	})
}

// Outside lists allocations with an address that the pools do not allow. They are kept until they are released. It must
// be called before Run.
func (a *Allocator) Outside() []*Allocation {
	var out []*Allocation
	for _, e := range a.ledger.held {
		for _, x := range e.Addresses {
			if a.ledger.poolFor(x.Addr) == nil {
				out = append(out, e.Allocation)
				break
			}
		}
	}
	slices.SortFunc(out, func(x, y *Allocation) int { return x.Owner.Compare(y.Owner) })
	return out
}

// Run handles calls and deadlines. It returns nil when ctx ends, and an error if the store is lost.
func (a *Allocator) Run(ctx context.Context) error {
	defer close(a.stopped)
	// First commit the deadlines that load has moved to an earlier time. Otherwise each restart would extend them.
	wait, err := a.serve(ctx, nil)
	if err != nil {
		return err
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	batch := make([]*call, 0, maxBatch)
	for {
		batch = batch[:0]
		select {
		case <-ctx.Done():
			return nil
		case c := <-a.calls:
			batch = append(batch, c)
		case <-timer.C:
		}
	drain:
		for len(batch) < maxBatch {
			select {
			case c := <-a.calls:
				batch = append(batch, c)
			default:
				break drain
			}
		}
		wait, err := a.serve(ctx, batch)
		if err != nil {
			return err
		}
		timer.Reset(wait)
	}
}

// serve executes one batch, and returns the time until the next deadline.
func (a *Allocator) serve(ctx context.Context, batch []*call) (time.Duration, error) {
	began := time.Now()
	defer func() { a.spent(opTurn, began) }()
	now := a.o.Now()
	a.tried = false
	var did [verbAllocate]bool
	expired, ended, done := a.ledger.expire(now, maxExpire)
	did[verbExpire] = ended > 0
	batch = a.decide(ctx, batch, now, &did, a.spent(operations[verbExpire], began))
	wait := time.Duration(0)
	ranges := a.ledger.changes.Serving != nil || a.ledger.changes.Refused != nil
	err := a.commit(ctx, did)
	switch {
	case ranges && (err == nil || errors.Is(err, errInjectedAfter)):
		// The reloaded allocations keep their deadlines, and the search positions come from the store.
		if lerr := a.load(); lerr != nil {
			a.fail(batch, lerr)
			return 0, lerr
		}
		if len(a.ledger.serving()) > 0 || a.o.Stored {
			a.hub.Loaded()
		}
	case errors.Is(err, errInjectedAfter):
		// The changes are committed; only the answers were not sent.
	case err != nil:
		// It is unknown whether the changes were written, so memory and the file may differ. Read the file
		// again.
		if a.o.Observe.Reloaded != nil {
			a.o.Observe.Reloaded(err)
		}
		if errors.Is(err, ErrStoreLost) {
			a.fail(batch, err)
			return 0, err
		}
		reload := time.Now()
		lerr := a.load()
		a.spent(opReload, reload)
		if lerr != nil {
			a.fail(batch, err)
			return 0, errors.Join(err, lerr)
		}
		wait = retryAfter
	}
	if expired > 0 && a.o.Observe.Expired != nil {
		a.o.Observe.Expired(expired)
	}
	if a.ledger.dropEmptied() || a.announcesTooMuch() {
		a.ledger.choosePrimary()
		a.announce()
	}
	last := time.Now()
	a.summary.Store(a.ledger.summary())
	a.spent(opSummary, last)
	if err != nil {
		a.fail(batch, err)
	} else {
		for _, c := range batch {
			close(c.done)
		}
	}
	if a.Problem() != nil {
		if !now.Before(a.retryAt) {
			if err := a.write(&Changes{}); errors.Is(err, ErrStoreLost) {
				return 0, err
			}
		}
		return retryAfter, nil
	}
	if !done {
		return wait, nil
	}
	at, ok := a.ledger.next()
	if !ok {
		at = now.Add(time.Hour)
	}
	return max(wait, at.Sub(a.o.Now())), nil
}

// decide applies calls in memory, and returns the calls whose answers must wait for the commit. It answers an Allocate
// that returns a lease or fails immediately. Such a lease may depend on a change, for example a release, whose commit
// then fails. In that case, a Confirm of the lease is refused.
func (a *Allocator) decide(
	ctx context.Context, batch []*call, now time.Time, did *[verbAllocate]bool, last time.Time,
) (waiting []*call) {
	var leases []*call
	waiting = batch[:0]
	for _, c := range batch {
		if c.err = context.Cause(c.ctx); c.err == nil { // otherwise the caller no longer waits
			c.answer, c.err = c.work(a.ledger, now)
			last = a.spent(operations[c.verb], last)
			if c.verb < verbAllocate {
				did[c.verb] = true
			}
		}
		if c.verb != verbAllocate || c.err == nil && c.answer.allocation.State == Confirmed {
			waiting = append(waiting, c)
			continue
		}
		if c.err == nil {
			if err := faultLeased.Hit(ctx); err != nil {
				c.answer, c.err = answer{}, fmt.Errorf("%w: %w", ErrStore, err)
			}
		}
		leases = append(leases, c)
	}
	if len(leases) > 0 {
		a.summary.Store(a.ledger.summary())
	}
	for _, c := range leases {
		close(c.done)
	}
	return waiting
}

// writable returns the reason for which the store accepts no writes. After a failed commit, it tries to write, at most
// once per turn.
func (a *Allocator) writable() error {
	if a.Problem() != nil && !a.tried {
		a.tried = true
		_ = a.write(&Changes{}) // write records whether the problem persists
	}
	if err := a.Problem(); err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	return nil
}

// spent records how long the loop was busy with an operation since began, and returns the current time.
func (a *Allocator) spent(operation string, began time.Time) time.Time {
	now := time.Now()
	a.times.Add(operation, now.Sub(began))
	return now
}

// Busy returns how long the loop was busy with each operation. It does not wait for the loop.
func (a *Allocator) Busy() []looptime.Figures { return a.times.All() }

func (a *Allocator) fail(batch []*call, err error) {
	for _, c := range batch {
		c.answer, c.err = answer{}, fmt.Errorf("%w: %w", ErrStore, err)
		close(c.done)
	}
}

// errInjectedAfter marks an error that a test has injected after a successful commit.
var errInjectedAfter = errors.New("after the commit")

func (a *Allocator) commit(ctx context.Context, did [verbAllocate]bool) error {
	changes := a.ledger.takeChanges()
	if changes.Empty() {
		return nil
	}
	for v, yes := range did {
		if yes {
			if err := faults[verb(v)].before.Hit(ctx); err != nil {
				return err
			}
		}
	}
	if err := a.write(changes); err != nil {
		return err
	}
	for v, yes := range did {
		if yes {
			if err := faults[verb(v)].after.Hit(ctx); err != nil {
				return fmt.Errorf("%w: %w", errInjectedAfter, err)
			}
		}
	}
	return nil
}

// write commits changes and records the result.
func (a *Allocator) write(c *Changes) error {
	began := time.Now()
	err := a.store.Commit(c)
	a.spent(opCommit, began)
	if a.o.Observe.Committed != nil {
		a.o.Observe.Committed(time.Since(began), err)
	}
	if err != nil {
		a.problem.Store(&err)
		a.retryAt = a.o.Now().Add(retryAfter)
		return err
	}
	a.problem.Store(nil)
	return nil
}

// Problem returns the error of the last commit, nil if it succeeded. While it is not nil, no address can be allocated
// or released; Run retries the store every second.
func (a *Allocator) Problem() error {
	if p := a.problem.Load(); p != nil {
		return *p
	}
	return nil
}

// do queues a call and waits for its answer.
func (a *Allocator) do(ctx context.Context, v verb, work func(*ledger, time.Time) (answer, error)) (answer, error) {
	c := &call{ctx: ctx, verb: v, work: work, done: make(chan struct{})}
	select {
	case <-a.stopped:
		return answer{}, ErrStopped
	default:
	}
	select {
	case a.calls <- c:
	default:
		return answer{}, fmt.Errorf("%w: %d", ErrBusy, maxWaiting)
	}
	select {
	case <-c.done:
		return c.answer, c.err
	case <-ctx.Done():
		return answer{}, context.Cause(ctx)
	case <-a.stopped:
	}
	// Run may have answered the call just before it returned.
	select {
	case <-c.done:
		return c.answer, c.err
	default:
		return answer{}, ErrStopped
	}
}

// Allocate leases addresses to an owner, or renews its lease. A repeated call returns the same addresses, unless the
// process has ended in between. While the store accepts no writes, Allocate fails, because Confirm would need them.
func (a *Allocator) Allocate(ctx context.Context, r Request) (*Allocation, error) {
	got, err := a.do(ctx, verbAllocate, func(l *ledger, now time.Time) (answer, error) {
		if !r.ValidateOnly && l.held[r.Owner] == nil {
			if err := a.writable(); err != nil {
				return answer{}, err
			}
		}
		allocation, err := l.allocate(now, r)
		return answer{allocation: allocation}, err
	})
	return got.allocation, err
}

// Confirm makes a lease permanent if addrs are the addresses of the lease. When it returns nil, the allocation is on
// stable storage. It returns ErrNotHeld if the lease, or the process that granted it, has ended, and ErrMismatch if the
// owner has leased other addresses since.
func (a *Allocator) Confirm(ctx context.Context, o workload.Owner, addrs []netip.Addr) (*Allocation, error) {
	got, err := a.do(ctx, verbConfirm, func(l *ledger, now time.Time) (answer, error) {
		allocation, err := l.confirm(now, o, addrs)
		return answer{allocation: allocation}, err
	})
	return got.allocation, err
}

// ValidateConfirm returns the result that Confirm would have. It changes nothing.
func (a *Allocator) ValidateConfirm(ctx context.Context, o workload.Owner, addrs []netip.Addr) (*Allocation, error) {
	got, err := a.do(ctx, verbList, func(l *ledger, now time.Time) (answer, error) {
		allocation, err := l.confirmed(now, o, addrs)
		return answer{allocation: allocation}, err
	})
	return got.allocation, err
}

// ValidateRelease returns the result that Release would have. It changes nothing.
func (a *Allocator) ValidateRelease(ctx context.Context, o workload.Owner, only ...netip.Addr) (*Allocation, error) {
	got, err := a.do(ctx, verbList, func(l *ledger, _ time.Time) (answer, error) {
		if err := l.mayRelease(o, only); err != nil {
			return answer{}, err
		}
		if e := l.held[o]; e != nil {
			return answer{allocation: e.Allocation}, nil
		}
		return answer{}, nil
	})
	return got.allocation, err
}

// Release removes an owner's allocation and returns it. If the owner has none, it returns nil and no error. If
// addresses are given and the owner has different ones, Release removes nothing and returns ErrMismatch.
func (a *Allocator) Release(ctx context.Context, o workload.Owner, only ...netip.Addr) (*Allocation, error) {
	got, err := a.do(ctx, verbRelease, func(l *ledger, now time.Time) (answer, error) {
		if err := l.mayRelease(o, only); err != nil {
			return answer{}, err
		}
		return answer{allocation: l.release(now, o)}, nil
	})
	return got.allocation, err
}

// List returns a consistent snapshot of all allocations, sorted by owner.
func (a *Allocator) List(ctx context.Context) ([]*Allocation, error) {
	got, err := a.do(ctx, verbList, func(l *ledger, _ time.Time) (answer, error) {
		return answer{all: l.list()}, nil
	})
	if err != nil {
		return nil, err
	}
	out := make([]*Allocation, len(got.all))
	for i, e := range got.all {
		out[i] = e.Allocation
	}
	slices.SortFunc(out, func(x, y *Allocation) int { return x.Owner.Compare(y.Owner) })
	return out, nil
}

// SetRanges replaces the serving ranges, in order of use. Ranges that no longer serve drain: no new addresses are
// allocated from them, and they are removed when their last address is released. The error names the range.
func (a *Allocator) SetRanges(ctx context.Context, ranges []netip.Prefix) error {
	pools, err := a.pools(ranges)
	if err != nil {
		return err
	}
	_, err = a.do(ctx, verbRanges, func(l *ledger, _ time.Time) (answer, error) {
		return answer{}, l.setRanges(a.o.Field, pools)
	})
	return err
}

// SetRefused closes the ranges in list, which the cluster has given to another node, and reopens all others. No new
// addresses are allocated from a closed range. The list is stored, so the ranges stay closed after a restart.
func (a *Allocator) SetRefused(ctx context.Context, list []Refusal) error {
	_, err := a.do(ctx, verbRanges, func(l *ledger, _ time.Time) (answer, error) {
		l.setRefused(list)
		return answer{}, nil
	})
	return err
}

// SetReuse sets whether addresses must wait after their quarantine until the cluster frees them, and the reason. The
// addresses in free may be allocated from now on. If asks is false, all may.
func (a *Allocator) SetReuse(ctx context.Context, asks bool, free []netip.Addr, why string) error {
	_, err := a.do(ctx, verbRanges, func(l *ledger, _ time.Time) (answer, error) {
		l.setReuse(asks, free, why)
		return answer{}, nil
	})
	return err
}

// Retire removes a serving range. It returns false and removes nothing if the range is primary, or if an address of it
// is in use or in quarantine. When it returns true, the removal is stored, and no further address of the range is
// allocated.
func (a *Allocator) Retire(ctx context.Context, p netip.Prefix) (retired bool, err error) {
	_, err = a.do(ctx, verbRanges, func(l *ledger, _ time.Time) (answer, error) {
		retired = l.retire(p)
		return answer{}, nil
	})
	return retired && err == nil, err
}

// Summary returns the figures of all pools at the time of the last answer. It does not wait for the loop.
func (a *Allocator) Summary() *Summary { return a.summary.Load() }

// StateBytes returns the size of the stored state in bytes.
func (a *Allocator) StateBytes() int64 { return a.store.Size() }
