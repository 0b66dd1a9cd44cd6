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
	// mostSpread limits the time over which calls that were refused together spread their repetitions. It is a multiple
	// of the server's delay.
	mostSpread = 20
)

// patience returns how long a verb waits for an unavailable server. After an error of ADD, kubelet pauses for 12 to 15
// s, while services start or are upgraded in less than 20 s. The runtime soon repeats the other verbs, and STATUS
// reports the current state.
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

// call repeats f while the server at socket is unavailable, for at most w.patience. It also repeats f until ctx ends
// while the server refuses the call with a retry delay. The call must be repeatable, as all calls of this API are.
func call[T any](ctx context.Context, w *waiting, socket string, f func(context.Context) (T, error)) (T, error) {
	var (
		away    time.Time // time since which no server answers
		refused int
		cause   error // why the call was last repeated
	)
	for {
		answer, err := f(ctx)
		if cause != nil && timeIsUp(ctx, err) {
			return answer, cause // the cause is more helpful than the error of the deadline
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

// request makes one call whose answer has type R.
func request[R any, A interface {
	*R
	message.Message
}](ctx context.Context, service unary.Client, method string, m message.Message) (*R, error) {
	answer := new(R)
	err := service.Call(ctx, method, m, A(answer))
	return answer, err
}

// ask calls a method of a service, with the repetitions of call.
func ask[R any, A interface {
	*R
	message.Message
}](ctx context.Context, w *waiting, service unary.Client, method string, m message.Message) (*R, error) {
	return call(ctx, w, service.Path(), func(ctx context.Context) (*R, error) { return request[R, A](ctx, service, method, m) })
}

// timeIsUp reports whether an error means that the deadline has passed; the server may detect this first.
func timeIsUp(ctx context.Context, err error) bool {
	return err != nil && (ctx.Err() != nil || unary.CodeOf(err) == unary.DeadlineExceeded)
}

// retryDelay returns the delay after which the server wants a refused call to be repeated. ok is false if the server
// sent none, or 0.
func retryDelay(err error) (time.Duration, bool) {
	delay, ok := unary.RetryDelay(err)
	return max(delay, shortestPause), ok
}

// pause waits before a refused call is repeated: for the delay and an additional random time, which grows with the
// number of refusals. So calls that were refused together are repeated at different times, and less often the longer
// the queue is. It returns false if the call cannot be repeated before the deadline.
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

// absentError names the socket on which no server answers. It keeps the code of the error.
type absentError struct {
	socket string
	cause  error
}

func (e *absentError) Error() string {
	return fmt.Sprintf("no answer on %s: %s", e.socket, text(e.cause))
}

func (e *absentError) Unwrap() error { return e.cause }

// waiting contains the limits and the counts of an invocation's waits for servers.
type waiting struct {
	patience time.Duration // maximum wait for an unavailable server
	total    time.Duration
	repeated int // number of repeated calls
}

// sleep waits for d. It returns false if ctx ends first.
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
