// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frontendstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/burst"
	"github.com/sluice-net/sluice/kit/desired/subscription"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// maxFrontends is the maximum number of frontends in one state: the size of both families' maps.
const maxFrontends = 1 << 17

// errProtocol is returned if the service violates the protocol of the stream.
var errProtocol = errors.New("loadbalancer: protocol violation")

// errRecovered ends a subscription, so that the next one can report that a refused frontend is now enforced.
var errRecovered = fmt.Errorf("refused frontends may be accepted now: %w", subscription.ErrAnew)

// Options are the options and dependencies of a Follower.
type Options struct {
	// Name is the name of the subscriber.
	Name    string
	Service Service
	Kernel  Kernel
	// Ender may be nil if no sockets are ended; then the follower only waits for a grace period.
	Ender Ender
	// Memory may be nil if the name of the state is not kept; then frontends of a previous process stay until every source
	// of the service has been listed.
	Memory Memory
	// Freed receives when a frontend that Kernel refused may be accepted now, if the reason was not lack of capacity;
	// nil: there is no such reason.
	Freed <-chan struct{}
	// Room receives when a frontend that Kernel refused for lack of capacity may fit now; nil: never.
	Room <-chan struct{}
	// Capacity of the kernel, which is reported to the service; zero: unknown.
	Capacity frontend.Capacity
	Log      *slog.Logger
}

// Follower maintains a subscription and keeps the kernel's frontends equal to the service's.
type Follower struct {
	o      Options
	synced chan struct{}

	// The following fields are used only by Run.
	incarnation string // of the last barrier that was applied; "": none
	seq         uint64
	owner       string // name of the state whose frontends the kernel has; "": unknown
	state       string // name of the last state that the service has sent to this process
	// earlier are frontends in the kernel from another state, which the current state has not sent.
	earlier map[frontend.Key]struct{}
	// waiting are frontends that were refused for lack of capacity.
	waiting map[frontend.Key]*frontend.Frontend
	unended bool // backends were removed, and sockets may still use them

	mu sync.Mutex
	st Status // guarded by mu
}

// Status is the state of a Follower.
type Status struct {
	// Connected: a subscription is open. Otherwise Err is the reason why not.
	Connected bool
	Err       error
	// Complete: the service has sent at least one complete state.
	Complete bool
	// Revision is the enforced revision of the services; 0: none in this process.
	Revision uint64
	// Ended is the revision whose removed backends are no longer used by any socket.
	Ended uint64
	// Earlier is the number of frontends that are kept although the service does not send them, until its sources have
	// been listed completely.
	Earlier int
	// Unsaved is the reason why the state's name is not on stable storage; "": it is.
	Unsaved string
	// Refusals are the frontends that are not enforced as the service sent them, with the reasons.
	Refusals map[frontend.Key]string
}

// Refused returns the refusals, one line each, sorted by key.
func (s Status) Refused() []string {
	lines := make([]string, 0, len(s.Refusals))
	for _, k := range slices.SortedFunc(maps.Keys(s.Refusals), frontend.Key.Compare) {
		lines = append(lines, fmt.Sprintf("%v: %s", k, s.Refusals[k]))
	}
	return lines
}

// New returns a Follower. It does nothing before Run.
func New(o Options) *Follower {
	return &Follower{
		o: o, synced: make(chan struct{}),
		earlier: map[frontend.Key]struct{}{}, waiting: map[frontend.Key]*frontend.Frontend{},
		unended: true, // a previous process may have left some
		st:      Status{Err: errors.New("loadbalancer: not connected yet"), Refusals: map[frontend.Key]string{}},
	}
}

// Synced is closed once the kernel has a complete state of the service.
func (f *Follower) Synced() <-chan struct{} { return f.synced }

// Status returns the current status.
func (f *Follower) Status() Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	st := f.st
	st.Refusals = maps.Clone(st.Refusals)
	return st
}

func (f *Follower) note(change func(*Status)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(&f.st)
}

// Run maintains a subscription and applies its changes until ctx ends.
func (f *Follower) Run(ctx context.Context) error {
	if f.o.Memory != nil {
		var err error
		if f.owner, err = f.o.Memory.Load(); err != nil {
			f.o.Log.Error("state of the frontends in the kernel unknown: "+
				"they are kept until sluice-loadbalancer has listed every source", log.Err(err))
		}
	}
	heard := false
	open := func(ctx context.Context) (err error) {
		heard, err = f.subscribe(ctx)
		return err
	}
	return subscription.Keep(ctx, open, func(err error) {
		was := false
		f.note(func(st *Status) { was, st.Connected, st.Err = st.Connected, false, err })
		if was || heard {
			f.o.Log.Warn("frontend subscription ended", log.Err(err))
		}
	})
}

// reset makes the next stream begin with a complete state.
func (f *Follower) reset() { f.incarnation, f.seq = "", 0 }

// ending waits, concurrently with all other work, until no socket uses removed backends. It covers all backends that
// were removed before it started.
type ending struct {
	done     chan error
	under    bool
	seq      uint64 // seq of the barrier that it acknowledges
	revision uint64
}

// session is the state of one stream.
type session struct {
	f      *Follower
	stream Stream
	sub    Subscription
	tx     *frontendtx.Transaction
	bad    map[frontend.Key]error // frontends that are invalid
	last   *frontend.Barrier      // last applied barrier of this stream; nil: none
	ended  uint64                 // seq
	ending ending
}

// subscribe runs one stream. heard reports whether anything was received.
func (f *Follower) subscribe(ctx context.Context) (heard bool, err error) {
	outer := ctx
	ctx, cancel := context.WithCancel(ctx)
	if f.unended {
		// On a resumed stream the service might send no barrier, and without one the end of the sockets cannot be
		// acknowledged.
		f.reset()
	}
	sub := Subscription{Name: f.o.Name, Incarnation: f.incarnation, Seq: f.seq, Capacity: f.o.Capacity}
	stream, err := f.o.Service.Subscribe(ctx, sub)
	if err != nil {
		cancel()
		return false, fmt.Errorf("%w: %w", subscription.ErrAbsent, err)
	}
	s := &session{
		f:      f,
		stream: stream,
		sub:    sub,
		tx:     &frontendtx.Transaction{},
		bad:    map[frontend.Key]error{},
		ending: ending{done: make(chan error, 1)},
	}
	messages, over := subscription.Receive(ctx, stream.Recv)
	defer func() {
		cancel()
		<-over
		if s.ending.under {
			<-s.ending.done
			f.unended = true // the end of the sockets was not acknowledged
		}
	}()
	// A resumed stream may have no message to send.
	settled := time.NewTimer(time.Second)
	defer settled.Stop()
	for {
		var err error
		select {
		case <-outer.Done():
			return heard, outer.Err()
		case <-settled.C:
			f.opened()
		case m := <-messages:
			if err = m.Err; err == nil {
				heard = true
				f.opened()
				err = s.take(ctx, m.Message)
			}
		case failed := <-s.ending.done:
			s.ending.under = false
			err = s.passed(ctx, failed)
		case <-f.o.Freed:
			f.reset()
			err = errRecovered
		case <-f.o.Room:
			err = f.retry(ctx)
		}
		if err != nil {
			return heard, err
		}
	}
}

// opened records that a subscription is open.
func (f *Follower) opened() {
	was := false
	f.note(func(st *Status) { was, st.Connected, st.Err = st.Connected, true, nil })
	if !was {
		f.o.Log.Info("frontend subscription open")
	}
}

// take collects steps, and applies them at each barrier.
func (s *session) take(ctx context.Context, steps []frontend.Step) error {
	for _, st := range steps {
		switch {
		case st.Upsert != nil:
			delete(s.bad, st.Upsert.Key)
			s.tx.Upsert(st.Upsert)
		case st.Remove != nil:
			delete(s.bad, *st.Remove)
			s.tx.Remove(*st.Remove)
		case st.Refuse != nil:
			s.bad[st.Refuse.Key] = st.Refuse.Err
		case st.Barrier != nil:
			if err := s.barrier(ctx, *st.Barrier); err != nil {
				return err
			}
		}
		if n := len(s.tx.Changes()) + len(s.bad); n > maxFrontends {
			s.f.reset()
			return fmt.Errorf("%w: %d frontends in one state, at most %d", errProtocol, n, maxFrontends)
		}
	}
	return nil
}

// check returns an error for a barrier that cannot follow the previous one.
func (s *session) check(b frontend.Barrier) error {
	switch {
	case b.Incarnation == "" || b.State == "":
		return fmt.Errorf("%w: a barrier without incarnation or state", errProtocol)
	case s.last == nil && !b.SnapshotComplete && (b.Incarnation != s.sub.Incarnation || b.Seq <= s.sub.Seq):
		return fmt.Errorf(
			"%w: barrier %d of %x cannot resume after %d of %x",
			errProtocol,
			b.Seq,
			b.Incarnation,
			s.sub.Seq,
			s.sub.Incarnation,
		)
	case s.last != nil && (b.Incarnation != s.last.Incarnation || b.Seq <= s.last.Seq):
		return fmt.Errorf(
			"%w: barrier %d of %x follows %d of %x",
			errProtocol,
			b.Seq,
			b.Incarnation,
			s.last.Seq,
			s.last.Incarnation,
		)
	case s.last != nil && b.SnapshotComplete:
		return fmt.Errorf("%w: barrier %d ends a second snapshot", errProtocol, b.Seq)
	case !b.SnapshotComplete && b.State != s.f.state:
		return fmt.Errorf("%w: new state %x without a snapshot", errProtocol, b.State)
	}
	return nil
}

// barrier applies the steps up to a barrier and acknowledges it.
func (s *session) barrier(ctx context.Context, b frontend.Barrier) error {
	f := s.f
	if err := s.check(b); err != nil {
		f.reset()
		return err
	}
	if len(s.tx.Changes()) >= burst.Large {
		burst.Begin()
	}
	tx, bad := s.tx, s.bad
	s.tx, s.bad = &frontendtx.Transaction{}, map[frontend.Key]error{}
	named, err := f.complete(tx, bad, b)
	if err != nil {
		f.reset()
		return err
	}
	res, err := f.o.Kernel.Apply(ctx, tx)
	if err != nil {
		f.reset() // unwritten frontends are sent again
		return fmt.Errorf("write frontends: %w", err)
	}
	if b.SnapshotComplete {
		clear(f.waiting)
	}
	for k := range named {
		delete(f.waiting, k)
	}
	refused := res.Refused
	for k, err := range bad {
		refused = append(refused, frontend.Refusal{Key: k, Err: err})
	}
	frontendtx.SortRefusals(refused)
	f.keepWaiting(tx, res.Refused)
	f.incarnation, f.seq, s.last = b.Incarnation, b.Seq, &b
	f.note(func(st *Status) {
		if b.SnapshotComplete {
			clear(st.Refusals)
		}
		for k := range named {
			delete(st.Refusals, k)
		}
		for _, r := range refused {
			st.Refusals[r.Key] = r.Err.Error()
		}
		st.Revision, st.Complete, st.Earlier = b.Revision, true, len(f.earlier)
	})
	f.remember()
	if b.SnapshotComplete {
		select {
		case <-f.synced:
		default:
			close(f.synced)
			f.o.Log.Info("frontends enforced", "revision", b.Revision, "refused", len(refused))
		}
	}
	for _, r := range refused {
		if err := s.stream.Refuse(r.Key, r.Err.Error()); err != nil {
			return err
		}
	}
	if res.Changed > 0 {
		f.unended = true
	}
	if f.unended || s.ending.under {
		if err := s.stream.Ack(b.Seq, s.ended); err != nil {
			return err
		}
		s.end(ctx)
		return nil
	}
	return s.acknowledge(b.Seq, b.Revision)
}

// complete adds the effects of the barrier on frontends that the transaction does not contain, and returns the
// frontends that it contains.
func (f *Follower) complete(
	tx *frontendtx.Transaction,
	bad map[frontend.Key]error,
	b frontend.Barrier,
) (map[frontend.Key]struct{}, error) {
	var keys, there []frontend.Key
	if b.SnapshotComplete || len(bad) > 0 {
		var err error
		if there, err = f.o.Kernel.Keys(); err != nil {
			return nil, err
		}
	}
	if b.SnapshotComplete {
		keys = there
	}
	if b.State != f.state {
		clear(f.earlier)
		if b.State != f.owner {
			for _, k := range keys {
				f.earlier[k] = struct{}{}
			}
		}
		f.state = b.State
	}
	named := make(map[frontend.Key]struct{}, len(tx.Changes())+len(bad))
	for _, c := range tx.Changes() {
		named[c.Key] = struct{}{}
	}
	for _, k := range there {
		if _, ok := bad[k]; ok {
			// Some of its backends may have been removed, and the remaining ones cannot be decoded.
			tx.Upsert(frontendtx.Closed(k))
		}
	}
	for k := range bad {
		named[k] = struct{}{}
	}
	for k := range named {
		delete(f.earlier, k)
	}
	for _, k := range keys {
		_, earlier := f.earlier[k]
		if _, ok := named[k]; !ok && !earlier {
			tx.Remove(k)
		}
	}
	if b.SourcesComplete {
		for k := range f.earlier {
			tx.Remove(k)
		}
		clear(f.earlier)
	}
	return named, nil
}

// remember saves which state the kernel's frontends belong to.
func (f *Follower) remember() {
	if len(f.earlier) > 0 || f.owner == f.state {
		return
	}
	text := ""
	if f.o.Memory != nil {
		if err := f.o.Memory.Save(f.state); err != nil {
			f.o.Log.Error("cannot save the state name of the frontends", log.Err(err))
			text = fmt.Sprintf("the state name of the frontends could not be saved: %v", err)
		}
	}
	if text == "" {
		f.owner = f.state
	}
	f.note(func(st *Status) { st.Unsaved = text })
}

// keepWaiting keeps the changes that were refused for lack of capacity.
func (f *Follower) keepWaiting(tx *frontendtx.Transaction, refused []frontend.Refusal) {
	if len(refused) == 0 {
		return
	}
	short := map[frontend.Key]bool{}
	for _, r := range refused {
		var room *frontendtx.NoRoomError
		short[r.Key] = errors.As(r.Err, &room)
	}
	for _, c := range tx.Changes() {
		if c.Frontend != nil && short[c.Key] {
			f.waiting[c.Key] = c.Frontend
		}
	}
}

// end starts waiting for the sockets. If a wait is already running, the next one starts after it.
func (s *session) end(ctx context.Context) {
	if s.ending.under {
		return
	}
	f := s.f
	f.unended = false // covers removals until now
	s.ending.under, s.ending.seq, s.ending.revision = true, s.last.Seq, s.last.Revision
	go func() { s.ending.done <- f.endSockets(ctx) }()
}

// endSockets returns when no socket uses the backends that were removed before.
func (f *Follower) endSockets(ctx context.Context) error {
	if err := f.o.Kernel.Barrier(ctx); err != nil {
		return err
	}
	if f.o.Ender == nil {
		return nil
	}
	return f.o.Ender.End(ctx)
}

// endAgain is the pause before a failed attempt to end sockets is repeated.
const endAgain = time.Second

// passed acknowledges the end of sockets, or retries it.
func (s *session) passed(ctx context.Context, failed error) error {
	f := s.f
	if failed != nil {
		f.unended = true
		if ctx.Err() != nil {
			return ctx.Err()
		}
		f.o.Log.Error("cannot terminate the sockets of removed backends; retrying", log.Err(failed))
		s.ending.under = true
		go func() {
			select {
			case <-time.After(endAgain):
			case <-ctx.Done():
			}
			s.ending.done <- f.endSockets(ctx)
		}()
		return nil
	}
	if err := s.acknowledge(s.ending.seq, s.ending.revision); err != nil {
		f.unended = true
		return err
	}
	if f.unended {
		s.end(ctx)
	} else if s.ended < s.last.Seq {
		if err := s.acknowledge(s.last.Seq, s.last.Revision); err != nil {
			return err
		}
	}
	return f.retry(ctx)
}

// acknowledge reports that no socket uses backends removed up to a barrier.
func (s *session) acknowledge(seq, revision uint64) error {
	s.ended = seq
	s.f.note(func(st *Status) { st.Ended = revision })
	return s.stream.Ack(s.last.Seq, seq)
}

// retry applies the frontends that were refused for lack of capacity.
func (f *Follower) retry(ctx context.Context) error {
	if len(f.waiting) == 0 {
		return nil
	}
	tx := &frontendtx.Transaction{}
	for _, k := range slices.SortedFunc(maps.Keys(f.waiting), frontend.Key.Compare) {
		tx.Upsert(f.waiting[k])
	}
	res, err := f.o.Kernel.Apply(ctx, tx)
	if err == nil && res.Changed > 0 {
		err = errRecovered
	}
	if err != nil {
		f.unended = true
		f.reset()
	}
	return err
}
