// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/desired/problem"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/record"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// Subscribers connects the subscribers of tables, passes their interests to the engine, and waits for their progress.
// The exported methods may be called concurrently; all other methods and fields belong to the loop.
type Subscribers struct {
	loop      *loop.Loop
	log       *slog.Logger
	now       func() time.Time
	alarm     *alarm
	interests *interests
	compiler  *compiler
	publisher *publisher
	storage   *storage
	policies  *policySet
	sources   *sources
	problems  *problem.Set
}

// newSubscribers returns the subscribers of an owner whose other fields are set.
func newSubscribers(o *Owner) *Subscribers {
	return &Subscribers{
		loop: o.loop, log: o.config.Log, now: o.config.Now, alarm: o.alarm, interests: o.interests, compiler: o.compiler,
		publisher: o.publisher, storage: o.storage, policies: o.policies, sources: o.sources, problems: o.problems,
	}
}

// Subscribe connects a subscriber with exactly these interests. The caller must end the session with Unsubscribe.
func (s *Subscribers) Subscribe(ctx context.Context, want Subscription) (*stream.Session, error) {
	if err := s.loop.Wait(ctx, s.sources.gate.Opened()); err != nil {
		return nil, err
	}
	name := want.Name
	subjects := make(map[identity.Numeric]struct{}, len(want.Subjects))
	for _, x := range want.Subjects {
		subjects[x] = struct{}{}
	}
	for more := true; more; {
		var err error
		if more, err = loop.Ask(ctx, s.loop, opSubscribe, func() (bool, error) {
			one, err := s.connecting(&want)
			if err != nil {
				return false, err
			}
			return s.approach(one, subjects), nil
		}); err != nil {
			return nil, err
		}
	}
	return loop.Ask(ctx, s.loop, opSubscribe, func() (*stream.Session, error) {
		one, err := s.connecting(&want)
		if err != nil {
			return nil, err
		}
		remove, vacate := one.rest(want.Interest)
		s.interest(one, want.Subjects, remove, want.Locations, vacate)
		s.save(name, one)
		s.publisher.publish(s.policies, s.sources)
		session, _ := s.publisher.stream.Subscribe(stream.Subscriber{
			Name: name, Watches: !one.enforces, Incarnation: want.Incarnation, Seq: want.Seq,
		}, s.publisher.barrier, func() []policytable.Step {
			var all []policytable.Step
			s.compiler.engine.Snapshot(func(ev policytable.Step) { all = append(all, ev) })
			return all
		})
		one.session, one.until = session, time.Time{}
		return session, nil
	})
}

// connecting returns the record of the subscriber that connects.
func (s *Subscribers) connecting(want *Subscription) (*subscriber, error) {
	one, err := s.interests.connecting(want)
	if err == nil {
		s.alarm.set(one.until)
	}
	return one, err
}

// approach adds or removes one batch of the subjects that a subscriber wants, and reports whether there is more to do.
func (s *Subscribers) approach(one *subscriber, want map[identity.Numeric]struct{}) bool {
	add, remove := one.next(want)
	s.interest(one, add, remove, nil, nil)
	return len(add)+len(remove) > 0
}

// savePause is how long changes of a subscriber's interests are collected before they are stored. The delay saves
// writes, because a record contains all interests. It is safe, because the subscriber sends its interests again when it
// reconnects.
const savePause = time.Second

// save stores the interests of an enforcing subscriber.
func (s *Subscribers) save(name string, one *subscriber) {
	one.saveAt = time.Time{}
	if one.enforces {
		s.storage.save(record.Cache{Subscribers: []record.Subscriber{subscriberRecord(name, one)}})
	}
}

// Unsubscribe ends a session. The interests of an enforcing subscriber are kept for a while, so that it finds its
// tables when it reconnects; a watching subscriber is removed.
func (s *Subscribers) Unsubscribe(name string, session *stream.Session) {
	session.Close()
	// Ask fails only if the owner has ended; its result then does not matter.
	loop.Ask(context.Background(), s.loop, opOther, func() (struct{}, error) { //nolint:errcheck // above
		if one := s.interests.all[name]; one != nil && one.session == session {
			if s.interests.left(one) {
				s.forget(name, one)
			} else {
				s.alarm.set(one.until)
			}
		}
		return struct{}{}, nil
	})
}

// Change adds and removes interests of a connected subscriber. Removals are applied first.
func (s *Subscribers) Change(ctx context.Context, name string, session *stream.Session, add, remove Interest) error {
	_, err := loop.Ask(ctx, s.loop, opInterest, func() (struct{}, error) {
		one := s.interests.all[name]
		if one == nil || one.session != session {
			return struct{}{}, failure.ErrReplaced
		}
		if err := one.fits(add, remove); err != nil {
			return struct{}{}, err
		}
		s.interest(one, add.Subjects, remove.Subjects, add.Locations, remove.addrs())
		if one.saveAt.IsZero() {
			one.saveAt = s.now().Add(savePause)
			s.alarm.set(one.saveAt)
		}
		return struct{}{}, nil
	})
	return err
}

// interest changes the interests of a subscriber, and passes the resulting change of all subscribers' interests to the
// engine.
func (s *Subscribers) interest(one *subscriber, add, remove []identity.Numeric, locate []engine.Location, vacate []netip.Addr) {
	c := s.interests.change(one, add, remove, locate, vacate)
	if len(c.Locate)+len(c.Vacate) > 0 {
		s.publisher.barrier.Address++
	}
	s.problems.Note("locations", s.compiler.apply(c))
	s.compiler.addSubjects(add)
}

// Refuse records that a subscriber has refused a table. The subscriber enforces only a part of the table, or isolates
// the table's subject in that direction.
func (s *Subscribers) Refuse(ctx context.Context, session *stream.Session, subject identity.Numeric, table policytable.ID, reason string) error {
	err := s.loop.Do(ctx, opOther, func() {
		for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
			// The refusal of a table does not matter if no subject is bound to the table any more.
			if now, ok := s.compiler.engine.BoundID(subject, d); !ok || now != table || table == policytable.AllowAll {
				continue
			}
			r := stream.Refusal{Table: table, Revision: s.publisher.barrier.Policy, Reason: reason, Policy: s.compiler.engine.LargestShare(subject, d)}
			s.log.Error("a subscriber refused a table; it enforces a part of it or isolates the subject",
				"subject", uint32(subject), "direction", d.String(), "table", uint64(table), "reason", reason, "largest_share", r.Policy)
			session.Refuse(stream.Refused{Subject: subject, Direction: d}, r)
		}
	})
	return err
}

// saveAll stores the interests that have not been stored yet.
func (s *Subscribers) saveAll() {
	for name, one := range s.interests.all {
		if !one.saveAt.IsZero() {
			s.save(name, one)
		}
	}
}

// sweep stores changed interests, and removes subscribers that did not reconnect.
func (s *Subscribers) sweep(now time.Time) {
	for name, one := range s.interests.all {
		switch {
		case one.saveAt.IsZero():
		case one.saveAt.After(now):
			s.alarm.set(one.saveAt)
		default:
			s.save(name, one)
		}
		switch {
		case one.session != nil:
		case one.until.After(now):
			s.alarm.set(one.until)
		case s.approach(one, nil):
			s.alarm.set(now) // continue in the next turn, so that waiting calls are served before
		default:
			s.forget(name, one)
		}
	}
}

// forget removes a disconnected subscriber and its subjects.
func (s *Subscribers) forget(name string, one *subscriber) {
	subjects, places := slices.Sorted(maps.Keys(one.subjects)), slices.Collect(maps.Keys(one.locations))
	delete(s.interests.all, name)
	s.interest(one, nil, subjects, nil, places)
	s.publisher.stream.Forget(name)
	s.storage.save(record.Cache{GoneSubscribers: []string{name}})
}

// Wait returns when every connected enforcing subscriber that has one of the subjects enforces a policy revision.
// Without subjects, it waits for all enforcing subscribers.
func (s *Subscribers) Wait(ctx context.Context, revision uint64, subjects []identity.Numeric) (stream.Progress, error) {
	return s.await(ctx, subjects, func() (stream.Barrier, error) {
		if revision > s.publisher.barrier.Policy {
			return stream.Barrier{}, fmt.Errorf("%w: %d, the present revision is %d",
				failure.ErrRevision, revision, s.publisher.barrier.Policy)
		}
		return stream.Barrier{Policy: revision}, nil
	})
}

// await calls begin in a turn of the owner, and waits until the subscribers acknowledge the barrier that begin
// returns.
func (s *Subscribers) await(
	ctx context.Context, subjects []identity.Numeric, begin func() (stream.Barrier, error),
) (stream.Progress, error) {
	goal, err := loop.Ask(ctx, s.loop, opOther, func() (stream.Goal, error) {
		b, err := begin()
		if err != nil {
			return stream.Goal{}, err
		}
		return stream.Goal{Barrier: b, Current: s.publisher.barrier.Policy, Subjects: subjects, Who: s.interests.awaited(subjects)}, nil
	})
	if err != nil {
		return stream.Progress{}, err
	}
	for {
		states, changed := s.publisher.stream.States()
		if out, reached, err := goal.Reached(states); err != nil || reached {
			return out, err
		}
		if err := s.loop.Wait(ctx, changed); err != nil {
			return stream.Progress{}, err
		}
	}
}
