// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package watch

import (
	"errors"
	"fmt"
	"io"
	"iter"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Receive yields the messages of a Watch RPC as events, for Source.Watch. open makes the call; the stream ends with the
// context of the call. Receive returns ErrExpired for the code OUT_OF_RANGE, with which Serve refuses a token.
func Receive[M any, K comparable, V any](
	open func() (grpc.ServerStreamingClient[M], error), event func(*M) Event[K, V],
) iter.Seq2[Event[K, V], error] {
	return ReceiveBatches(open, func(m *M) iter.Seq[Event[K, V]] {
		return func(yield func(Event[K, V]) bool) { yield(event(m)) }
	})
}

// ReceiveBatches is Receive for messages with several events. Only the last event of a message may
// have a token, which resumes after the whole message.
func ReceiveBatches[M any, K comparable, V any](
	open func() (grpc.ServerStreamingClient[M], error), events func(*M) iter.Seq[Event[K, V]],
) iter.Seq2[Event[K, V], error] {
	return func(yield func(Event[K, V], error) bool) {
		stream, err := open()
		for err == nil {
			var m *M
			if m, err = stream.Recv(); err != nil {
				break
			}
			for e := range events(m) {
				if !yield(e, nil) {
					return
				}
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return
		case status.Code(err) == codes.OutOfRange:
			err = fmt.Errorf("%w: %w", ErrExpired, err)
		}
		yield(Event[K, V]{}, err)
	}
}
