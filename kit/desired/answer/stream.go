// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package answer

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
)

// Errors for messages out of order. Serve returns them unchanged.
var (
	// ErrNoSubscribe is returned if the first message is not subscribe.
	ErrNoSubscribe error = &failure.FieldError{
		Field: "message", Err: errors.New("the first message is not subscribe"),
	}
	// ErrSubscribed is returned for a subscribe message after the first message.
	ErrSubscribed error = &failure.FieldError{
		Field: "message", Err: errors.New("subscribe is only the first message"),
	}
)

// Session is one connected subscriber. One goroutine calls Next and another calls Take,
// concurrently.
type Session[In, Out any] struct {
	// Next waits for the next message to send to the subscriber.
	Next func(context.Context) (*Out, error)
	// Take processes a message from the subscriber.
	Take func(context.Context, *In) error
	// Ended is closed when the service ends the session; Err then returns the reason.
	Ended <-chan struct{}
	Err   func() error
	// Check ends the session if the subscriber is too slow, and returns the time until the next
	// check. Nil if the service has no such check.
	Check func() time.Duration
}

// Serve passes messages in both directions until the subscriber or the service ends the session, or
// the call ends. It returns the status of the call: nil if the subscriber closed its side.
func Serve[In, Out any](
	conn grpc.BidiStreamingServer[In, Out], s Session[In, Out], answers *rpcerr.Table,
) error {
	ctx, cancel := context.WithCancel(conn.Context())
	defer cancel()
	// Neither goroutine may outlive the call for long. gRPC ends a blocked Send to a client that does not read, and
	// a blocked Recv, only after the handler has returned.
	received, sent := make(chan error, 1), make(chan error, 1)
	go func() { received <- receive(ctx, conn, s.Take, answers) }()
	go func() { sent <- send(ctx, conn, s.Next, answers) }()
	for {
		var check <-chan time.Time
		if s.Check != nil {
			check = time.After(s.Check())
		}
		select {
		case err := <-received:
			return err
		case err := <-sent:
			return err
		case <-s.Ended:
			return answers.Status(s.Err())
		case <-ctx.Done():
			return answers.Status(ctx.Err())
		case <-check:
		}
	}
}

func receive[In, Out any](
	ctx context.Context, conn grpc.BidiStreamingServer[In, Out], take func(context.Context, *In) error,
	answers *rpcerr.Table,
) error {
	for {
		m, err := conn.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := take(ctx, m); err != nil {
			return answers.Status(err)
		}
	}
}

func send[In, Out any](
	ctx context.Context, conn grpc.BidiStreamingServer[In, Out], next func(context.Context) (*Out, error),
	answers *rpcerr.Table,
) error {
	for {
		m, err := next(ctx)
		if err != nil {
			return answers.Status(err)
		}
		if err := conn.Send(m); err != nil {
			return err
		}
	}
}
