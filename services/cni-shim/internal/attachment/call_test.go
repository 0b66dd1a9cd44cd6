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

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	"github.com/sluice-net/sluice/services/cni-shim/internal/invocation"
	"github.com/sluice-net/sluice/services/cni-shim/internal/message"
	"github.com/sluice-net/sluice/services/cni-shim/internal/unary"
)

const timeout = 30 * time.Second // the configuration's default

func refusal(code unary.Code, delay time.Duration) error {
	d := message.Duration{Seconds: int64(delay / time.Second), Nanos: int32(delay % time.Second)}
	return &unary.Error{Code: code, Message: "4 calls running, 8 waiting", Details: []*message.Any{
		{TypeURL: "type.googleapis.com/google.rpc.RetryInfo", Value: message.Marshal(&message.RetryInfo{RetryDelay: d})},
	}}
}

func without(code unary.Code, text string) error { return &unary.Error{Code: code, Message: text} }

// endOf makes a call as the verb does, with f as one attempt. It returns the error and the duration of the call by the
// clock of the synctest bubble.
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
			took, err := endOf(t, verb, func(time.Duration) error { return without(unary.Unavailable, "connection refused") })
			if unary.CodeOf(err) != unary.Unavailable || took < want || took > want+reconnectPause {
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
					return without(unary.Unavailable, "connection refused")
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
	for _, code := range []unary.Code{unary.ResourceExhausted, unary.Unavailable, unary.Aborted} {
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
			if unary.CodeOf(err) != code || took < timeout-2*delay || took > timeout {
				t.Errorf("%s: %v after %s", code, err, took)
			}
			// It cannot be in time: an answer now is better.
			took, err = endOf(t, invocation.Add, func(time.Duration) error { return refusal(code, timeout) })
			if unary.CodeOf(err) != code || took != 0 {
				t.Errorf("%s, again after the timeout: %v after %s, want it at once", code, err, took)
			}
		})
	}
}

// TestPatienceBeginsWhenTheServerGoesAway lets the server refuse between two absences, which
// are together longer than the patience.
func TestPatienceBeginsWhenTheServerGoesAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		took, err := endOf(t, invocation.Add, func(since time.Duration) error {
			switch {
			case since < 10*time.Second, since > 12*time.Second && since < 25*time.Second:
				return without(unary.Unavailable, "connection refused")
			case since <= 12*time.Second:
				return refusal(unary.ResourceExhausted, 100*time.Millisecond)
			}
			return nil
		})
		if err != nil || took < 25*time.Second {
			t.Errorf("%v after %s, want no error after 25s", err, took)
		}
	})
}

// TestRefusedCallLeavesTimeForAnotherTry draws pauses near the deadline.
func TestRefusedCallLeavesTimeForAnotherTry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const left, delay = 4 * time.Second, time.Second
		ctx, cancel := context.WithTimeout(t.Context(), left)
		defer cancel()
		for range 1000 {
			wait, ok := pause(ctx, delay, 10*mostSpread)
			if most := delay + (left-delay)/2; !ok || wait < delay || wait > most {
				t.Fatalf("pause of %s, %t, want one from %s to %s", wait, ok, delay, most)
			}
		}
	})
}

func TestOtherRefusalsAreFinal(t *testing.T) {
	for _, code := range []unary.Code{unary.ResourceExhausted, unary.InvalidArgument, unary.FailedPrecondition, unary.Internal, unary.Aborted} {
		calls := 0
		_, err := endOf(t, invocation.Add, func(time.Duration) error { calls++; return without(code, "no") })
		if calls != 1 || unary.CodeOf(err) != code {
			t.Errorf("%s without a delay: %d calls, %v", code, calls, err)
		}
	}
}

// TestBurstIsServedBeforeTheTimeout: each of 500 callers at once is served by a server that runs 4 calls of 40 ms and
// lets 8 wait.
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
						return refusal(unary.ResourceExhausted, delay)
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

func TestReasonsAreThoseOfTheServices(t *testing.T) {
	for reason, want := range map[string]rpcerr.Reason{
		reasonNamespaceUnusable:  rpcerr.Of(datapathv1.ErrorReason_ERROR_REASON_NETWORK_NAMESPACE_UNUSABLE),
		reasonNamespaceRemoved:   rpcerr.Of(datapathv1.ErrorReason_ERROR_REASON_NETWORK_NAMESPACE_REMOVED),
		reasonSecondInterface:    rpcerr.Of(datapathv1.ErrorReason_ERROR_REASON_SECOND_INTERFACE_REFUSED),
		reasonInterfaceNameTaken: rpcerr.Of(datapathv1.ErrorReason_ERROR_REASON_INTERFACE_NAME_TAKEN),
		reasonAddressInUse:       rpcerr.Of(datapathv1.ErrorReason_ERROR_REASON_ADDRESS_IN_USE),
		reasonLeaseLost:          rpcerr.Of(datapathv1.ErrorReason_ERROR_REASON_LEASE_LOST),
		reasonAllocationNotFound: rpcerr.Of(ipamv1.ErrorReason_ERROR_REASON_ALLOCATION_NOT_FOUND),
		reasonAddressesDiffer:    rpcerr.Of(ipamv1.ErrorReason_ERROR_REASON_ADDRESSES_DIFFER),
		reasonAddressUnavailable: rpcerr.Of(ipamv1.ErrorReason_ERROR_REASON_ADDRESS_UNAVAILABLE),
	} {
		if reason != want.String() {
			t.Errorf("%s is %s", reason, want)
		}
	}
}
