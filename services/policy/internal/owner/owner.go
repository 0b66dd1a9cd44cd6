// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package owner has the policy of one node: which policies there are and who
// brought them, which identities are known, who subscribed to which tables,
// and the engine that compiles them.
//
// All of it belongs to the one goroutine that Run is. Calls from elsewhere are
// handed to it and wait for their turn; a caller whose context ends stops
// waiting. What a change answers is on stable storage, in the engine and in
// the log of the table stream, in that order of reading and in the reverse
// order of undoing.
//
// Owner is the loop that calls what holds the state, a type for each subject:
//
//   - forms makes policies of documents, policySet has them;
//   - places gives them their places in the limits that tenants share;
//   - sources knows which sources are complete, and comparison what a listing changes;
//   - identities, subscribers and names.Table have what the policies are compiled for;
//   - publisher has what subscribers are told, storage and problems how the disk is.
//
// None of them calls Owner or the engine: they return what changes.
package owner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kube/tenants"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/names"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// Points at which a test may kill the process.
var (
	beforeCompile = fault.Register("policy/change/before-compile")
	beforeJournal = fault.Register("policy/change/before-journal")
	beforeAnswer  = fault.Register("policy/change/before-answer")
)

// Config is fixed for the life of an owner.
type Config struct {
	Engine engine.Config // without Events
	Rules  rule.Options

	// Tenants share MaxPolicies, which are enforced as written, and MaxManifestBytes, the
	// size of their manifests together.
	MaxPolicies      int
	MaxManifestBytes int
	// Tenants knows the tenant of each namespace; nil: each namespace is a tenant.
	Tenants *tenants.Set

	MaxNames     int // DNS names that are remembered
	MaxAddresses int // learned for all names together
	// NameGrace is how long an address stays after its time, for connections
	// that still use it.
	NameGrace time.Duration
	// Linger is how long subjects stay after their subscriber has gone.
	Linger time.Duration

	Stream stream.Limits
	Log    *slog.Logger
	Now    func() time.Time
	// Directory is where the policies of the source of files are. Subscribers wait until they were
	// read once, unless it is empty.
	Directory string
	// Managers of calls have to complete once before subscribers are served.
	Managers []string
	// Processor is the processor time of the thread that Run is locked to; nil: that
	// is not measured.
	Processor func() time.Duration
}

// Owner is the one owner of all state.
type Owner struct {
	config  Config
	engine  *engine.Engine
	storage *storage
	loop    *loop.Loop
	// questions is held for the question that compiles beside the engine.
	questions *loop.Lock
	// revising is held for the change of policies that is under way.
	revising *loop.Lock
	ctx      context.Context

	publisher *publisher

	forms    *forms
	policies *policySet
	places   *places

	onAgain     atomic.Pointer[func(kind string)]
	tenants     chan struct{}  // has a token when the tenants of namespaces may be others
	leveling    bool           // the limits are being divided
	leveled     chan struct{}  // closed and replaced when they were
	tasks       sync.WaitGroup // goroutines of Run
	sources     *sources
	identities  *identities
	subscribers *subscribers
	names       *names.Table
	problems    *problems
	sweepAt     time.Time
	restored    bool // there was state of this boot

	ready   bool
	readied chan struct{} // closed once ready
	dir     string        // of the state
	fatal   error
}

// New takes the state of dir and compiles it. The sources are those of the
// configuration; each has to say everything once.
func New(config Config, dir string, sources []string) (*Owner, error) {
	if config.Now == nil {
		config.Now = time.Now
	}
	if config.Tenants == nil {
		config.Tenants = withoutTenants()
	}
	o := &Owner{
		config: config, publisher: newPublisher(config.Stream), ctx: context.Background(),
		policies:    newPolicySet(),
		subscribers: newSubscribers(config.Linger, config.Now),
		names:       names.New(names.Limits{Names: config.MaxNames, Addresses: config.MaxAddresses, Grace: config.NameGrace}),
		tenants:     make(chan struct{}, 1), leveled: make(chan struct{}),
		problems: newProblems(config.Log), readied: make(chan struct{}),
	}
	o.identities = &identities{
		all: make(map[identity.Numeric]peer.Identity), cluster: config.Engine.Cluster, nodeLabels: config.Rules.NodeLabels,
	}
	config.Engine.Events = o.publisher.step
	guarantees := config.Tenants.Settings().Guarantees
	config.Engine.Tenant = func(namespace string) (shares.Tenant, int) {
		t := config.Tenants.Of(namespace)
		if !t.HasLabel() {
			return t, 0
		}
		return t, guarantees[t.Name()]
	}
	o.engine = engine.New(config.Engine)
	o.loop = loop.New(loop.Options{
		After: o.publishTurn, Processor: config.Processor, Done: func() int { return o.engine.Counters().Tables },
	})
	o.questions, o.revising = o.loop.NewLock(), o.loop.NewLock()
	o.dir = dir
	filter, err := loadFilter(dir, config.Log)
	if err != nil {
		return nil, err
	}
	o.forms = newForms(config.Rules, config.Now, filter)
	o.places = newPlaces(&config, o.forms, o.policies)
	if err := o.restore(dir); err != nil {
		return nil, err
	}
	brought := make(map[string]bool)
	for _, p := range o.policies.all {
		brought[p.Source] = true
	}
	if o.sources, err = newSources(sourcesConfig{
		names: sources, directory: config.Directory, managers: config.Managers, dir: dir, state: o.publisher.stateID,
		now: config.Now, log: config.Log,
	}, brought, o.problems); err != nil {
		return nil, errors.Join(err, o.storage.journal.Close())
	}
	o.publish()
	o.checkReady()
	return o, nil
}

// AcceptWithout ends the waiting for a file of policies that was never read, and
// records it. To validate changes nothing.
func (o *Owner) AcceptWithout(ctx context.Context, name string, validateOnly bool) (Acceptance, error) {
	return loop.Ask(ctx, o.loop, opOther, func() (Acceptance, error) {
		return o.sources.acceptWithout(name, validateOnly)
	})
}

// Close gives the state directory back. Run must have returned.
func (o *Owner) Close() error { return o.storage.journal.Close() }

// Run owns the state until the context ends.
func (o *Owner) Run(ctx context.Context) error {
	defer o.tasks.Wait()
	o.ctx = ctx
	return o.loop.Run(ctx, loop.Work{
		Pause: o.pause, Sweep: o.sweep, SweepAs: opSweep,
		Wake: o.tenants, Woken: o.assign, WokenAs: opLevel,
		Fatal: func() error { return cmp.Or(o.fatal, o.storage.lost) },
		Stop:  o.saveSubscribers,
	})
}

// pause is the time until something has to be done without being asked.
func (o *Owner) pause() time.Duration {
	next := time.Hour
	for _, at := range []time.Time{o.storage.retryAt, o.sweepAt, o.levelAt()} {
		if !at.IsZero() {
			next = min(next, max(0, at.Sub(o.config.Now())))
		}
	}
	return next
}

// publishTurn puts what a turn did into the stream, before its caller has the answer.
func (o *Owner) publishTurn() {
	o.publish()
	o.checkReady()
}

// publish puts what the engine did into the stream.
func (o *Owner) publish() { o.publisher.publish(o.policies, o.sources) }

// apply gives a change to the engine. What it refuses has no room.
func (o *Owner) apply(c engine.Change) error {
	err := o.engine.Apply(c)
	o.noteReduced()
	if err != nil {
		return fmt.Errorf("%w: %w", failure.ErrLimit, err)
	}
	return nil
}

// wakeAt makes sure that sweep runs then; zero: never.
func (o *Owner) wakeAt(t time.Time) {
	if !t.IsZero() && (o.sweepAt.IsZero() || t.Before(o.sweepAt)) {
		o.sweepAt = t
	}
}

// sweep does what is due.
func (o *Owner) sweep() {
	now := o.config.Now()
	o.storage.retry(now)
	if at := o.levelAt(); !at.IsZero() && !at.After(now) {
		o.leveling = true
		o.tasks.Go(func() { o.level(o.ctx) })
	}
	if o.sweepAt.IsZero() || o.sweepAt.After(now) {
		return
	}
	o.sweepAt = time.Time{}
	o.sweepSubscribers(now)
	o.sweepNames(now)
}

// checkReady says once that the owner may be relied upon.
func (o *Owner) checkReady() {
	if o.ready || !o.restored && !o.sources.synced() {
		return
	}
	o.ready = true
	close(o.readied)
}

// Ready is closed when every source has said everything, or when the state of
// an earlier run was loaded.
func (o *Owner) Ready() <-chan struct{} { return o.readied }

// SourceFailed notes why a source cannot say anything; nil takes it back.
func (o *Owner) SourceFailed(ctx context.Context, name string, why error) error {
	return o.loop.Do(ctx, opOther, func() { o.sources.failed(name, why) })
}
