// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package watch

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// IdleBookmark is how long a reader of Serve hears nothing before it gets a
// bookmark that only moves its token.
const IdleBookmark = 30 * time.Second

// Serve subscribes and hands every event to send until ctx is done, send
// fails, or the subscription ends. It is the body of a Watch RPC: what it
// returns is ready to be the RPC's status.
func Serve[K comparable, V any](ctx context.Context, h *Hub[K, V], token []byte, send func(Event[K, V]) error) error {
	s, err := h.Subscribe(token)
	if err != nil {
		return Status(err)
	}
	defer s.Close()
	for {
		idle, cancel := context.WithTimeout(ctx, IdleBookmark)
		e, err := s.Next(idle)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			if e = (Event[K, V]{Kind: Bookmark, Token: s.Token()}); e.Token == nil {
				continue
			}
			err = nil
		}
		if err != nil {
			return Status(err)
		}
		if err := send(e); err != nil {
			return err
		}
	}
}

// Status gives the errors of this package, and of a context, their gRPC code.
func Status(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrExpired):
		return status.Error(codes.OutOfRange, err.Error()+"; watch again without a token")
	case errors.Is(err, ErrSlow):
		return status.Error(codes.ResourceExhausted, err.Error()+"; watch again from the last token")
	case errors.Is(err, ErrClosed):
		return status.Error(codes.Unavailable, err.Error())
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return status.FromContextError(err).Err()
	}
	return err
}
