// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package owner holds the policy state of one node: the policies and their sources, the known identities, the
// subscribers and their tables, and the engine that compiles them.
//
// All state belongs to the single goroutine of Run. Calls from other goroutines are passed to it and wait for their
// turn; a caller whose context ends stops waiting. A change is written to stable storage, then applied to the engine,
// then appended to the log of the table stream. After that, the caller receives the answer. A change that fails is
// undone in the reverse order.
//
// Owner contains the loop and the engine, and every change of policies passes through it. The types that hold the state
// do not call Owner:
//
//   - forms converts documents to policies, and policySet holds the policies;
//   - places tracks how much each policy uses of the limits that tenants share;
//   - sources tracks which sources are complete, and comparison computes the changes of a listing;
//   - interests, identities and names.Table hold the other inputs of compilation, and compiler passes their changes to
//     the engine. Subscribers, IdentityFeed and Names contain the methods that change them;
//   - publisher holds the state for subscribers; storage tracks the state of the disk;
//   - Reader answers questions about all of them.
//
// Changes of policies reach Owner through Feed, Objects and the calls of managers.
package owner

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/desired/problem"
	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kube/tenants"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/names"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// Fault points at which a test may kill the process.
var (
	beforeCompile = fault.Register("policy/change/before-compile")
	beforeJournal = fault.Register("policy/change/before-journal")
	beforeAnswer  = fault.Register("policy/change/before-answer")
)

// Config is fixed for the lifetime of an owner.
type Config struct {
	Engine engine.Config // Events must not be set
	Rules  rule.Options

	// MaxPolicies is the number of policies that are enforced as written, and MaxManifestBytes is the total size of
	// their manifests. Tenants share both limits.
	MaxPolicies      int
	MaxManifestBytes int
	// Tenants maps namespaces to tenants; nil: each namespace is a tenant.
	Tenants *tenants.Set

	MaxNames     int // maximum number of DNS names
	MaxAddresses int // maximum number of addresses of all names together
	// NameGrace is how long an address is kept after its TTL, for connections that still use it.
	NameGrace time.Duration
	// Linger is how long the subjects of a subscriber are kept after it has disconnected.
	Linger time.Duration

	Stream stream.Limits
	Log    *slog.Logger
	Now    func() time.Time
	// Directory is the directory from which policy files are read. Unless it is "", subscribers wait until its
	// policies have been read once.
	Directory string
	// Managers are the managers that must complete once before subscribers are served.
	Managers []string
	// Processor returns the CPU time of the thread that Run is locked to; nil if CPU time is not measured.
	Processor func() time.Duration
}

// Owner owns all policy state.
type Owner struct {
	config  Config
	engine  *engine.Engine
	storage *storage
	loop    *loop.Loop
	// revising serialises changes of policies, which may take several turns.
	revising *loop.Lock
	ctx      context.Context

	publisher *publisher

	forms    *forms
	policies *policySet
	places   *places

	onAgain     atomic.Pointer[func(kind string)]
	tenants     chan struct{}  // contains a token when the tenants of namespaces may have changed
	leveling    bool           // a division of the limits is in progress
	leveled     chan struct{}  // closed and replaced after each division
	tasks       sync.WaitGroup // goroutines that Run has started
	sources     *sources
	identities  *identities
	interests   *interests
	compiler    *compiler
	subscribers *Subscribers
	names       *Names
	feed        *IdentityFeed
	reader      *Reader
	ruleSets    *ruleSets
	problems    *problem.Set
	alarm       *alarm // when to sweep
	fatal       error
}

// New loads the state from dir and compiles it. sources are the names of the configured sources, each of which must
// complete once before subscribers are served.
func New(config Config, dir string, sources []string) (*Owner, error) {
	if config.Now == nil {
		config.Now = time.Now
	}
	if config.Tenants == nil {
		config.Tenants = withoutTenants()
	}
	o := &Owner{
		config: config, publisher: newPublisher(config.Stream), ctx: context.Background(),
		policies:  newPolicySet(),
		interests: newInterests(config.Linger, config.Now), alarm: &alarm{},
		tenants: make(chan struct{}, 1), leveled: make(chan struct{}),
		problems: problem.New(func(part string, err error) {
			config.Log.Error("problem in the policy service", "part", part, log.Err(err))
		}),
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
	var err error
	if o.ruleSets, err = newRuleSets(&config, dir, o.problems); err != nil {
		return nil, err
	}
	config.Engine.RuleSets = o.ruleSets.registry
	o.engine = engine.New(config.Engine)
	o.compiler = &compiler{engine: o.engine, problems: o.problems, identities: o.identities, interests: o.interests}
	o.loop = loop.New(loop.Options{
		After: func() { // runs before the caller of a turn receives the answer
			o.publish()
			o.checkReady()
		},
		Processor: config.Processor, Done: func() int { return o.engine.Counters().Tables },
	})
	o.revising = o.loop.NewLock()
	filter, err := loadFilter(dir, config.Log)
	if err != nil {
		return nil, err
	}
	o.forms = newForms(config.Rules, config.Now, filter)
	o.places = newPlaces(&config, o.forms, o.policies)
	table := names.New(names.Limits{Names: config.MaxNames, Addresses: config.MaxAddresses, Grace: config.NameGrace})
	restored, err := o.restore(dir, table)
	if err != nil {
		return nil, err
	}
	brought := make(map[string]bool)
	for _, p := range o.policies.all {
		brought[p.Source] = true
	}
	if o.sources, err = newSources(sourcesConfig{
		names: sources, directory: config.Directory, managers: config.Managers, dir: dir, state: o.publisher.stateID,
		restored: restored, now: config.Now, log: config.Log,
	}, brought, o.problems); err != nil {
		return nil, errors.Join(err, o.storage.journal.Close())
	}
	o.subscribers = newSubscribers(o)
	o.names = newNames(o, table)
	o.feed = newIdentityFeed(o, dir)
	o.reader = newReader(o)
	o.publish()
	o.checkReady()
	return o, nil
}

// checkReady serves subscribers and readers of rule sets once every source is complete.
func (o *Owner) checkReady() {
	if o.sources.checkReady(); o.sources.ready {
		o.ruleSets.hub.Loaded()
	}
}

// RuleSets returns the rule sets, for readers of other goroutines.
func (o *Owner) RuleSets() *RuleSets { return o.ruleSets.hub }

// AcceptWithout makes subscribers stop waiting for a policy file that could never be read, and records that decision.
// With validateOnly it changes nothing.
func (o *Owner) AcceptWithout(ctx context.Context, name string, validateOnly bool) (Acceptance, error) {
	return loop.Ask(ctx, o.loop, opOther, func() (Acceptance, error) {
		return o.sources.acceptWithout(name, validateOnly)
	})
}

// Close releases the state directory. Run must have returned.
func (o *Owner) Close() error { return errors.Join(o.storage.journal.Close(), o.ruleSets.file.Close()) }

// Run is the loop that owns the state. It runs until ctx ends.
func (o *Owner) Run(ctx context.Context) error {
	defer o.tasks.Wait()
	defer o.ruleSets.hub.Close()
	o.ctx, o.storage.ctx = ctx, ctx
	return o.loop.Run(ctx, loop.Work{
		Pause: o.pause, Sweep: o.sweep, SweepAs: opSweep,
		Wake: o.tenants, Woken: o.assign, WokenAs: opLevel,
		Fatal: func() error { return cmp.Or(o.fatal, o.storage.lost) },
		Stop:  o.subscribers.saveAll,
	})
}

// pause returns the time until the next scheduled work.
func (o *Owner) pause() time.Duration {
	next := time.Hour
	for _, at := range []time.Time{o.storage.retryAt, o.alarm.at, o.levelAt()} {
		if !at.IsZero() {
			next = min(next, max(0, at.Sub(o.config.Now())))
		}
	}
	return next
}

// publish stores the numbers of rule sets, and appends the steps of the engine to the stream.
func (o *Owner) publish() {
	if patterns, fits, changed := o.engine.WantedNames(layer7.MaxEntries); changed {
		o.ruleSets.want(patterns, !fits)
	}
	o.ruleSets.publish(o.publisher.barrier.Policy, o.interests.enforced())
	o.alarm.set(o.ruleSets.next())
	o.publisher.publish(o.policies, o.sources)
}

// sweep does all timed work that is due.
func (o *Owner) sweep() {
	now := o.config.Now()
	o.storage.retry(now)
	if at := o.levelAt(); !at.IsZero() && !at.After(now) {
		o.leveling = true
		o.tasks.Go(func() { o.level(o.ctx) })
	}
	if !o.alarm.due(now) {
		return
	}
	o.subscribers.sweep(now)
	o.names.sweep(now)
	o.ruleSets.sweep(now, o.engine)
}

// Ready returns a channel that is closed once every source is complete, or immediately if the state of an earlier run
// was loaded.
func (o *Owner) Ready() <-chan struct{} { return o.sources.readied }

// Incarnation identifies this run.
func (o *Owner) Incarnation() [16]byte { return o.publisher.stream.Incarnation() }

// Reader returns the reader of the policies and their tables.
func (o *Owner) Reader() *Reader { return o.reader }

// Subscribers returns the subscribers of tables.
func (o *Owner) Subscribers() *Subscribers { return o.subscribers }

// Names returns the learned DNS names.
func (o *Owner) Names() *Names { return o.names }

// Identities returns the receiver of the identity service's data.
func (o *Owner) Identities() *IdentityFeed { return o.feed }
