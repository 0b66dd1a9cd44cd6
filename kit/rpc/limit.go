// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpc

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
)

// Limit limits the calls of one method. Root and the users that the table lists share one limit; all other callers
// share a second one, so that read-only callers cannot delay the callers that pods depend on. A field that is 0 sets no
// limit. If the queue is full or the rate is exceeded, a call fails with RESOURCE_EXHAUSTED and RetryInfo.
type Limit struct {
	InFlight int // concurrent calls, or open streams
	Waiting  int // calls that may wait for a running one to end; requires InFlight
	// Rate is the average number of calls per second, Burst the number of calls at once (at least
	// 1).
	Rate  float64
	Burst int
	// RetryAfter is the delay in RetryInfo for refused callers, 100 ms if 0.
	RetryAfter time.Duration
}

func (l Limit) check() error {
	switch {
	case l.InFlight < 0, l.Waiting < 0, l.Rate < 0, l.Burst < 0, l.RetryAfter < 0:
		return fmt.Errorf("a limit is negative: %+v", l)
	case l.Waiting > 0 && l.InFlight == 0:
		return fmt.Errorf("%d calls may wait, but InFlight is unlimited", l.Waiting)
	case l.Burst > 0 && l.Rate == 0:
		return fmt.Errorf("burst of %d without a rate", l.Burst)
	}
	return nil
}

type limiter struct {
	limit    Limit
	running  chan struct{} // nil without InFlight
	admitted chan struct{} // nil without InFlight; counts running and waiting calls
	rate     *rate.Limiter // nil without Rate
}

func newLimiter(l Limit) *limiter {
	if l.InFlight == 0 && l.Rate == 0 {
		return nil
	}
	l.RetryAfter = cmp.Or(l.RetryAfter, 100*time.Millisecond)
	lim := &limiter{limit: l}
	if l.InFlight > 0 {
		lim.running = make(chan struct{}, l.InFlight)
		lim.admitted = make(chan struct{}, l.InFlight+l.Waiting)
	}
	if l.Rate > 0 {
		lim.rate = rate.NewLimiter(rate.Limit(l.Rate), max(1, l.Burst))
	}
	return lim
}

// limiters are the two limiters of a method: trusted for root and the users that the table lists, others for all other
// callers.
type limiters struct{ trusted, others *limiter }

func newLimiters(l Limit) limiters { return limiters{trusted: newLimiter(l), others: newLimiter(l)} }

func (l limiters) of(trusted bool) *limiter {
	if trusted {
		return l.trusted
	}
	return l.others
}

// enter returns when the call may run. The caller must call done at the end of the call.
func (l *limiter) enter(ctx context.Context, method string) (done func(), _ error) {
	if l == nil {
		return func() {}, nil
	}
	if l.rate != nil && !l.rate.Allow() {
		return nil, l.refuse("%s: more than %g calls per second", method, l.limit.Rate)
	}
	if l.running == nil {
		return func() {}, nil
	}
	select {
	case l.admitted <- struct{}{}:
	default:
		return nil, l.refuse("%s: %d calls running, %d waiting", method, l.limit.InFlight, l.limit.Waiting)
	}
	select {
	case l.running <- struct{}{}:
		return func() { <-l.running; <-l.admitted }, nil
	case <-ctx.Done():
		<-l.admitted
		return nil, status.FromContextError(ctx.Err()).Err()
	}
}

func (l *limiter) refuse(format string, args ...any) error {
	return rpcerr.New(codes.ResourceExhausted, rpcerr.TooManyCalls, fmt.Errorf(format, args...), rpcerr.Retry(l.limit.RetryAfter))
}

// enter acquires a slot of the method's limit for an authorised caller.
func (s *Server) enter(ctx context.Context, method string) (done func(), _ error) {
	cred, ok := PeerCred(ctx)
	trusted := ok && (isRoot(cred.UID, s.alsoRoot) || slices.Contains(s.named, cred.UID))
	limits := s.limiters[method]
	if always(method) {
		limits = s.always
	}
	return limits.of(trusted).enter(ctx, method)
}

func (s *Server) limitUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if always(info.FullMethod) {
		return next(ctx, req) // a health check; it ends at once and needs no stream slot
	}
	done, err := s.enter(ctx, info.FullMethod)
	if err != nil {
		return nil, err
	}
	defer done()
	return next(ctx, req)
}

func (s *Server) limitStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	done, err := s.enter(ss.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	defer done()
	return next(srv, ss)
}
