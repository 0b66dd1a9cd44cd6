// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package watch

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc/client"
)

// Source is a set that is kept elsewhere and can be watched.
type Source[K comparable, V any] interface {
	// Watch yields the events of a Hub or of a service that has one: from a
	// listing on if the token is nil, else from after the event that carried the
	// token, beginning with an event that is there already, a bookmark if nothing
	// has changed. It ends soon after ctx is done. An error is the last that it
	// yields; one that wraps ErrExpired refuses the token.
	Watch(ctx context.Context, token []byte) iter.Seq2[Event[K, V], error]
}

// Changes are what Follow hands on at once: each key is in one of the two maps.
type Changes[K comparable, V any] struct {
	Upserts map[K]V
	Deletes map[K]struct{}
	// Revision of the source's run Incarnation up to which the sink has
	// everything with these changes. Zero, as during a listing: not known.
	Revision    uint64
	Incarnation string
	// Origin up to which the sink has everything with these changes, as Revision.
	Origin Origin
}

// Sink takes the set that Follow follows. Its methods are called one at a time
// and keep none of the maps. After an error of Apply or Complete the source is
// watched again, so that the same changes come once more.
type Sink[K comparable, V any] interface {
	// Apply sets and deletes keys. It may be called without changes, to say the
	// revision. Keys may be set that are equal, or deleted that do not exist.
	Apply(ctx context.Context, c Changes[K, V]) error
	// Complete says that the source has the listed keys and no other, and that it
	// does not fail any more.
	Complete(ctx context.Context, listed map[K]struct{}) error
	// Failed says why nothing comes from the source; nil takes it back. What the
	// sink has stays. An error of Failed ends Follow.
	Failed(ctx context.Context, why error) error
}

// FollowOptions of Follow. All but Log are needed.
type FollowOptions struct {
	// Max is how many keys the set may have. A source with more fails, and what
	// the sink has of it stays.
	Max int
	// RetryMin and RetryMax bound the pause after a failure. It doubles up to
	// RetryMax, and begins anew after a watch that lasted for longer than that. A
	// server whose socket cannot be connected to is asked every absentPause: one
	// system call says whether it is back.
	RetryMin, RetryMax time.Duration
	Log                *slog.Logger
}

// followBatch is how many changes Follow hands on at once, and how many events
// it reads ahead of the sink.
const followBatch = 512

// absentPause is the longest pause while the source has no socket that answers.
const absentPause = 100 * time.Millisecond

// Follow keeps a sink equal to a source until ctx is done. It then returns nil.
func Follow[K comparable, V any](ctx context.Context, source Source[K, V], sink Sink[K, V], o FollowOptions) error {
	f := follower[K, V]{source: source, sink: sink, options: o}
	pause := o.RetryMin
	for {
		began := time.Now()
		err := f.watch(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, ErrExpired) && f.token != nil {
			o.Log.Info("the source does not know the revision of the watch; everything is listed again")
			f.token = nil
		} else {
			if err.Error() != f.reported {
				f.reported = err.Error()
				o.Log.Warn("watch ended; it is opened again until that works", log.Err(err))
			}
			if err := sink.Failed(ctx, err); err != nil {
				if ctx.Err() != nil {
					return nil
				}
				return err
			}
			f.failed = true
		}
		if time.Since(began) > o.RetryMax {
			pause = o.RetryMin
		}
		if absent := (*client.AbsentError)(nil); errors.As(err, &absent) {
			pause = min(pause, absentPause)
		}
		select {
		case <-time.After(pause/2 + rand.N(pause/2+1)):
		case <-ctx.Done():
			return nil
		}
		pause = min(2*pause, o.RetryMax)
	}
}

// follower is what Follow keeps from one watch to the next.
type follower[K comparable, V any] struct {
	source  Source[K, V]
	sink    Sink[K, V]
	options FollowOptions

	token    []byte         // after what the sink has; nil: it has to be listed
	keys     map[K]struct{} // of the source, as far as they were read
	applied  Changes[K, V]  // the sink's revision, without maps
	failed   bool           // the sink was told so last
	reported string         // the failure that was logged last
}

// watch follows one watch to its end and returns why it ended.
func (f *follower[K, V]) watch(ctx context.Context) error {
	received, why, stop := f.receive(ctx)
	defer stop()

	listing := f.token == nil
	next := Changes[K, V]{Upserts: make(map[K]V), Deletes: make(map[K]struct{}), Origin: f.applied.Origin}
	var token []byte // of the last event
	flush := func() error {
		if listing {
			next.Revision, next.Incarnation, next.Origin = 0, "", Origin{}
		}
		if len(next.Upserts)+len(next.Deletes) > 0 || next.Revision != f.applied.Revision ||
			next.Incarnation != f.applied.Incarnation || next.Origin != f.applied.Origin {
			if err := f.sink.Apply(ctx, next); err != nil {
				return err
			}
			f.applied.Revision, f.applied.Incarnation, f.applied.Origin = next.Revision, next.Incarnation, next.Origin
			clear(next.Upserts)
			clear(next.Deletes)
		}
		if !listing && token != nil {
			f.token = token
		}
		return nil
	}
	if listing {
		f.keys = make(map[K]struct{})
		if err := flush(); err != nil { // the revision is not known any more
			return err
		}
	}
	for e := range received {
		if f.failed && !listing {
			if err := f.sink.Failed(ctx, nil); err != nil {
				return err
			}
			f.failed, f.reported = false, ""
		}
		token, next.Revision = e.Token, e.Revision
		if e.Origin != (Origin{}) {
			next.Origin = e.Origin
		}
		if next.Incarnation != string(e.Incarnation) { // no copy for each event
			next.Incarnation = string(e.Incarnation)
		}
		switch e.Kind {
		case Upsert:
			if f.keys[e.Key] = struct{}{}; len(f.keys) > f.options.Max {
				f.token = nil // what of the keys is there still, only a listing tells
				return fmt.Errorf("the source has more than %d keys", f.options.Max)
			}
			delete(next.Deletes, e.Key)
			next.Upserts[e.Key] = e.Value
		case Delete:
			delete(f.keys, e.Key)
			delete(next.Upserts, e.Key)
			next.Deletes[e.Key] = struct{}{}
		case Bookmark:
			if listing && e.SnapshotComplete {
				if err := flush(); err != nil {
					return err
				}
				if err := f.sink.Complete(ctx, f.keys); err != nil {
					return err
				}
				listing, f.token, f.failed, f.reported = false, token, false, ""
				next.Revision, next.Incarnation, next.Origin = e.Revision, string(e.Incarnation), e.Origin
				f.options.Log.Info("the source is complete", "keys", len(f.keys))
			}
		}
		if len(received) == 0 || len(next.Upserts)+len(next.Deletes) >= followBatch {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	return *why
}

// receive reads the source ahead of who handles its events. received is closed at
// the end, and why says then how it came; stop returns when nothing reads any more.
func (f *follower[K, V]) receive(ctx context.Context) (received <-chan Event[K, V], why *error, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	events := make(chan Event[K, V], followBatch)
	why = new(error)
	go func() {
		defer close(events)
		for e, err := range f.source.Watch(ctx, f.token) {
			if err != nil {
				*why = err
				return
			}
			select {
			case events <- e:
			case <-ctx.Done():
				*why = ctx.Err()
				return
			}
		}
		*why = errors.New("the source ended the watch")
	}()
	return events, why, func() {
		cancel()
		for range events { //nolint:revive // drained
		}
	}
}
