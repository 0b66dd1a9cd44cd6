// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package owner holds the services of one node: the objects and their sources, the frontends
// computed from them, and the subscribers of frontends.
//
// All state belongs to the goroutine of Run. That goroutine executes calls one at a time; a caller whose
// context ends stops waiting. A change takes three steps: one call to the loop decides it, the caller's
// goroutine writes it to stable storage, and another call to the loop applies it. Only one change is in
// progress at a time, so the decision is still valid when it is applied.
//
// Owner has the loop and the journal, and every change passes through it. The types that hold the state do
// not call Owner:
//
//   - index holds the objects, and computes from them: frontends, claims on them, backends, counts;
//   - sources tracks which sources were listed, and what they refused;
//   - quota divides the limits of services and slices among tenants, places the frontends and
//     backends;
//   - Subscribers holds the subscribers and their progress;
//   - Reader answers questions about all of them.
//
// Feed, Objects and the calls of managers bring changes to Owner.
package owner

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/sluice-net/sluice/kit/burst"
	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/journal"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/desired/problem"
	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/record"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/source"
)

// Fault points at which a test may kill the process.
var (
	beforeApply  = fault.Register("loadbalancer/change/before-apply")
	beforeAnswer = fault.Register("loadbalancer/change/before-answer")
)

// Limits limit what is stored.
type Limits struct {
	Services  int
	Slices    int
	Frontends int
	Backends  int // distinct addresses and ports
	// BackendsPerService bounds the addresses and ports of one service.
	BackendsPerService int
}

// Config is fixed for the life of an owner.
type Config struct {
	Node   compile.Node
	Limits Limits
	// Shares and Tenants define how the limits are shared. Without Tenants, each namespace is a tenant.
	Shares  shares.Settings
	Tenants Tenants
	// Linger is how long a disconnected subscriber may resume its stream.
	Linger time.Duration
	Log    *slog.Logger
	Now    func() time.Time
}

// Tenants maps namespaces to tenants.
type Tenants interface {
	Of(namespace string) shares.Tenant
	// Complete reports whether all Namespaces were listed once. Until then no levels are computed.
	Complete() bool
}

// everyNamespace implements Tenants for a node without an API server.
type everyNamespace struct{ *shares.Tenants }

// Complete implements Tenants.
func (everyNamespace) Complete() bool { return true }

// Operations for which the owner's loop measures time.
const (
	opDecide = "decide on a change"
	opApply  = "apply a change"
	opLevel  = "level the shares" // a part of opDecide
	opSweep  = "sweep"
	opStream = "fill a message"
	opRead   = "read"
	opOther  = "other"
)

// Owner owns all state.
type Owner struct {
	config      Config
	incarnation [16]byte
	journal     *record.Journal
	loop        *loop.Loop
	// revising is held during a change. Only its holder uses the journal.
	revising *loop.Lock

	name   [16]byte // name of the state on stable storage
	index  *index
	quota  *quota
	places *places

	sources *sources

	subscribers *Subscribers
	reader      *Reader
	garbage     *garbage

	problems *problem.Set
	unsaved  unsaved
	fatal    error
	level    chan struct{} // has a token when levels are due
	swept    time.Time     // when sweep ran last
}

// New loads the state in dir. sources are the configured sources; subscribers wait until each of them was listed
// completely once.
func New(config Config, dir string, sources []string) (*Owner, error) {
	if config.Now == nil {
		config.Now = time.Now
	}
	o := &Owner{
		config: config, loop: loop.New(loop.Options{}), sources: newSources(sources, config.Log), garbage: newGarbage(),
		problems: problem.New(func(part string, err error) {
			config.Log.Error("problem with services", "part", part, log.Err(err))
		}),
		level: make(chan struct{}, 1), unsaved: make(unsaved),
	}
	o.revising = o.loop.NewLock()
	if o.config.Tenants == nil {
		o.config.Tenants = everyNamespace{shares.NewTenants(config.Shares)}
	}
	o.index = newIndex(&config.Node, o.config.Tenants)
	o.quota = newQuota(&o.config, o.index, o.sources)
	o.places = newPlaces(&o.config, o.index, o.sources, o.quota)
	rand.Read(o.incarnation[:]) //nolint:errcheck // rand.Read never fails
	o.subscribers = newSubscribers(o)
	if err := o.restore(dir); err != nil {
		return nil, err
	}
	o.reader = &Reader{
		loop: o.loop, index: o.index, places: o.places, sources: o.sources, subscribers: o.subscribers, journal: o.journal,
		problems: o.problems,
	}
	o.sources.checkReady()
	return o, nil
}

func (o *Owner) restore(dir string) error {
	touched := make(map[service.Name]struct{})
	known := make(map[managed.By]*managed.By)
	var err error
	var state record.State
	o.journal, state, err = record.Open(dir, func(r record.Record) error {
		by := managed.By{Source: r.Source, Origin: r.Origin, Manager: r.Manager}
		if known[by] == nil {
			known[by] = &by
		}
		x := &object{
			by: known[by], remarks: newRemarks(r.Notes, r.Dropped), revision: r.Revision, updated: r.Updated, created: r.Created,
			service: r.Service, slice: r.Slice,
		}
		o.index.put(x)
		touched[x.of()] = struct{}{}
		return nil
	})
	if err != nil {
		return err
	}
	o.name = state.Name
	if !o.sources.deliverZone() {
		state.Zone = ""
	}
	o.index.restore(state.Revision, state.Zone)
	o.sources.restore(state.Complete)
	o.quota.restore()
	o.places.restore(touched, o.config.Now)
	for name := range touched {
		j := o.index.service(name)
		o.index.enter(j)
		if j.object != nil {
			o.subscribers.changed(name, j.revision)
		}
	}
	return nil
}

// Close unlocks the state directory. Run must have returned.
func (o *Owner) Close() error {
	o.subscribers.close()
	return o.journal.Close()
}

// Incarnation identifies this run.
func (o *Owner) Incarnation() [16]byte { return o.incarnation }

// StateName returns the name of the state on stable storage.
func (o *Owner) StateName() [16]byte { return o.name }

// pause is the interval of sweep.
const pause = time.Second

// Run owns the state until the context ends.
func (o *Owner) Run(ctx context.Context) error {
	levels, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		o.runLevels(levels)
	}()
	defer func() { <-ended }() // after the loop, which ends its calls
	defer o.subscribers.close()
	defer stop()
	o.swept = time.Now()
	return o.loop.Run(ctx, loop.Work{
		Pause: func() time.Duration { return max(0, pause-time.Since(o.swept)) },
		Sweep: o.sweep, SweepAs: opSweep,
		Fatal: func() error { return o.fatal },
	})
}

// sweep does the timed work: it drops subscribers whose time to resume has passed, and retries failed writes.
func (o *Owner) sweep() {
	o.swept = time.Now()
	now := o.config.Now()
	o.wakeLevels(now)
	o.subscribers.sweep(now)
	o.garbage.sweep()
	if o.problems.Of(problem.Storage) == nil {
		return
	}
	if release, held := o.revising.TryHold(); held { // otherwise the change in progress updates the problem
		o.stored(o.journal.Flush())
		release()
	}
}

// stored records the result of a write of the state.
func (o *Owner) stored(err error) {
	if p := o.journal.Problem(); p != nil {
		err = p
	}
	o.problems.Note(problem.Storage, err)
	if errors.Is(err, journal.ErrLost) {
		o.fatal = err
	}
}

// synced records that a source was listed completely.
func (o *Owner) synced(name string) {
	if !o.sources.synced(name) {
		return
	}
	o.subscribers.mark(nil) // a barrier reports it
	o.sources.checkReady()
	o.wakeLevels(o.config.Now())
}

// Ready is closed once every source was listed completely, in this run or an earlier one.
func (o *Owner) Ready() <-chan struct{} { return o.sources.readied }

// Garbage has a token when much memory is unused: some time after changes, or after a subscriber has received all
// frontends.
func (o *Owner) Garbage() <-chan struct{} { return o.garbage.due }

// Reader answers questions about the services.
func (o *Owner) Reader() *Reader { return o.reader }

// Subscribers returns the subscribers of frontends.
func (o *Owner) Subscribers() *Subscribers { return o.subscribers }

// Figures returns for how long the owner was busy with each operation.
func (o *Owner) Figures() []loop.Figures { return o.loop.Figures() }

// revise makes a change atomically. decide and done run in the owner's goroutine.
func (o *Owner) revise(ctx context.Context, decide func() (*edit, error), done func(*edit)) (Outcome, error) {
	release, err := o.revising.Hold(ctx)
	if err != nil {
		return Outcome{}, err
	}
	defer release()
	return o.reviseHeld(ctx, decide, done)
}

// reviseHeld is revise for a caller that holds Owner.revising.
func (o *Owner) reviseHeld(ctx context.Context, decide func() (*edit, error), done func(*edit)) (Outcome, error) {
	ended := false
	e, err := loop.Ask(ctx, o.loop, opDecide, func() (*edit, error) {
		e, err := decide()
		if err == nil {
			err = o.plan(e)
		}
		if err != nil {
			return nil, err
		}
		if e.Revision = o.index.revision; !e.writes() && !e.dry && len(o.unsaved) == 0 {
			ended = true
			done(e)
		}
		e.unsaved = o.unsaved.except(e, o.index)
		return e, nil
	})
	if err != nil || ended || e.dry {
		if e == nil {
			e = &edit{}
		}
		return e.Outcome, err
	}
	if err := o.journal.Commit(ctx, e.record()); err != nil {
		if terr := o.loop.Do(context.WithoutCancel(ctx), opOther, func() {
			if o.stored(err); e.redelivered && o.fatal == nil && ctx.Err() == nil {
				o.apply(e)
				o.unsaved.add(e)
			}
		}); terr != nil {
			return Outcome{}, terr
		}
		return Outcome{}, fmt.Errorf("%w: %w", failure.ErrStorage, err)
	}
	stopped := beforeApply.Hit(ctx)
	// The change is on stable storage, so apply it even if the caller has stopped waiting.
	if err := o.loop.Do(context.WithoutCancel(ctx), opApply, func() {
		o.stored(nil)
		o.apply(e)
		clear(o.unsaved)
		done(e)
	}); err != nil {
		return Outcome{}, err
	}
	return e.Outcome, errors.Join(stopped, beforeAnswer.Hit(ctx))
}

// plan assigns revisions to what an edit changes, and checks the limits.
func (o *Owner) plan(e *edit) error {
	if len(e.puts)+len(e.gone) >= burst.Large {
		burst.Begin()
	}
	for _, x := range e.puts {
		x.created = o.quota.waitingSince(x.key())
	}
	services, count := o.index.plan(e, o.config.Now().UnixNano())
	if len(e.puts) == 0 || source.Of(e.puts[0].by.Source).Waits {
		return nil // for a source, objects that exceed a share are left out instead
	}
	l := &o.config.Limits
	switch {
	case services > l.Services:
		return fmt.Errorf("%w: there would be %d services with %s, the limit is %d (limits.services)", failure.ErrLimit,
			services, last(e, service.KindService), l.Services)
	case count > l.Slices:
		return fmt.Errorf("%w: there would be %d endpoint slices with %s, the limit is %d (limits.endpointSlices)",
			failure.ErrLimit, count, last(e, service.KindSlice), l.Slices)
	}
	if err := o.quota.tryCount(e); err != nil || !source.Of(e.puts[0].by.Source).Calls {
		return err
	}
	if err := o.index.checkLimits(l, e.after); err != nil {
		return err
	}
	return o.places.findShare(e.after)
}

// apply applies an edit, and marks the changed frontends for the subscribers.
func (o *Owner) apply(e *edit) {
	t := o.index.begin(e.touched)
	admitted := o.places.admit(e)
	t.expect(admitted.after)
	o.index.apply(e, o.config.Now().UnixNano())
	admitted.set(o.index)
	o.quota.recount(e)
	changed := t.end()
	for _, name := range t.touched {
		j := o.index.service(name)
		if j == nil {
			continue
		}
		o.index.dropEmpty(j)
		if j.object == nil {
			o.subscribers.gone(name)
		} else {
			o.subscribers.changed(name, j.revision)
		}
	}
	o.subscribers.localChanged()
	o.garbage.add()
	if e.content {
		o.subscribers.mark(changed)
	}
}
