// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package node is the policy of one node: which policies there are and who
// brought them, which identities are known, who subscribed to which tables,
// and the engine that compiles them.
//
// A Node is owned by the one goroutine that Run is. Calls from elsewhere are
// handed to it and wait for their turn; a caller whose context ends stops
// waiting. What a change answers is on stable storage, in the engine and in
// the log of the table stream, in that order of reading and in the reverse
// order of undoing.
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/identity"
	"github.com/sluice-net/sluice/services/policy/internal/journal"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// What callers branch on.
var (
	// ErrNotFound: the identity is not known.
	ErrNotFound = errors.New("not found")
	// ErrOwned: another source or manager has the policy.
	ErrOwned = errors.New("another source has the policy")
	// ErrForeign: the policy is not the caller's to delete.
	ErrForeign = errors.New("the policy belongs to another source")
	// ErrChanged: the state is not the one that the caller decided by.
	ErrChanged = errors.New("the state has changed")
	// ErrLimit: something has no room. Everything is as it was.
	ErrLimit = errors.New("no room")
	// ErrRevision: there is no such revision yet.
	ErrRevision = errors.New("no such revision yet")
	// ErrHeld: a subscriber goes on enforcing an earlier state.
	ErrHeld = errors.New("an earlier state stays enforced")
	// ErrRefused: a subscriber does not enforce what was asked about.
	ErrRefused = errors.New("refused by a subscriber")
	// ErrStorage: stable storage did not take a change, which was undone.
	ErrStorage = errors.New("storage")
	// ErrInvalid: an argument makes no sense, whatever the state.
	ErrInvalid = errors.New("invalid")
)

// Points at which a test may kill the process.
var (
	beforeCompile = fault.Register("policy/change/before-compile")
	beforeJournal = fault.Register("policy/change/before-journal")
	beforeAnswer  = fault.Register("policy/change/before-answer")
)

// Names of the sources.
const (
	SourceGRPC     = "grpc"
	SourceFile     = "file"
	SourceIdentity = "identity"
	// SourceKubernetes lists objects of an API server, one in each File.
	SourceKubernetes = "kubernetes"
)

// Config is fixed for the life of a node.
type Config struct {
	Engine engine.Config // without Events
	Rules  rule.Options

	MaxPolicies      int // that are kept
	MaxManifestBytes int // of all policies together
	MaxNames         int // DNS names that are remembered
	MaxAddresses     int // learned for all names together
	// NameGrace is how long an address stays after its time, for connections
	// that still use it.
	NameGrace time.Duration
	// Linger is how long subjects stay after their subscriber has gone.
	Linger time.Duration

	Stream stream.Limits
	Log    *slog.Logger
	Now    func() time.Time
	// Processor is the processor time of the thread that Run is locked to, for
	// Busy; nil: that is not measured.
	Processor func() time.Duration
}

// source is what the node knows of one.
type source struct {
	synced  bool
	err     string
	refused map[string]refused // by origin
}

// refused is a file or object that was not taken over.
type refused struct {
	key policy.Key // zero if it is not known
	err string
}

// subscriber is one that is connected, or was lately.
type subscriber struct {
	subjects  map[identity.Numeric]struct{}
	locations map[netip.Addr]identity.Numeric
	enforces  bool            // else it watches
	session   *stream.Session // nil while it is away
	until     time.Time       // when it is forgotten; while it is away
}

// Node is the owner of all state.
type Node struct {
	config  Config
	engine  *engine.Engine
	stream  *stream.Log
	journal *journal.Journal
	calls   chan func()
	done    chan struct{} // closed when Run has returned
	// questions has one place, for the question that compiles beside the engine.
	questions chan struct{}
	// preparing has one place, for the change whose tables are compiled.
	preparing chan struct{}
	ctx       context.Context

	barrier   stream.Barrier // revisions now
	published stream.Barrier
	pending   []engine.Event

	policies    map[policy.Key]*Policy
	bytes       int // of all manifests
	sources     map[string]*source
	managers    map[string]bool // those of SourceGRPC that completed in this run
	identities  map[identity.Numeric]identity.Identity
	subscribers map[string]*subscriber
	names       map[string]map[netip.Addr]time.Time // until when each is valid
	ending      agenda                              // names by the time of the address that ends first
	ended       agenda                              // names by the time of the address that ends last
	addresses   int
	crowded     map[identity.Numeric]error // subjects without room for their tables
	problems    map[string]string
	sweepAt     time.Time
	retryAt     time.Time // when to write the state again; zero if all is written
	restored    bool      // there was state of this boot

	stateID      stream.StateID
	confirmed    bool   // by an operator, in this run
	stateChanged bool   // which sources are complete, or confirmed
	stateOf      uint64 // policy revision that barrier.State was made of

	ready   bool
	readied chan struct{} // closed once ready
	fatal   error

	busy      map[string]*Busy
	operation string // that the owner is busy with
	compiled  int    // tables, before it
}

// New takes the state of dir and compiles it. The sources are those of the
// configuration; each has to say everything once.
func New(config Config, dir string, sources []string) (*Node, error) {
	if config.Now == nil {
		config.Now = time.Now
	}
	n := &Node{
		config: config, stream: stream.NewLog(config.Stream), calls: make(chan func(), 64), done: make(chan struct{}), ctx: context.Background(),
		questions: make(chan struct{}, 1), preparing: make(chan struct{}, 1),
		policies: make(map[policy.Key]*Policy), sources: map[string]*source{SourceGRPC: {synced: true}}, managers: make(map[string]bool),
		identities: make(map[identity.Numeric]identity.Identity), subscribers: make(map[string]*subscriber),
		names: make(map[string]map[netip.Addr]time.Time), crowded: make(map[identity.Numeric]error),
		problems: make(map[string]string), readied: make(chan struct{}), busy: make(map[string]*Busy),
	}
	for _, s := range sources {
		n.sources[s] = &source{refused: make(map[string]refused)}
	}
	config.Engine.Events = func(ev engine.Event) { n.pending = append(n.pending, ev) }
	n.engine = engine.New(config.Engine)
	if err := n.restore(dir); err != nil {
		return nil, err
	}
	n.stateChanged = true
	n.publish()
	n.checkReady()
	return n, nil
}

// Close gives the state directory back. Run must have returned.
func (n *Node) Close() error { return n.journal.Close() }

// Run owns the node until the context ends.
func (n *Node) Run(ctx context.Context) error {
	defer close(n.done)
	n.ctx = ctx
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for n.fatal == nil {
		timer.Reset(n.pause())
		var t turn
		select {
		case f := <-n.calls:
			t, n.operation = n.begin(), opOther // f says which
			f()
		case <-timer.C:
			t, n.operation = n.begin(), opSweep
			n.sweep()
		case <-ctx.Done():
			return nil
		}
		n.publish()
		n.checkReady()
		n.spent(t)
	}
	return n.fatal
}

// pause is the time until something has to be done without being asked.
func (n *Node) pause() time.Duration {
	next := time.Hour
	for _, at := range []time.Time{n.retryAt, n.sweepAt} {
		if !at.IsZero() {
			next = min(next, max(0, at.Sub(n.config.Now())))
		}
	}
	return next
}

// ErrStopped: the node is not running any more.
var ErrStopped = errors.New("the service is going down")

// ask runs f as the owner and waits for its answer.
func ask[T any](ctx context.Context, n *Node, f func() (T, error)) (T, error) {
	type answer struct {
		v   T
		err error
	}
	var none T
	out := make(chan answer, 1)
	call := func() {
		if err := ctx.Err(); err != nil { // nobody waits any more
			out <- answer{err: err}
			return
		}
		v, err := f()
		n.publish()
		out <- answer{v, err}
	}
	select {
	case n.calls <- call:
	case <-ctx.Done():
		return none, ctx.Err()
	case <-n.done:
		return none, ErrStopped
	}
	select {
	case a := <-out:
		return a.v, a.err
	case <-ctx.Done():
		return none, ctx.Err()
	case <-n.done:
		return none, ErrStopped
	}
}

// publish puts what the engine did into the stream.
func (n *Node) publish() {
	n.refreshState()
	if len(n.pending) == 0 && n.barrier == n.published {
		return
	}
	n.stream.Append(n.pending, n.barrier)
	n.pending, n.published = nil, n.barrier
}

// apply gives a change to the engine. What it refuses has no room.
func (n *Node) apply(c engine.Change) error {
	err := n.engine.Apply(c)
	n.problem("relabelled subjects", n.engine.Stuck())
	if err != nil {
		return fmt.Errorf("%w: %w", ErrLimit, err)
	}
	return nil
}

// retryStorage is how long the node waits before it tries the disk again.
const retryStorage = time.Second

// save writes a change that no caller waits for. What cannot be written now is
// written as soon as that works.
func (n *Node) save(c journal.Change) { n.stored(n.journal.Note(n.ctx, c)) }

// commit writes a change that has to be on the disk before it is answered.
func (n *Node) commit(c journal.Change) error {
	t := n.begin()
	err := n.journal.Commit(n.ctx, c)
	n.took(opCommit, t)
	if err != nil {
		n.stored(err)
		return fmt.Errorf("%w: %w", ErrStorage, err)
	}
	n.stored(nil)
	return nil
}

// stored notes how a write of the state went, and whether another one still has
// to be tried again.
func (n *Node) stored(err error) {
	if p := n.journal.Problem(); p != nil {
		err = p
	}
	n.retryAt = time.Time{}
	if err != nil {
		n.retryAt = n.config.Now().Add(retryStorage)
	}
	n.problem("storage", err)
	if errors.Is(err, journal.ErrLost) {
		n.fatal = err
	}
}

// problem notes what is wrong, for the status and, when it is news, the log;
// nil takes it back.
func (n *Node) problem(what string, err error) {
	if err == nil {
		delete(n.problems, what)
		return
	}
	text := err.Error()
	if n.problems[what] == text {
		return
	}
	n.problems[what] = text
	n.config.Log.Error("policy is not as it should be", "part", what, log.Err(err))
}

// wakeAt makes sure that sweep runs then.
func (n *Node) wakeAt(t time.Time) {
	if n.sweepAt.IsZero() || t.Before(n.sweepAt) {
		n.sweepAt = t
	}
}

// sweep does what is due.
func (n *Node) sweep() {
	now := n.config.Now()
	if !n.retryAt.IsZero() && !n.retryAt.After(now) {
		n.stored(n.journal.Flush())
	}
	if n.sweepAt.IsZero() || n.sweepAt.After(now) {
		return
	}
	n.sweepAt = time.Time{}
	n.sweepSubscribers(now)
	n.sweepNames(now)
}

// checkReady says once that the node may be relied upon.
func (n *Node) checkReady() {
	if n.ready {
		return
	}
	for _, s := range n.sources {
		if !s.synced && !n.restored {
			return
		}
	}
	n.ready = true
	close(n.readied)
}

// Ready is closed when every source has said everything, or when the state of
// an earlier run was loaded.
func (n *Node) Ready() <-chan struct{} { return n.readied }

// SourceFailed notes why a source cannot say anything; nil takes it back.
func (n *Node) SourceFailed(ctx context.Context, name string, why error) error {
	_, err := ask(ctx, n, func() (struct{}, error) {
		s := n.sources[name]
		s.err = ""
		if why != nil {
			s.err = why.Error()
		}
		return struct{}{}, nil
	})
	return err
}
