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

// Errors of messages in the wrong place, which are answered as they are.
var (
	// ErrNoSubscribe says that a stream does not begin with subscribe.
	ErrNoSubscribe error = &failure.FieldError{
		Field: "message", Err: errors.New("the first message is not subscribe"),
	}
	// ErrSubscribed says that subscribe, or nothing, follows the first message.
	ErrSubscribed error = &failure.FieldError{
		Field: "message", Err: errors.New("subscribe is only the first message"),
	}
)

// Session is a subscriber that is connected. Next and Take are called by one goroutine
// each, beside each other.
type Session[In, Out any] struct {
	// Next waits for the next message to the subscriber.
	Next func(context.Context) (*Out, error)
	// Take takes a message of the subscriber.
	Take func(context.Context, *In) error
	// Ended is closed when the service ends the session, and Err says why.
	Ended <-chan struct{}
	Err   func() error
	// Check looks whether the subscriber keeps up, which may end the session, and
	// returns when to look again; nil: nothing does.
	Check func() time.Duration
}

// Serve passes messages in both directions until the subscriber or the service ends the
// session, or the call is over. It returns the answer to the call: nil if the
// subscriber has closed its side.
func Serve[In, Out any](
	conn grpc.BidiStreamingServer[In, Out], s Session[In, Out], answers *rpcerr.Table,
) error {
	ctx, cancel := context.WithCancel(conn.Context())
	defer cancel()
	// Both end right after the handler has returned, which is what ends a Send to a
	// client that does not read, and a Recv from one that does not write.
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
