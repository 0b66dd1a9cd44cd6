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

// IdleBookmark is the idle time of a reader after which Serve sends a bookmark that only renews the
// token.
const IdleBookmark = 30 * time.Second

// SendTimeout is the maximum duration of one send. A client that accepts nothing for this long is
// disconnected with ErrSlow.
const SendTimeout = 30 * time.Second

// Serve subscribes to the hub and passes every event to send until ctx ends, send fails, or the subscription ends. It
// implements a Watch RPC, and returns the status of the RPC.
//
// Serve returns when the subscription ends or when one send takes longer than SendTimeout, even if
// that send has not returned: gRPC's Send to a client that does not read only returns after its
// handler has returned. Therefore a separate goroutine calls send; after Serve has returned, that
// goroutine ends as soon as its last send returns, and sends nothing else.
func Serve[K comparable, V any](ctx context.Context, h *Hub[K, V], token []byte, send func(Event[K, V]) error) error {
	return ServeBatches(ctx, h, token, 1, func(events []Event[K, V]) error { return send(events[0]) })
}

// ServeBatches is Serve with up to most events per call of send: the events that are available at
// that time. The slice is only valid during the call.
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
		return Status(fmt.Errorf("%w: the client accepted nothing for %v", ErrSlow, SendTimeout))
	case <-ctx.Done():
		return Status(ctx.Err())
	}
}

// pump passes events to send until the subscription or send ends.
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
			continue // idle before the end of the listing: there is no token yet
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
		clear(events) // release the values
	}
}

// nextOrIdle returns the next event, or a bookmark after IdleBookmark.
func nextOrIdle[K comparable, V any](ctx context.Context, s *Subscription[K, V]) (Event[K, V], error) {
	if e, ok, err := s.take(); ok || err != nil {
		if ctx.Err() != nil {
			return Event[K, V]{}, ctx.Err()
		}
		return e, err // no timer needed while events are available
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

// Status adds the gRPC code to errors of this package and of contexts.
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
