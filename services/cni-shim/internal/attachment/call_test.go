// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package attachment

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/sluice-net/sluice/services/cni-shim/internal/invocation"
)

const timeout = 30 * time.Second // the configuration's default

func refusal(code codes.Code, delay time.Duration) error {
	st, err := status.New(code, "4 calls run and 8 wait").WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(delay)})
	if err != nil {
		panic(err)
	}
	return st.Err()
}

// endOf is what a call of the verb ends with, and after how long, by the clock
// of the bubble.
func endOf(t *testing.T, verb invocation.Command, f func(since time.Duration) error) (time.Duration, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	start := time.Now()
	_, err := call(ctx, &waiting{patience: patience(verb)}, "/run/x.sock", func(context.Context) (int, error) { return 0, f(time.Since(start)) })
	return time.Since(start), err
}

func TestVerbsWaitForAnAbsentServerAsLongAsTheyShould(t *testing.T) {
	for verb, want := range map[invocation.Command]time.Duration{
		invocation.Add: 20 * time.Second, invocation.Check: 2 * time.Second, invocation.GC: 2 * time.Second, invocation.Status: 0,
	} {
		synctest.Test(t, func(t *testing.T) {
			took, err := endOf(t, verb, func(time.Duration) error { return status.Error(codes.Unavailable, "connection refused") })
			if status.Code(err) != codes.Unavailable || took < want || took > want+reconnectPause {
				t.Errorf("%s: %v after %s, want UNAVAILABLE after %s", verb, err, took, want)
			}
			if !strings.Contains(err.Error(), "/run/x.sock") {
				t.Errorf("%s: %q does not name the socket", verb, err)
			}
			if want == 0 {
				return
			}
			back := want - time.Second/2
			took, err = endOf(t, verb, func(since time.Duration) error {
				if since < back {
					return status.Error(codes.Unavailable, "connection refused")
				}
				return nil
			})
			if err != nil || took > back+reconnectPause {
				t.Errorf("%s: the server came back after %s; %v after %s", verb, back, err, took)
			}
		})
	}
}

func TestRefusedCallComesBackWhenTheServerSaid(t *testing.T) {
	for _, code := range []codes.Code{codes.ResourceExhausted, codes.Unavailable, codes.Aborted} {
		synctest.Test(t, func(t *testing.T) {
			const delay = 100 * time.Millisecond
			var last time.Duration
			calls := 0
			took, err := endOf(t, invocation.Add, func(since time.Duration) error {
				calls++
				if calls > 1 && since-last < delay {
					t.Errorf("call %d came %s after the one before, which was refused for %s", calls, since-last, delay)
				}
				last = since
				if since < timeout-2*time.Second {
					return refusal(code, delay)
				}
				return nil
			})
			if err != nil {
				t.Errorf("%s: %v after %s, though there was a place 2s before the timeout", code, err, took)
			}
			if calls > 100 {
				t.Errorf("%s: %d calls in %s", code, calls, took)
			}

			// For good: the last word is the server's, at the end of the time.
			took, err = endOf(t, invocation.Add, func(time.Duration) error { return refusal(code, delay) })
			if status.Code(err) != code || took < timeout-2*delay || took > timeout {
				t.Errorf("%s: %v after %s", code, err, took)
			}
			// It cannot be in time: an answer now is better.
			took, err = endOf(t, invocation.Add, func(time.Duration) error { return refusal(code, timeout) })
			if status.Code(err) != code || took != 0 {
				t.Errorf("%s, again after the timeout: %v after %s, want it at once", code, err, took)
			}
		})
	}
}

func TestOtherRefusalsAreFinal(t *testing.T) {
	for _, code := range []codes.Code{codes.ResourceExhausted, codes.InvalidArgument, codes.FailedPrecondition, codes.Internal, codes.Aborted} {
		calls := 0
		_, err := endOf(t, invocation.Add, func(time.Duration) error { calls++; return status.Error(code, "no") })
		if calls != 1 || status.Code(err) != code {
			t.Errorf("%s without a delay: %d calls, %v", code, calls, err)
		}
	}
}

// Each of 500 callers at once is served by a server that runs 4 calls of 40 ms
// and lets 8 wait.
func TestBurstIsServedBeforeTheTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const callers, delay, work = 500, 100 * time.Millisecond, 40 * time.Millisecond
		running, places := make(chan struct{}, 4), make(chan struct{}, 12)
		var (
			wg      sync.WaitGroup
			mu      sync.Mutex
			calls   int
			longest time.Duration
		)
		for range callers {
			wg.Go(func() {
				took, err := endOf(t, invocation.Add, func(time.Duration) error {
					mu.Lock()
					calls++
					mu.Unlock()
					select {
					case places <- struct{}{}:
						defer func() { <-places }()
					default:
						return refusal(codes.ResourceExhausted, delay)
					}
					running <- struct{}{}
					defer func() { <-running }()
					<-time.After(work)
					return nil
				})
				mu.Lock()
				defer mu.Unlock()
				longest = max(longest, took)
				if err != nil {
					t.Errorf("after %s: %v", took, err)
				}
			})
		}
		wg.Wait()
		t.Logf("the last of %d was served after %s; %d calls were refused", callers, longest, calls-callers)
		if atBest := callers / 4 * work; longest > 2*atBest {
			t.Errorf("the last of %d was served after %s, at best it is %s", callers, longest, atBest)
		}
		if calls > 20*callers {
			t.Errorf("%d calls for %d callers", calls, callers)
		}
	})
}
