// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/stream"
)

// Session is one connection of a subscriber. Its methods may be called concurrently.
type Session struct {
	subscribers *Subscribers
	name        string
	number      uint64
	wake        <-chan struct{}
	ended       chan struct{} // closed when Subscribers end the session
	err         error         // why; set before ended is closed
}

// subscriber returns the subscriber of the session, or ErrReplaced.
func (x *Session) subscriber() (*stream.Subscriber, error) {
	s := x.subscribers.all[x.name]
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
		case <-x.subscribers.loop.Stopped():
			return nil, failure.ErrStopped
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		steps, err := loop.Ask(ctx, x.subscribers.loop, opStream, func() ([]frontend.Step, error) {
			s, err := x.subscriber()
			if err != nil {
				return nil, err
			}
			return s.Next(newView(x.subscribers)), nil
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
	_, err := loop.Ask(ctx, x.subscribers.loop, opStream, func() (struct{}, error) {
		s, err := x.subscriber()
		if err == nil {
			err = s.Ack(enforced, ended)
		}
		if err == nil {
			x.subscribers.moved()
		}
		return struct{}{}, err
	})
	return err
}

// Refuse records that the subscriber has refused a frontend. It ignores a frontend that was removed in the meantime.
func (x *Session) Refuse(ctx context.Context, k frontend.Key, reason string) error {
	_, err := loop.Ask(ctx, x.subscribers.loop, opStream, func() (struct{}, error) {
		s, err := x.subscriber()
		if err != nil {
			return struct{}{}, err
		}
		w := x.subscribers.index.claims.winner(k)
		if w == nil {
			return struct{}{}, nil
		}
		x.subscribers.log.Error("subscriber refused a frontend; until it accepts it, it only removes backends",
			"subscriber", x.name, "frontend", compile.KeyText(k), "service", w.name.String(), "reason", reason)
		s.Refuse(k, w.name, reason)
		x.subscribers.refused(w)
		return struct{}{}, nil
	})
	return err
}

// Close ends the session. The subscriber may connect again and resume.
func (x *Session) Close() {
	all := x.subscribers
	// An error does not matter: it only means that the loop has stopped.
	_ = all.loop.Do(context.Background(), opStream, func() {
		s, err := x.subscriber()
		if err != nil {
			return
		}
		delete(all.sessions, x.name)
		if s.Disconnect(all.now().Add(all.linger)); !s.Enforces {
			all.drop(x.name) // a subscriber that only watches need not resume
		}
		all.moved()
	})
}

// view is the stream.Source of subscribers. It computes the frontends of each service once.
type view struct {
	subscribers *Subscribers
	of          map[*joined]map[frontend.Key]*frontend.Frontend
}

func newView(s *Subscribers) view {
	return view{s, make(map[*joined]map[frontend.Key]*frontend.Frontend)}
}

// Frontend implements stream.Source.
func (v view) Frontend(k frontend.Key) *frontend.Frontend {
	w := v.subscribers.index.claims.winner(k)
	if w == nil {
		return nil
	}
	all, ok := v.of[w]
	if !ok {
		list := v.subscribers.index.frontends(w)
		all = make(map[frontend.Key]*frontend.Frontend, len(list))
		for _, f := range list {
			all[f.Key] = f
		}
		v.of[w] = all
	}
	return all[k]
}

// Keys implements stream.Source.
func (v view) Keys() []frontend.Key { return v.subscribers.index.claims.frontends() }

// Revision implements stream.Source.
func (v view) Revision() (revision uint64, complete bool) {
	return v.subscribers.index.revision, v.subscribers.sources.complete()
}

// NextSeq implements stream.Source.
func (v view) NextSeq() uint64 {
	v.subscribers.seq++
	return v.subscribers.seq
}
