// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/record"
	"github.com/sluice-net/sluice/services/policy/internal/source"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// Subscribe connects a subscriber with exactly these interests. The caller must end the session with Unsubscribe.
func (o *Owner) Subscribe(ctx context.Context, want Subscription) (*stream.Session, error) {
	if err := o.loop.Wait(ctx, o.sources.gate.Opened()); err != nil {
		return nil, err
	}
	name := want.Name
	subjects := make(map[identity.Numeric]struct{}, len(want.Subjects))
	for _, x := range want.Subjects {
		subjects[x] = struct{}{}
	}
	for more := true; more; {
		var err error
		if more, err = loop.Ask(ctx, o.loop, opSubscribe, func() (bool, error) {
			s, err := o.connecting(&want)
			if err != nil {
				return false, err
			}
			return o.approach(s, subjects), nil
		}); err != nil {
			return nil, err
		}
	}
	return loop.Ask(ctx, o.loop, opSubscribe, func() (*stream.Session, error) {
		s, err := o.connecting(&want)
		if err != nil {
			return nil, err
		}
		remove, vacate := s.rest(want.Interest)
		o.interest(s, want.Subjects, remove, want.Locations, vacate)
		o.saveSubscriber(name, s)
		o.publish()
		session, _ := o.publisher.stream.Subscribe(stream.Subscriber{
			Name: name, Watches: !s.enforces, Incarnation: want.Incarnation, Seq: want.Seq,
		}, o.publisher.barrier, func() []policytable.Step {
			var all []policytable.Step
			o.engine.Snapshot(func(ev policytable.Step) { all = append(all, ev) })
			return all
		})
		s.session, s.until = session, time.Time{}
		return session, nil
	})
}

// connecting returns the subscriber that connects.
func (o *Owner) connecting(want *Subscription) (*subscriber, error) {
	s, err := o.subscribers.connecting(want)
	if err == nil {
		o.wakeAt(s.until)
	}
	return s, err
}

// approach adds and removes some of the subjects that a subscriber wants, and reports whether more are left.
func (o *Owner) approach(s *subscriber, want map[identity.Numeric]struct{}) bool {
	add, remove := s.next(want)
	o.interest(s, add, remove, nil, nil)
	return len(add)+len(remove) > 0
}

// savePause is the time for which changes of a subscriber's interests are collected before they are stored. A record
// holds all interests, and the subscriber sends missing ones when it reconnects.
const savePause = time.Second

// saveSubscriber stores the interests of an enforcing subscriber.
func (o *Owner) saveSubscriber(name string, s *subscriber) {
	s.saveAt = time.Time{}
	if s.enforces {
		o.storage.save(o.ctx, record.Cache{Subscribers: []record.Subscriber{subscriberRecord(name, s)}})
	}
}

// Unsubscribe ends a session. The interests of an enforcing subscriber are kept for a while, so that it finds its
// tables when it reconnects; a watching subscriber is removed.
func (o *Owner) Unsubscribe(name string, session *stream.Session) {
	session.Close()
	// Ask fails only if the owner has ended, and then the result no longer matters.
	loop.Ask(context.Background(), o.loop, opOther, func() (struct{}, error) { //nolint:errcheck // above
		if s := o.subscribers.all[name]; s != nil && s.session == session {
			if o.subscribers.left(s) {
				o.forgetSubscriber(name, s)
			} else {
				o.wakeAt(s.until)
			}
		}
		return struct{}{}, nil
	})
}

// Change adds and removes interests of a connected subscriber. Removals come first.
func (o *Owner) Change(ctx context.Context, name string, session *stream.Session, add, remove Interest) error {
	_, err := loop.Ask(ctx, o.loop, opInterest, func() (struct{}, error) {
		s := o.subscribers.all[name]
		if s == nil || s.session != session {
			return struct{}{}, failure.ErrReplaced
		}
		if err := s.fits(add, remove); err != nil {
			return struct{}{}, err
		}
		o.interest(s, add.Subjects, remove.Subjects, add.Locations, remove.addrs())
		if s.saveAt.IsZero() {
			s.saveAt = o.config.Now().Add(savePause)
			o.wakeAt(s.saveAt)
		}
		return struct{}{}, nil
	})
	return err
}

// interest changes the interests of a subscriber, and passes the resulting change for all subscribers to the engine.
func (o *Owner) interest(s *subscriber, add, remove []identity.Numeric, locate []engine.Location, vacate []netip.Addr) {
	c := o.subscribers.change(s, add, remove, locate, vacate)
	if len(c.Locate)+len(c.Vacate) > 0 {
		o.publisher.barrier.Address++
	}
	o.problems.Note("locations", o.apply(c))
	o.addSubjects(add)
}

// addSubjects compiles subjects whose identities are known. A table that is too large gets the rules that fit.
func (o *Owner) addSubjects(list []identity.Numeric) {
	var fresh []identity.Numeric
	for _, x := range list {
		if _, known := o.identities.all[x]; known && !o.engine.IsSubject(x) && o.subscribers.want(x) {
			fresh = append(fresh, x)
		}
	}
	if len(fresh) > 0 {
		o.problems.Note("subjects", o.apply(engine.Change{AddSubjects: fresh}))
	}
}

// noteReduced records which subjects have tables that lack rules.
func (o *Owner) noteReduced() {
	list := o.engine.Reduced()
	if len(list) == 0 {
		o.problems.Note("tables", nil)
		return
	}
	o.problems.Note("tables", fmt.Errorf("%d tables lack rules: %s", len(list), list[0]))
}

// Refuse records that a subscriber rejected a table. The subscriber keeps the previous table, which is no longer
// updated.
func (o *Owner) Refuse(ctx context.Context, session *stream.Session, subject identity.Numeric, table policytable.ID, reason string) error {
	err := o.loop.Do(ctx, opOther, func() {
		for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
			// A table without any bindings no longer matters.
			if now, ok := o.engine.BoundID(subject, d); !ok || now != table || table == policytable.AllowAll {
				continue
			}
			r := stream.Refusal{Table: table, Revision: o.publisher.barrier.Policy, Reason: reason, Policy: o.engine.LargestShare(subject, d)}
			o.config.Log.Error("a subscriber rejected a table and keeps the previous one",
				"subject", uint32(subject), "direction", d.String(), "table", uint64(table), "reason", reason, "largest_share", r.Policy)
			session.Refuse(stream.Refused{Subject: subject, Direction: d}, r)
		}
	})
	return err
}

// saveSubscribers stores the interests that have not been stored yet.
func (o *Owner) saveSubscribers() {
	for name, s := range o.subscribers.all {
		if !s.saveAt.IsZero() {
			o.saveSubscriber(name, s)
		}
	}
}

// sweepSubscribers stores changed interests, and removes subscribers that did not reconnect.
func (o *Owner) sweepSubscribers(now time.Time) {
	for name, s := range o.subscribers.all {
		switch {
		case s.saveAt.IsZero():
		case s.saveAt.After(now):
			o.wakeAt(s.saveAt)
		default:
			o.saveSubscriber(name, s)
		}
		switch {
		case s.session != nil:
		case s.until.After(now):
			o.wakeAt(s.until)
		case o.approach(s, nil):
			o.wakeAt(now) // continue after the waiting calls
		default:
			o.forgetSubscriber(name, s)
		}
	}
}

// forgetSubscriber removes a disconnected subscriber and its subjects.
func (o *Owner) forgetSubscriber(name string, s *subscriber) {
	subjects, places := slices.Sorted(maps.Keys(s.subjects)), slices.Collect(maps.Keys(s.locations))
	delete(o.subscribers.all, name)
	o.interest(s, nil, subjects, nil, places)
	o.publisher.stream.Forget(name)
	o.storage.save(o.ctx, record.Cache{GoneSubscribers: []string{name}})
}

// Wait returns when every connected enforcing subscriber that has one of the subjects enforces a policy revision.
// Without subjects it waits for all of them.
func (o *Owner) Wait(ctx context.Context, revision uint64, subjects []identity.Numeric) (stream.Progress, error) {
	return o.await(ctx, subjects, func() (stream.Barrier, error) {
		if revision > o.publisher.barrier.Policy {
			return stream.Barrier{}, fmt.Errorf("%w: %d, the present revision is %d",
				failure.ErrRevision, revision, o.publisher.barrier.Policy)
		}
		return stream.Barrier{Policy: revision}, nil
	})
}

// await waits until the subscribers acknowledge the barrier that begin returns. The owner calls begin.
func (o *Owner) await(
	ctx context.Context, subjects []identity.Numeric, begin func() (stream.Barrier, error),
) (stream.Progress, error) {
	goal, err := loop.Ask(ctx, o.loop, opOther, func() (stream.Goal, error) {
		b, err := begin()
		if err != nil {
			return stream.Goal{}, err
		}
		return stream.Goal{Barrier: b, Current: o.publisher.barrier.Policy, Subjects: subjects, Who: o.subscribers.awaited(subjects)}, nil
	})
	if err != nil {
		return stream.Progress{}, err
	}
	for {
		states, changed := o.publisher.stream.States()
		if out, reached, err := goal.Reached(states); err != nil || reached {
			return out, err
		}
		if err := o.loop.Wait(ctx, changed); err != nil {
			return stream.Progress{}, err
		}
	}
}

// SetIdentities applies changes of the identity service.
func (o *Owner) SetIdentities(ctx context.Context, set []peer.Identity, gone []identity.Numeric) error {
	err := o.loop.Do(ctx, opIdentity, func() {
		o.setIdentities(set, gone)
	})
	return err
}

// Narrows reports whether the policies would allow an identity with other labels less than now. It is false until
// every source was complete once.
func (o *Owner) Narrows(ctx context.Context, n identity.Numeric, labels label.Set) (bool, error) {
	next, err := peer.New(n, labels)
	if err != nil {
		return false, err
	}
	return loop.Ask(ctx, o.loop, opRead, func() (bool, error) {
		return o.ready && o.engine.Narrows(n, o.identities.complete(next)), nil
	})
}

// setIdentities passes identity changes to the engine, and compiles subjects that waited for their identity.
func (o *Owner) setIdentities(set []peer.Identity, gone []identity.Numeric) {
	c, rec := o.identities.take(set, gone)
	if len(c.AddIdentities)+len(c.RemoveIdentities) == 0 {
		return
	}
	o.publisher.barrier.Identity += uint64(len(c.AddIdentities) + len(c.RemoveIdentities))
	o.problems.Note("identities", o.apply(c))
	subjects := make([]identity.Numeric, 0, len(c.AddIdentities))
	for _, id := range c.AddIdentities {
		subjects = append(subjects, id.Number)
	}
	o.addSubjects(subjects)
	o.storage.save(o.ctx, rec)
}

// TakeIdentities is SetIdentities, and records the revision of the identity service up to which the owner has every
// change; zero means unknown.
func (o *Owner) TakeIdentities(ctx context.Context, set []peer.Identity, gone []identity.Numeric, at peer.Revision) error {
	err := o.loop.Do(ctx, opOther, func() {
		o.setIdentities(set, gone)
		o.publisher.barrier.IdentityService = at
	})
	return err
}

// CompleteIdentities reports that listed contains all existing identities.
func (o *Owner) CompleteIdentities(ctx context.Context, listed map[identity.Numeric]struct{}) error {
	for more := true; more; {
		var err error
		if more, err = loop.Ask(ctx, o.loop, opIdentity, func() (bool, error) {
			gone := o.identities.others(listed)
			if len(gone) > identitiesAtOnce {
				o.setIdentities(nil, gone[:identitiesAtOnce])
				return true, nil
			}
			o.setIdentities(nil, gone)
			o.sources.completed(source.Identity)
			return false, nil
		}); err != nil {
			return err
		}
	}
	return nil
}
