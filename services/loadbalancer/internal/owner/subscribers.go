// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/stream"
)

// maxSubscribers bounds the subscribers that are known, connected or not.
const maxSubscribers = 32

// Subscription is a subscriber's request to connect.
type Subscription struct {
	Name     string
	Enforces bool
	// Incarnation and Seq identify the last barrier that the subscriber applied; zero: none.
	Incarnation [16]byte
	Seq         uint64
	// Capacity of the subscriber's maps; nil: not reported.
	Capacity *frontend.Capacity
}

// Subscribers manages the subscribers of frontends and their progress, and notifies callers of Wait and watchers of
// services. The exported methods may be called concurrently. Everything else belongs to the loop.
type Subscribers struct {
	loop        *loop.Loop
	log         *slog.Logger
	now         func() time.Time
	linger      time.Duration
	incarnation [16]byte
	index       *index
	sources     *sources
	places      *places // which the capacities of subscribers bound
	garbage     *garbage

	all      map[string]*stream.Subscriber
	sessions map[string]*Session // of connected subscribers
	session  uint64              // number of the last session
	seq      uint64              // number of the last barrier
	progress chan struct{}       // closed when a subscriber makes progress

	watch     *watch.Hub[service.Name, uint64] // of revisions
	unsettled map[service.Name]uint64          // services that watchers know as not enforced, with their revisions
	local     chan struct{}                    // has a token when Locals may have changed
}

// newSubscribers returns the subscribers of an owner that has all its other parts.
func newSubscribers(o *Owner) *Subscribers {
	return &Subscribers{
		loop: o.loop, log: o.config.Log, now: o.config.Now, linger: o.config.Linger, incarnation: o.incarnation,
		index: o.index, sources: o.sources, places: o.places, garbage: o.garbage,
		all: make(map[string]*stream.Subscriber), sessions: make(map[string]*Session), progress: make(chan struct{}),
		watch:     watch.NewHub[service.Name, uint64](watch.Options[uint64]{Pending: 2 * o.config.Limits.Services}),
		unsettled: make(map[service.Name]uint64), local: make(chan struct{}, 1),
	}
}

// close ends the watches.
func (s *Subscribers) close() { s.watch.Close() }

// sorted returns the subscribers by name.
func (s *Subscribers) sorted() []*stream.Subscriber {
	return slices.SortedFunc(maps.Values(s.all), func(a, b *stream.Subscriber) int { return cmp.Compare(a.Name, b.Name) })
}

// manyFrontends is the number of frontends from which sending all of them counts as leaving much garbage.
const manyFrontends = 256

// Subscribe connects a subscriber. The caller must close the session.
func (s *Subscribers) Subscribe(ctx context.Context, want Subscription) (*Session, error) {
	return loop.Ask(ctx, s.loop, opStream, func() (*Session, error) {
		x := s.all[want.Name]
		if x == nil {
			if len(s.all) >= maxSubscribers && !s.forgetOne() {
				return nil, fmt.Errorf("%w: %d subscribers are connected", failure.ErrLimit, len(s.all))
			}
			x = stream.New(want.Name)
			s.all[want.Name] = x
		} else if x.Session != 0 {
			s.end(x.Name, failure.ErrReplaced)
		}
		x.Enforces = want.Enforces
		s.places.connected(want)
		s.session++
		seq := want.Seq
		if want.Incarnation != s.incarnation {
			seq = 0
		}
		if !x.Connect(s.session, seq, newView(s)) && s.index.counts().frontends >= manyFrontends {
			s.garbage.add()
		}
		session := &Session{subscribers: s, name: want.Name, number: s.session, wake: x.Wake, ended: make(chan struct{})}
		s.sessions[want.Name] = session
		s.moved()
		return session, nil
	})
}

// sweep drops subscribers whose time to resume has passed.
func (s *Subscribers) sweep(now time.Time) {
	for name, x := range s.all {
		if x.Session == 0 && !x.Until.After(now) {
			s.drop(name)
			s.moved()
		}
	}
}

// drop forgets a subscriber and its capacity.
func (s *Subscribers) drop(name string) {
	delete(s.all, name)
	s.places.forget(name)
}

// forgetOne drops the subscriber that has been disconnected for the longest time.
func (s *Subscribers) forgetOne() bool {
	var oldest *stream.Subscriber
	for _, x := range s.all {
		if x.Session == 0 && (oldest == nil || x.Until.Before(oldest.Until)) {
			oldest = x
		}
	}
	if oldest != nil {
		s.drop(oldest.Name)
	}
	return oldest != nil
}

// end ends the session of a subscriber.
func (s *Subscribers) end(name string, why error) {
	session := s.sessions[name]
	if session == nil {
		return
	}
	delete(s.sessions, name)
	session.err = why
	close(session.ended)
}

// mark marks frontends as changed for all subscribers. Without keys, it only requests a barrier.
func (s *Subscribers) mark(keys []frontend.Key) {
	for name, x := range s.all {
		if err := x.Mark(keys); err != nil {
			s.end(name, err)
		}
	}
}

// moved wakes callers of Wait after the progress or the set of subscribers has changed, and
// notifies the watchers about services that are enforced now.
func (s *Subscribers) moved() {
	close(s.progress)
	s.progress = make(chan struct{})
	s.localChanged()
	for name, revision := range s.unsettled {
		if s.enforced(name, revision) {
			s.watch.Upsert(name, s.index.revision)
			delete(s.unsettled, name)
		}
	}
}

// localChanged reports that Locals may have changed.
func (s *Subscribers) localChanged() {
	select {
	case s.local <- struct{}{}:
	default:
	}
}

// changed notifies the watchers that a service has changed and is not enforced yet.
func (s *Subscribers) changed(name service.Name, revision uint64) {
	s.watch.Upsert(name, revision)
	s.unsettled[name] = revision
}

// refused notifies the watchers that a subscriber has refused a frontend of a service.
func (s *Subscribers) refused(j *joined) {
	s.watch.Upsert(j.name, s.index.revision)
	s.unsettled[j.name] = j.revision
	s.moved()
}

// gone notifies the watchers that a service was removed.
func (s *Subscribers) gone(name service.Name) {
	s.watch.Delete(name)
	delete(s.unsettled, name)
}

// Enforcement tells whether the enforcing subscribers enforce a service.
type Enforcement uint8

const (
	// EnforcementUnknown: no enforcing subscriber is connected, or one has not acknowledged anything yet. In the
	// meantime, the kernel keeps its state.
	EnforcementUnknown Enforcement = iota
	// NotEnforced: a subscriber has not applied the revision yet, or has refused a frontend of the service.
	NotEnforced
	// Enforced: at least one enforcing subscriber is connected, and all of them enforce the service.
	Enforced
)

// Waited is the result of Wait.
type Waited struct {
	Revision                uint64
	Disconnected, Enforcing []string
}

// Wait returns when every connected enforcing subscriber has acknowledged a revision as enforced and, if ended is
// set, also as ended. It returns ErrRefused if a subscriber has refused a frontend of one of the services in of, or
// of any service if of is empty.
func (s *Subscribers) Wait(ctx context.Context, revision uint64, of []service.Name, ended bool) (Waited, error) {
	for {
		type answer struct {
			out      Waited
			reached  bool
			progress <-chan struct{}
		}
		a, err := loop.Ask(ctx, s.loop, opRead, func() (answer, error) {
			out, reached, err := s.reached(revision, of, ended)
			return answer{out, reached, s.progress}, err
		})
		if err != nil || a.reached {
			return a.out, err
		}
		if err := s.loop.Wait(ctx, a.progress); err != nil {
			return Waited{}, err
		}
	}
}

func (s *Subscribers) reached(revision uint64, of []service.Name, ended bool) (Waited, bool, error) {
	if revision > s.index.revision {
		return Waited{}, false, fmt.Errorf("%w: %d, the current one is %d", failure.ErrRevision, revision, s.index.revision)
	}
	out := Waited{Revision: s.index.revision}
	waiting := false
	for _, x := range s.sorted() {
		if !x.Enforces {
			continue
		}
		if x.Session == 0 {
			out.Disconnected = append(out.Disconnected, x.Name)
			continue
		}
		p := x.Progress()
		for _, k := range slices.SortedFunc(maps.Keys(p.Refusals), compile.CompareKeys) {
			r := p.Refusals[k]
			if len(of) == 0 || slices.Contains(of, r.Service) {
				return Waited{}, false, fmt.Errorf("%w: %s has not applied %s of service %s: %s", failure.ErrRefused,
					x.Name, compile.KeyText(k), r.Service, r.Reason)
			}
		}
		out.Enforcing = append(out.Enforcing, x.Name)
		at := p.Enforced
		if ended {
			at = min(at, p.Ended)
		}
		waiting = waiting || at < revision
		out.Revision = min(out.Revision, at)
	}
	return out, !waiting, nil
}

// enforced reports whether at least one enforcing subscriber is connected, and all of these have applied a revision
// with all frontends of a service.
func (s *Subscribers) enforced(of service.Name, revision uint64) bool {
	some := false
	for _, x := range s.all {
		if !x.Enforces || x.Session == 0 {
			continue
		}
		if x.Progress().Enforced < revision || x.Refuses(of) {
			return false
		}
		some = true
	}
	return some
}

// enforcement returns the state of a revision of a service in the enforcing subscribers. It is unknown while a
// subscriber has begun a new stream and not acknowledged anything: the kernel still has its frontends, and all of
// them are sent again.
func (s *Subscribers) enforcement(of service.Name, revision uint64) Enforcement {
	some, unknown := false, false
	for _, x := range s.all {
		if !x.Enforces {
			continue
		}
		enforced := x.Progress().Enforced
		switch {
		case x.Session == 0 || enforced == 0:
			unknown = true
		case enforced < revision || x.Refuses(of):
			return NotEnforced
		}
		some = true
	}
	if unknown || !some {
		return EnforcementUnknown
	}
	return Enforced
}

// SubscriberStatus is the state of a subscriber.
type SubscriberStatus struct {
	Name                string
	Connected, Enforces bool
	Revision, Ended     uint64
	Refusals            []string // at most 100
	Omitted             int
	Waiting             int // keys that changed and are not sent
}

// status returns the states of the subscribers by name.
func (s *Subscribers) status() (out []SubscriberStatus) {
	for _, x := range s.sorted() {
		out = append(out, subscriberStatus(x))
	}
	return out
}

func subscriberStatus(s *stream.Subscriber) SubscriberStatus {
	p := s.Progress()
	out := SubscriberStatus{
		Name: s.Name, Connected: s.Session != 0, Enforces: s.Enforces, Revision: p.Enforced, Ended: p.Ended,
		Omitted: p.Omitted, Waiting: s.Waiting(),
	}
	for i, k := range slices.SortedFunc(maps.Keys(p.Refusals), compile.CompareKeys) {
		if i == 100 {
			out.Omitted += len(p.Refusals) - i
			break
		}
		out.Refusals = append(out.Refusals, fmt.Sprintf("%s of service %s: %s", compile.KeyText(k), p.Refusals[k].Service,
			p.Refusals[k].Reason))
	}
	return out
}
