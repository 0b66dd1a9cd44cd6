// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package attachment

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/sluice-net/sluice/services/cni-shim/internal/invocation"
	"github.com/sluice-net/sluice/services/cni-shim/internal/message"
	"github.com/sluice-net/sluice/services/cni-shim/internal/unary"
)

const (
	// reconnectPause is how long a call waits before it tries to reach an absent server again.
	reconnectPause = 25 * time.Millisecond
	// shortestPause is the shortest wait before a refused call is repeated, even if the server allows less.
	shortestPause = 10 * time.Millisecond
	// mostSpread bounds how far apart calls come back that were refused
	// together, in delays of the server.
	mostSpread = 20
)

// patience returns how long a verb waits for an unavailable server. After an error of ADD, kubelet pauses for 12 to 15
// s, while services start or are upgraded in less than 20 s. The runtime soon repeats the other verbs anyway, and
// STATUS reports the present state.
func patience(c invocation.Command) time.Duration {
	switch c {
	case invocation.Add:
		return 20 * time.Second
	case invocation.Status:
		return 0
	default:
		return 2 * time.Second
	}
}

// call repeats f while the server at socket is unavailable, for at most w.patience, and, until ctx ends, while the
// server refuses and returns a retry delay. Only calls that may be repeated use it; all calls of this API may.
func call[T any](ctx context.Context, w *waiting, socket string, f func(context.Context) (T, error)) (T, error) {
	var (
		away    time.Time // since when no server answers
		refused int
		cause   error // why the call was repeated last
	)
	for {
		answer, err := f(ctx)
		if cause != nil && timeIsUp(ctx, err) {
			return answer, cause // more helpful than the deadline
		}
		if delay, ok := retryDelay(err); ok {
			refused++
			away, cause = time.Time{}, err
			if wait, ok := pause(ctx, delay, refused); !ok || !w.sleep(ctx, wait) {
				return answer, err
			}
			continue
		}
		if unary.CodeOf(err) != unary.Unavailable || answered(err) {
			return answer, err
		}
		now := time.Now()
		if away.IsZero() {
			away = now
		}
		cause = &absentError{socket: socket, cause: err}
		if now.Sub(away) >= w.patience || !w.sleep(ctx, reconnectPause) {
			return answer, cause
		}
	}
}

// request makes one call of an answer's type R.
func request[R any, A interface {
	*R
	message.Message
}](ctx context.Context, service unary.Client, method string, m message.Message) (*R, error) {
	answer := new(R)
	err := service.Call(ctx, method, m, A(answer))
	return answer, err
}

// ask makes a call to a method of a service, with call.
func ask[R any, A interface {
	*R
	message.Message
}](ctx context.Context, w *waiting, service unary.Client, method string, m message.Message) (*R, error) {
	return call(ctx, w, service.Path(), func(ctx context.Context) (*R, error) { return request[R, A](ctx, service, method, m) })
}

// timeIsUp reports whether an error means the deadline, which the server may notice first.
func timeIsUp(ctx context.Context, err error) bool {
	return err != nil && (ctx.Err() != nil || unary.CodeOf(err) == unary.DeadlineExceeded)
}

// retryDelay is when the server wants a call to come back that it has refused,
// but not at once.
func retryDelay(err error) (time.Duration, bool) {
	delay, ok := unary.RetryDelay(err)
	return max(delay, shortestPause), ok
}

// pause waits before a call is repeated that was refused so many times: at least the delay, and a random time on top,
// which grows with the number of refusals. So calls that were refused together are spread, and the longer the queue,
// the less often each of them asks. It returns false if the call cannot be repeated before the deadline.
func pause(ctx context.Context, delay time.Duration, refused int) (time.Duration, bool) {
	spread := delay * time.Duration(min(refused, mostSpread))
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		if delay >= left {
			return 0, false
		}
		spread = min(spread, (left-delay)/2)
	}
	return delay + rand.N(spread+1), true
}

// absentError names the socket on which no server answers. It keeps the code.
type absentError struct {
	socket string
	cause  error
}

func (e *absentError) Error() string {
	return fmt.Sprintf("no answer on %s: %s", e.socket, text(e.cause))
}

func (e *absentError) Unwrap() error { return e.cause }

// waiting is how an invocation waits, and has waited, for servers.
type waiting struct {
	patience time.Duration // with an unavailable server
	total    time.Duration
	repeated int // calls that were made again
}

// sleep is false if ctx ended first.
func (w *waiting) sleep(ctx context.Context, d time.Duration) bool {
	start := time.Now()
	defer func() { w.total += time.Since(start) }()
	select {
	case <-time.After(d):
		w.repeated++
		return true
	case <-ctx.Done():
		return false
	}
}
