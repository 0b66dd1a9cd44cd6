// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package watch

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"time"

	"github.com/sluice-net/sluice/kit/log"
)

// Source is a remote set that can be watched.
type Source[K comparable, V any] interface {
	// Watch yields the events of a Hub, or of a service that uses one. With a nil token it begins with a listing,
	// else with the event after the token. It yields its first event at once: a bookmark if nothing has changed.
	// Watch returns soon after ctx ends. An error is always the last item; it wraps ErrExpired if the source
	// refuses the token.
	Watch(ctx context.Context, token []byte) iter.Seq2[Event[K, V], error]
}

// Changes is one batch from Follow to a Sink. Each key is in at most one of the two maps.
type Changes[K comparable, V any] struct {
	Upserts map[K]V
	Deletes map[K]struct{}
	// Revision is the revision of the source, in the run Incarnation, whose state the sink has after these changes.
	// 0 if unknown, as during a listing.
	Revision    uint64
	Incarnation string
	// Origin is the origin whose state the sink has after these changes; zero if unknown.
	Origin Origin
}

// Sink receives the set that Follow follows. Follow calls one method at a time; the sink must not
// keep the maps. After an error of Apply or Complete, Follow watches the source again and delivers
// the same changes again.
type Sink[K comparable, V any] interface {
	// Apply sets and deletes keys. A call without changes only updates the revision. A key may be
	// set to an equal value, and a deleted key may not exist.
	Apply(ctx context.Context, c Changes[K, V]) error
	// Complete reports that the source has exactly the listed keys. It also clears a failure.
	Complete(ctx context.Context, listed map[K]struct{}) error
	// Failed reports why the source delivers nothing; nil clears the failure. The sink keeps its
	// content. An error of Failed ends Follow.
	Failed(ctx context.Context, why error) error
}

// FollowOptions of Follow. All fields are required.
type FollowOptions struct {
	// Max is the maximum number of keys. If the source has more, the watch fails, and the sink
	// keeps its content.
	Max int
	// RetryMin and RetryMax bound the pause after a failure, as Retry describes.
	RetryMin, RetryMax time.Duration
	Log                *slog.Logger
}

// followBatch is the maximum number of changes per call of the sink, and the number of events that
// are read ahead.
const followBatch = 512

// Follow keeps a sink equal to a source until ctx ends, and then returns nil.
func Follow[K comparable, V any](ctx context.Context, source Source[K, V], sink Sink[K, V], o FollowOptions) error {
	f := follower[K, V]{source: source, sink: sink, options: o}
	return Retry(ctx, o.RetryMin, o.RetryMax, f.watch, func(err error) error {
		if errors.Is(err, ErrExpired) && f.token != nil {
			o.Log.Info("the source no longer has the revision of the watch; listing everything again")
			f.token = nil
			return nil
		}
		if err.Error() != f.reported {
			f.reported = err.Error()
			o.Log.Warn("watch ended; retrying", log.Err(err))
		}
		f.failed = true
		return sink.Failed(ctx, err)
	})
}

// follower is the state of Follow that outlives a watch.
type follower[K comparable, V any] struct {
	source  Source[K, V]
	sink    Sink[K, V]
	options FollowOptions

	token    []byte         // token after the changes that the sink has; nil before a listing
	keys     map[K]struct{} // keys of the source that were read so far
	applied  Changes[K, V]  // the revision of the sink, without maps
	failed   bool           // the sink's last report was a failure
	reported string         // the last failure that was logged
}

// watch runs one watch to its end and returns why it ended.
func (f *follower[K, V]) watch(ctx context.Context) error {
	received, why, stop := f.receive(ctx)
	defer stop()

	listing := f.token == nil
	next := Changes[K, V]{Upserts: make(map[K]V), Deletes: make(map[K]struct{}), Origin: f.applied.Origin}
	var token []byte // token of the last event
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
		if err := flush(); err != nil { // clears the sink's revision for the listing
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
		if next.Incarnation != string(e.Incarnation) { // avoids a copy for each event
			next.Incarnation = string(e.Incarnation)
		}
		switch e.Kind {
		case Upsert:
			if f.keys[e.Key] = struct{}{}; len(f.keys) > f.options.Max {
				f.token = nil // only a listing can tell which keys still exist
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

// receive reads the source in its own goroutine. received is closed at the end of the watch, and
// *why is then its error. stop returns after the goroutine has stopped sending.
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
