// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package subscription keeps a subscriber of desired state subscribed: one stream after the
// other, with pauses between them.
//
// A stream of desired state is incremental, as that of xDS is: the service sends changes with
// numbers, and the subscriber answers that it enforces them, or why not. A stream that ends is
// opened again behind what was answered last. What a stream brings, and how it is answered, is
// the subscriber's.
package subscription

import (
	"context"
	"errors"
	"time"
)

// Pauses between two streams. The pause doubles from First to Longest. It begins anew behind a
// stream that lasted for longer than Longest.
const (
	First   = 50 * time.Millisecond
	Longest = 2 * time.Second
	// Absent is the longest pause while no service can be connected to, which costs one
	// system call to find out. Others may wait for the service to be back.
	Absent = 100 * time.Millisecond
)

// Why a stream ended, for the pause behind it.
var (
	// ErrAbsent: it did not begin, because nothing answers.
	ErrAbsent = errors.New("the service is away")
	// ErrAnew: the subscriber has ended it, to begin another one at once.
	ErrAnew = errors.New("the subscription begins anew")
)

// Keep opens one stream after the other until ctx is done, and returns its error then. open
// has a stream from its beginning to its end, and returns why it ended; ended is told so, if ctx
// is not done. Both are called by the goroutine of Keep.
func Keep(ctx context.Context, open func(context.Context) error, ended func(error)) error {
	pause := First
	for {
		began := time.Now()
		err := open(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		ended(err)
		if time.Since(began) > Longest || errors.Is(err, ErrAnew) {
			pause = First // else what ends it may end the next one too
		}
		if errors.Is(err, ErrAbsent) {
			pause = min(pause, Absent)
		}
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		case <-t.C:
		}
		pause = min(2*pause, Longest)
	}
}

// Received is what a stream has brought, or why it brings no more.
type Received[M any] struct {
	Message M
	Err     error
}

// Receive hands on what receive returns, until ctx is done or it fails; done is closed then. So a
// subscriber can wait for other events beside its stream.
func Receive[M any](
	ctx context.Context, receive func() (M, error),
) (messages <-chan Received[M], done <-chan struct{}) {
	out, end := make(chan Received[M]), make(chan struct{})
	go func() {
		defer close(end)
		for {
			m, err := receive()
			select {
			case out <- Received[M]{m, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	return out, end
}
