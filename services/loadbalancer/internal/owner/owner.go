// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package owner has the services of one node: which objects there are and who
// brought them, the frontends that they come to, and the subscribers that get
// these.
//
// All of it belongs to the one goroutine that Run is. Calls from elsewhere are
// handed to it and wait for their turn; a caller whose context ends stops waiting.
// A change is decided in one turn, written to stable storage beside the owner, and
// made in another turn: only one change at a time is on its way, so that what was
// decided is still right.
package owner

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/journal"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/record"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/stream"
)

// Points at which a test may kill the process.
var (
	beforeApply  = fault.Register("loadbalancer/change/before-apply")
	beforeAnswer = fault.Register("loadbalancer/change/before-answer")
)

// Limits bound what is kept.
type Limits struct {
	Services  int
	Slices    int
	Frontends int
	Backends  int // distinct addresses and ports
	// BackendsPerService are the addresses and ports of one service.
	BackendsPerService int
}

// Config is fixed for the life of an owner.
type Config struct {
	Node   compile.Node
	Limits Limits
	// Shares and Tenants say who shares the limits; without Tenants each namespace is a
	// tenant.
	Shares  shares.Settings
	Tenants Tenants
	// Linger is how long a subscriber that has gone may resume its stream.
	Linger time.Duration
	Log    *slog.Logger
	Now    func() time.Time
}

// Tenants knows the tenants of namespaces.
type Tenants interface {
	Of(namespace string) shares.Tenant
	// Complete reports whether all Namespaces were listed once. Until then no levels are
	// computed.
	Complete() bool
}

// everyNamespace is the Tenants of a node without an API server.
type everyNamespace struct{ *shares.Tenants }

// Complete implements Tenants.
func (everyNamespace) Complete() bool { return true }

// Operations that the owner's time is counted by.
const (
	opDecide = "decide on a change"
	opApply  = "apply a change"
	opLevel  = "level the shares" // a part of opDecide
	opSweep  = "sweep"
	opStream = "fill a message"
	opRead   = "read"
	opOther  = "other"
)

// source is what the owner knows of one that is configured.
type source struct {
	synced  bool
	listed  bool // in this state, by this run or an earlier one
	err     string
	refused map[string]Refused // by origin
}

// Refused is a file or an object that is not in force as it was last given.
type Refused struct {
	Key    service.ObjectKey // zero: a file as a whole
	Source string
	Origin string
	Err    string
}

// Owner is the one owner of all state.
type Owner struct {
	config      Config
	incarnation [16]byte
	journal     *record.Journal
	loop        *loop.Loop
	// revising is held for the change that is under way. Its holder alone uses the
	// journal.
	revising *loop.Lock

	state    record.State
	services map[service.Name]*joined
	slices   map[service.Name]*object
	refusing int                      // services without a place in limits.services; they are not in count
	count    int                      // of services that have their object
	orphans  int                      // slices whose service is missing
	checked  map[service.Name]*joined // those with health check ports

	winners   map[frontend.Key]*joined   // who has a frontend
	contested map[frontend.Key][]*joined // everyone who wants it, where there are several
	backends  backends                   // that services lead to
	places    *places                    // that services and slices have

	sources  map[string]*source // that are configured
	managers map[string]bool    // those of managed.SourceGRPC that completed in this run

	subscribers map[string]*stream.Subscriber
	sessions    map[string]*Session // of those that are connected
	session     uint64
	seq         uint64        // of the last barrier
	progress    chan struct{} // closed when a subscriber comes further

	watch    *watch.Hub[service.Name, uint64] // of revisions
	unsettle map[service.Name]struct{}        // that were watched as not enforced
	problems map[string]error
	fatal    error
	level    chan struct{} // has a token when levels are due
	local    chan struct{} // has a token when Locals may be others
	changes  int           // ticks since the last change, from 1; 0: there was none, or it is noted
	garbage  chan struct{} // has a token when much of what was in memory is gone

	ready   bool
	readied chan struct{} // closed once ready
	swept   time.Time     // when sweep ran last
}

// New takes the state of dir. The sources are those of the configuration; each has
// to say everything once.
func New(config Config, dir string, sources []string) (*Owner, error) {
	if config.Now == nil {
		config.Now = time.Now
	}
	o := &Owner{
		config: config, loop: loop.New(loop.Options{}),
		services: make(map[service.Name]*joined), slices: make(map[service.Name]*object),
		checked: make(map[service.Name]*joined),
		winners: make(map[frontend.Key]*joined), contested: make(map[frontend.Key][]*joined), backends: newBackends(),
		sources: make(map[string]*source), managers: make(map[string]bool),
		subscribers: make(map[string]*stream.Subscriber), sessions: make(map[string]*Session), progress: make(chan struct{}),
		watch:    watch.NewHub[service.Name, uint64](watch.Options[uint64]{Pending: 2 * config.Limits.Services}),
		unsettle: make(map[service.Name]struct{}), problems: make(map[string]error),
		level: make(chan struct{}, 1), local: make(chan struct{}, 1), garbage: make(chan struct{}, 1),
		readied: make(chan struct{}),
	}
	o.revising = o.loop.NewLock()
	if o.config.Tenants == nil {
		o.config.Tenants = everyNamespace{shares.NewTenants(config.Shares)}
	}
	o.places = newPlaces(o)
	rand.Read(o.incarnation[:]) //nolint:errcheck // it never fails
	for _, s := range sources {
		o.sources[s] = &source{refused: make(map[string]Refused)}
	}
	if err := o.restore(dir); err != nil {
		return nil, err
	}
	o.checkReady()
	return o, nil
}

func (o *Owner) restore(dir string) error {
	touched := make(map[service.Name]struct{})
	known := make(map[managed.By]*managed.By)
	var err error
	o.journal, o.state, err = record.Open(dir, func(r record.Record) error {
		by := managed.By{Source: r.Source, Origin: r.Origin, Manager: r.Manager}
		if known[by] == nil {
			known[by] = &by
		}
		x := &object{
			by: known[by], remarks: newRemarks(r.Notes, r.Dropped), revision: r.Revision, updated: r.Updated, created: r.Created,
			service: r.Service, slice: r.Slice,
		}
		o.put(x)
		touched[x.of()] = struct{}{}
		return nil
	})
	if err != nil {
		return err
	}
	if o.sources[managed.SourceKubernetes] != nil && o.config.Node.Zone == "" {
		o.config.Node.Zone = o.state.Zone
	}
	for _, name := range o.state.Complete {
		if s := o.sources[name]; s != nil {
			s.listed = true
		}
	}
	o.admitAll(touched)
	for name := range touched {
		j := o.services[name]
		o.enter(j)
		o.tally(j, 1)
		if j.object != nil {
			o.watch.Upsert(name, j.revision)
			o.unsettle[name] = struct{}{}
		}
	}
	return nil
}

// Close gives the state directory back. Run must have returned.
func (o *Owner) Close() error {
	o.watch.Close()
	return o.journal.Close()
}

// Incarnation is this run.
func (o *Owner) Incarnation() [16]byte { return o.incarnation }

// StateName is the name of the state that is kept on stable storage.
func (o *Owner) StateName() [16]byte { return o.state.Name }

// pause is between two looks at what no call begins: a disk that took no write,
// and subscribers that did not come back.
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
	defer o.watch.Close()
	defer stop()
	o.swept = time.Now()
	return o.loop.Run(ctx, loop.Work{
		Pause: func() time.Duration { return max(0, pause-time.Since(o.swept)) },
		Sweep: o.sweep, SweepAs: opSweep,
		Fatal: func() error { return o.fatal },
	})
}

// sweep forgets subscribers that did not come back, and tries a disk that took no
// write.
func (o *Owner) sweep() {
	o.swept = time.Now()
	now := o.config.Now()
	o.wakeLevels(now)
	for name, s := range o.subscribers {
		if s.Session == 0 && !s.Until.After(now) {
			delete(o.subscribers, name)
			o.places.forget(name)
			o.moved()
		}
	}
	if o.changes > 0 {
		if o.changes++; o.changes > quiet {
			o.changes = 0
			select {
			case o.garbage <- struct{}{}:
			default:
			}
		}
	}
	if o.problems[partStorage] == nil {
		return
	}
	if release, held := o.revising.TryHold(); held { // else a change is being written, which will tell
		o.stored(o.journal.Flush())
		release()
	}
}

// partStorage is the part of a problem that is the disk's.
const partStorage = "storage"

// stored notes how a write of the state went.
func (o *Owner) stored(err error) {
	if p := o.journal.Problem(); p != nil {
		err = p
	}
	o.problem(partStorage, err)
	if errors.Is(err, journal.ErrLost) {
		o.fatal = err
	}
}

// problem notes what is wrong, for the status and, when it is news, the log; nil
// takes it back.
func (o *Owner) problem(what string, err error) {
	before := o.problems[what]
	if err == nil {
		delete(o.problems, what)
		return
	}
	o.problems[what] = err
	if before == nil || before.Error() != err.Error() {
		o.config.Log.Error("services are not as they should be", "part", what, log.Err(err))
	}
}

// checkReady says once that the owner may be relied upon.
func (o *Owner) checkReady() {
	if o.ready || !o.complete() {
		return
	}
	o.ready = true
	close(o.readied)
}

// complete reports whether every source was listed completely in this state.
func (o *Owner) complete() bool {
	for _, s := range o.sources {
		if !s.listed {
			return false
		}
	}
	return true
}

// Ready is closed when every source was listed completely, by this run or an
// earlier one.
func (o *Owner) Ready() <-chan struct{} { return o.readied }

// SourceFailed notes why a source cannot say anything; nil takes it back.
func (o *Owner) SourceFailed(ctx context.Context, name string, why error) error {
	return o.loop.Do(ctx, opOther, func() {
		s := o.sources[name]
		s.err = ""
		if why != nil {
			s.err = why.Error()
		}
	})
}

// Garbage has a token once nothing has changed for some time after changes, or after
// a subscriber got everything: much of what is in memory then is not used any more.
func (o *Owner) Garbage() <-chan struct{} { return o.garbage }

// quiet is for how many looks nothing has to change until Garbage says so.
const quiet = 2

// manyFrontends is from how many on sending all of them leaves much garbage.
const manyFrontends = 256

// Figures are for how long the owner was busy with each operation.
func (o *Owner) Figures() []loop.Figures { return o.loop.Figures() }

// moved tells those that wait that a subscriber came further, or that there is
// another set of them, and the watchers which services are enforced now.
func (o *Owner) moved() {
	close(o.progress)
	o.progress = make(chan struct{})
	o.localChanged()
	if len(o.unsettle) == 0 {
		return
	}
	for name := range o.unsettle {
		j := o.services[name]
		switch {
		case j == nil || j.object == nil:
		case o.enforced(j.name, j.revision):
			o.watch.Upsert(name, o.state.Revision)
		default:
			continue
		}
		delete(o.unsettle, name)
	}
}

// revise makes a change, all of it or nothing. Decide and done run in turns of the
// owner.
func (o *Owner) revise(ctx context.Context, decide func() (*edit, error), done func(*edit)) (Outcome, error) {
	release, err := o.revising.Hold(ctx)
	if err != nil {
		return Outcome{}, err
	}
	defer release()
	return o.reviseHeld(ctx, decide, done)
}

// reviseHeld is revise for who has held Owner.revising.
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
		if e.Revision = o.state.Revision; !e.writes() && !e.dry {
			ended = true
			done(e)
		}
		return e, nil
	})
	if err != nil || ended || e.dry {
		if e == nil {
			e = &edit{}
		}
		return e.Outcome, err
	}
	if err := o.journal.Commit(ctx, e.record()); err != nil {
		if terr := o.loop.Do(context.WithoutCancel(ctx), opOther, func() { o.stored(err) }); terr != nil {
			return Outcome{}, terr
		}
		return Outcome{}, fmt.Errorf("%w: %w", failure.ErrStorage, err)
	}
	stopped := beforeApply.Hit(ctx)
	// Also without a caller that waits: it is on stable storage.
	if err := o.loop.Do(context.WithoutCancel(ctx), opApply, func() {
		o.stored(nil)
		o.apply(e)
		done(e)
		o.checkReady()
	}); err != nil {
		return Outcome{}, err
	}
	return e.Outcome, errors.Join(stopped, beforeAnswer.Hit(ctx))
}

// sorted are the keys of a set in order.
func sorted[K comparable](m map[K]struct{}, compare func(a, b K) int) []K {
	out := make([]K, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	slices.SortFunc(out, compare)
	return out
}
