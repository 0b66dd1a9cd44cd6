// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package subscription keeps a subscriber connected to a desired-state service: when a stream ends,
// it opens the next one after a pause.
//
// A stream of desired state is incremental, like incremental xDS: the service sends numbered
// changes, and the subscriber acknowledges or refuses them. A new stream resumes after the last
// acknowledged change. The caller handles the messages of a stream.
package subscription

import (
	"context"
	"errors"
	"time"
)

// Pauses between two streams. The pause doubles from First to Longest, and starts again at First
// after a stream that lasted longer than Longest.
const (
	First   = 50 * time.Millisecond
	Longest = 2 * time.Second
	// Absent is the longest pause while no connection to the service can be made. It is short, because an attempt
	// costs one system call, and other components may be waiting for the service.
	Absent = 100 * time.Millisecond
)

// Reasons for the end of a stream that determine the pause after it.
var (
	// ErrAbsent: the stream did not begin, because the socket refused the connection.
	ErrAbsent = errors.New("the service is unreachable")
	// ErrAnew: the subscriber ended the stream to begin another one at once.
	ErrAnew = errors.New("the subscription restarts")
)

// Keep opens one stream after the other until ctx ends, and returns the error of ctx. open runs a
// stream from beginning to end and returns why it ended; Keep then calls ended with that error,
// unless ctx has ended. Keep calls both from its own goroutine.
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
			pause = First // otherwise the same cause may end the next stream, too
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

// Received is a message of a stream, or the error that ended it.
type Received[M any] struct {
	Message M
	Err     error
}

// Receive sends the results of receive to a channel until ctx ends or receive fails; it then closes done. It lets a
// subscriber wait for its stream and for other events in one select statement.
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
