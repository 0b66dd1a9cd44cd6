// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/loop"
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
	// The last barrier that it applied; zero: none.
	Incarnation [16]byte
	Seq         uint64
	// Capacity of the subscriber's maps; nil: not reported.
	Capacity *frontend.Capacity
}

// Session is one connection of a subscriber. Its methods may be called concurrently.
type Session struct {
	owner  *Owner
	name   string
	number uint64
	wake   <-chan struct{}
	ended  chan struct{} // closed when the owner ends the session
	err    error         // why; set before ended is closed
}

// view is the stream.Source of subscribers. It computes the frontends of each service once.
type view struct {
	*Owner
	of map[*joined]map[frontend.Key]*frontend.Frontend
}

func (o *Owner) view() view {
	return view{o, make(map[*joined]map[frontend.Key]*frontend.Frontend)}
}

// Frontend implements stream.Source.
func (v view) Frontend(k frontend.Key) *frontend.Frontend {
	w := v.index.claims.winner(k)
	if w == nil {
		return nil
	}
	all, ok := v.of[w]
	if !ok {
		list := v.index.frontends(w)
		all = make(map[frontend.Key]*frontend.Frontend, len(list))
		for _, f := range list {
			all[f.Key] = f
		}
		v.of[w] = all
	}
	return all[k]
}

// Keys implements stream.Source.
func (v view) Keys() []frontend.Key { return v.index.claims.frontends() }

// Revision implements stream.Source.
func (v view) Revision() (revision uint64, complete bool) {
	return v.index.revision, v.sources.complete()
}

// NextSeq implements stream.Source.
func (v view) NextSeq() uint64 {
	v.seq++
	return v.seq
}

// Subscribe connects a subscriber. The caller must close the session.
func (o *Owner) Subscribe(ctx context.Context, want Subscription) (*Session, error) {
	return loop.Ask(ctx, o.loop, opStream, func() (*Session, error) {
		s := o.subscribers[want.Name]
		if s == nil {
			if len(o.subscribers) >= maxSubscribers && !o.forgetOne() {
				return nil, fmt.Errorf("%w: %d subscribers are connected", failure.ErrLimit, len(o.subscribers))
			}
			s = stream.New(want.Name)
			o.subscribers[want.Name] = s
		} else if s.Session != 0 {
			o.end(s.Name, failure.ErrReplaced)
		}
		s.Enforces = want.Enforces
		o.places.connected(want)
		o.session++
		seq := want.Seq
		if want.Incarnation != o.incarnation {
			seq = 0
		}
		if !s.Connect(o.session, seq, o.view()) && o.index.counts().frontends >= manyFrontends {
			o.changes = 1
		}
		x := &Session{owner: o, name: want.Name, number: o.session, wake: s.Wake, ended: make(chan struct{})}
		o.sessions[want.Name] = x
		o.moved()
		return x, nil
	})
}

// forgetOne drops the subscriber that has been disconnected for longest.
func (o *Owner) forgetOne() bool {
	var oldest *stream.Subscriber
	for _, s := range o.subscribers {
		if s.Session == 0 && (oldest == nil || s.Until.Before(oldest.Until)) {
			oldest = s
		}
	}
	if oldest != nil {
		delete(o.subscribers, oldest.Name)
		o.places.forget(oldest.Name)
	}
	return oldest != nil
}

// end ends the session of a subscriber from the owner's side.
func (o *Owner) end(name string, why error) {
	x := o.sessions[name]
	if x == nil {
		return
	}
	delete(o.sessions, name)
	x.err = why
	close(x.ended)
}

// mark marks frontends as changed for all subscribers; without keys, only a barrier is due.
func (o *Owner) mark(keys []frontend.Key) {
	for name, s := range o.subscribers {
		if err := s.Mark(keys); err != nil {
			o.end(name, err)
		}
	}
}

// subscriber returns the subscriber of the session, or ErrReplaced.
func (x *Session) subscriber() (*stream.Subscriber, error) {
	s := x.owner.subscribers[x.name]
	if s == nil || s.Session != x.number {
		return nil, failure.ErrReplaced
	}
	return s, nil
}

// Next waits for the steps of the next message.
func (x *Session) Next(ctx context.Context) ([]frontend.Step, error) {
	for {
		select {
		case <-x.wake:
		case <-x.ended:
			return nil, x.err
		case <-x.owner.loop.Stopped():
			return nil, failure.ErrStopped
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		steps, err := loop.Ask(ctx, x.owner.loop, opStream, func() ([]frontend.Step, error) {
			s, err := x.subscriber()
			if err != nil {
				return nil, err
			}
			return s.Next(x.owner.view()), nil
		})
		if err != nil || len(steps) > 0 {
			return steps, err
		}
	}
}

// Ended is closed when the owner ends the session; Err returns why.
func (x *Session) Ended() <-chan struct{} { return x.ended }

// Err returns why the session ended, once Ended is closed.
func (x *Session) Err() error { return x.err }

// Ack records the subscriber's progress.
func (x *Session) Ack(ctx context.Context, enforced, ended uint64) error {
	_, err := loop.Ask(ctx, x.owner.loop, opStream, func() (struct{}, error) {
		s, err := x.subscriber()
		if err == nil {
			err = s.Ack(enforced, ended)
		}
		if err == nil {
			x.owner.moved()
		}
		return struct{}{}, err
	})
	return err
}

// Refuse records that the subscriber rejected a frontend. It ignores a frontend that was removed
// meanwhile.
func (x *Session) Refuse(ctx context.Context, k frontend.Key, reason string) error {
	_, err := loop.Ask(ctx, x.owner.loop, opStream, func() (struct{}, error) {
		s, err := x.subscriber()
		if err != nil {
			return struct{}{}, err
		}
		w := x.owner.index.claims.winner(k)
		if w == nil {
			return struct{}{}, nil
		}
		x.owner.config.Log.Error("subscriber refused a frontend and will only remove backends from it",
			"subscriber", x.name, "frontend", compile.KeyText(k), "service", w.name.String(), "reason", reason)
		s.Refuse(k, w.name, reason)
		x.owner.unsettle[w.name] = struct{}{}
		x.owner.watch.Upsert(w.name, x.owner.index.revision)
		x.owner.moved()
		return struct{}{}, nil
	})
	return err
}

// Close ends the session. The subscriber may connect again and resume.
func (x *Session) Close() {
	o := x.owner
	// The error does not matter: the owner answers soon, or has stopped.
	_ = o.loop.Do(context.Background(), opStream, func() {
		s := o.subscribers[x.name]
		if s == nil || s.Session != x.number {
			return
		}
		delete(o.sessions, x.name)
		if s.Disconnect(o.config.Now().Add(o.config.Linger)); !s.Enforces {
			delete(o.subscribers, x.name) // it only reads, and need not resume
			o.places.forget(x.name)
		}
		o.moved()
	})
}

// Waited is the result of Wait.
type Waited struct {
	Revision                uint64
	Disconnected, Enforcing []string
}

// Wait returns when every connected enforcing subscriber has acknowledged a revision; with ended,
// also as ended. ErrRefused if one has refused a frontend of one of the services, or of any service
// if of is empty.
func (o *Owner) Wait(ctx context.Context, revision uint64, of []service.Name, ended bool) (Waited, error) {
	for {
		type answer struct {
			out      Waited
			reached  bool
			progress <-chan struct{}
		}
		a, err := loop.Ask(ctx, o.loop, opRead, func() (answer, error) {
			out, reached, err := o.reached(revision, of, ended)
			return answer{out, reached, o.progress}, err
		})
		if err != nil || a.reached {
			return a.out, err
		}
		if err := o.loop.Wait(ctx, a.progress); err != nil {
			return Waited{}, err
		}
	}
}

func (o *Owner) reached(revision uint64, of []service.Name, ended bool) (Waited, bool, error) {
	if revision > o.index.revision {
		return Waited{}, false, fmt.Errorf("%w: %d, the services are at %d", failure.ErrRevision, revision, o.index.revision)
	}
	out := Waited{Revision: o.index.revision}
	waiting := false
	for _, name := range slices.Sorted(maps.Keys(o.subscribers)) {
		s := o.subscribers[name]
		if !s.Enforces {
			continue
		}
		if s.Session == 0 {
			out.Disconnected = append(out.Disconnected, name)
			continue
		}
		p := s.Progress()
		for _, k := range slices.SortedFunc(maps.Keys(p.Refusals), compile.CompareKeys) {
			r := p.Refusals[k]
			if len(of) == 0 || slices.Contains(of, r.Service) {
				return Waited{}, false, fmt.Errorf("%w: %s keeps what it had of %s of service %s: %s", failure.ErrRefused, name,
					compile.KeyText(k), r.Service, r.Reason)
			}
		}
		out.Enforcing = append(out.Enforcing, name)
		at := p.Enforced
		if ended {
			at = min(at, p.Ended)
		}
		waiting = waiting || at < revision
		out.Revision = min(out.Revision, at)
	}
	return out, !waiting, nil
}

// enforced reports whether every connected enforcing subscriber has a revision with all frontends
// of a service, and there is at least one.
func (o *Owner) enforced(of service.Name, revision uint64) bool {
	some := false
	for _, s := range o.subscribers {
		if !s.Enforces || s.Session == 0 {
			continue
		}
		if s.Progress().Enforced < revision || s.Refuses(of) {
			return false
		}
		some = true
	}
	return some
}

// enforcement returns the state of a revision of a service in the enforcing subscribers. For a
// subscriber that began a new stream, it is unknown until the first acknowledgement: the kernel
// still has its frontends, and all of them are sent again.
func (o *Owner) enforcement(of service.Name, revision uint64) Enforcement {
	some, unknown := false, false
	for _, s := range o.subscribers {
		if !s.Enforces {
			continue
		}
		enforced := s.Progress().Enforced
		switch {
		case s.Session == 0 || enforced == 0:
			unknown = true
		case enforced < revision || s.Refuses(of):
			return NotEnforced
		}
		some = true
	}
	if unknown || !some {
		return EnforcementUnknown
	}
	return Enforced
}
