// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package watch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
)

// IdleBookmark is how long a reader of Serve hears nothing before it gets a
// bookmark that only moves its token.
const IdleBookmark = 30 * time.Second

// SendTimeout is how long one send of Serve may take. A client that accepts
// nothing for so long is disconnected with ErrSlow.
const SendTimeout = 30 * time.Second

// Serve subscribes and passes every event to send until ctx is done, send
// fails, or the subscription ends. It is the body of a Watch RPC: what it
// returns is ready to be the RPC's status.
//
// Serve returns when the subscription ends, or when one send takes longer than
// SendTimeout, although send has not returned: gRPC's Send waits for a client
// that does not read until its handler returns, which is what ends it. So send
// is called from a goroutine that ends with send; nothing is sent after the
// event that it was called with.
func Serve[K comparable, V any](ctx context.Context, h *Hub[K, V], token []byte, send func(Event[K, V]) error) error {
	return ServeBatches(ctx, h, token, 1, func(events []Event[K, V]) error { return send(events[0]) })
}

// ServeBatches is Serve with up to most events in one call of send: those that
// wait at that time. The slice is valid during the call.
func ServeBatches[K comparable, V any](ctx context.Context, h *Hub[K, V], token []byte, most int,
	send func([]Event[K, V]) error,
) error {
	s, err := h.Subscribe(token)
	if err != nil {
		return Status(err)
	}
	defer s.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	blocked := time.NewTimer(SendTimeout)
	blocked.Stop()
	sent := make(chan error, 1)
	go func() {
		sent <- pump(ctx, s, most, func(events []Event[K, V]) error {
			blocked.Reset(SendTimeout)
			defer blocked.Stop()
			return send(events)
		})
	}()
	select {
	case err := <-sent:
		return Status(err)
	case <-s.Ended():
		return Status(s.Err())
	case <-blocked.C:
		return Status(fmt.Errorf("%w: it accepted nothing for %v", ErrSlow, SendTimeout))
	case <-ctx.Done():
		return Status(ctx.Err())
	}
}

// pump passes events to send until either ends.
func pump[K comparable, V any](ctx context.Context, s *Subscription[K, V], most int,
	send func([]Event[K, V]) error,
) error {
	var events []Event[K, V]
	for {
		e, err := nextOrIdle(ctx, s)
		if err != nil {
			return err
		}
		if e.Kind == 0 {
			continue // idle before the listing is complete: there is no token yet
		}
		events = append(events[:0], e)
		for len(events) < most {
			e, ok, err := s.take()
			if err != nil {
				return err
			}
			if !ok {
				break
			}
			events = append(events, e)
		}
		if err := send(events); err != nil {
			return err
		}
		clear(events) // let go of the values
	}
}

// nextOrIdle returns a bookmark when nothing happens for IdleBookmark.
func nextOrIdle[K comparable, V any](ctx context.Context, s *Subscription[K, V]) (Event[K, V], error) {
	if e, ok, err := s.take(); ok || err != nil {
		if ctx.Err() != nil {
			return Event[K, V]{}, ctx.Err()
		}
		return e, err // without a timer while there is more
	}
	idle, cancel := context.WithTimeout(ctx, IdleBookmark)
	defer cancel()
	e, err := s.Next(idle)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		if e := s.bookmark(); e.Token != nil {
			return e, nil
		}
		return Event[K, V]{}, nil
	}
	return e, err
}

// Status gives the errors of this package, and of a context, their gRPC code.
func Status(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrExpired):
		return rpcerr.New(codes.OutOfRange, rpcerr.TokenExpired, fmt.Errorf("%w; watch again without a token", err))
	case errors.Is(err, ErrSlow):
		return rpcerr.New(codes.ResourceExhausted, rpcerr.ReaderTooSlow, fmt.Errorf("%w; watch again from the last token", err))
	case errors.Is(err, ErrClosed):
		return rpcerr.New(codes.Unavailable, rpcerr.ShuttingDown, err)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return status.FromContextError(err).Err()
	}
	return err
}
