// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package subscription

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// TestPausesGrowWhileStreamsFail checks the pause after each stream, which depends on the error that ended the stream.
func TestPausesGrowWhileStreamsFail(t *testing.T) {
	failed := errors.New("too far behind")
	absent := fmt.Errorf("%w: connection refused", ErrAbsent)
	for what, c := range map[string]struct {
		ends  []error
		lasts time.Duration // duration of each stream
		want  []time.Duration
	}{
		"refused": {
			[]error{failed, failed, failed, failed, failed, failed, failed, failed},
			0,
			[]time.Duration{First, 2 * First, 4 * First, 8 * First, 16 * First, 32 * First, Longest, Longest},
		},
		"away":            {[]error{absent, absent, absent, absent}, 0, []time.Duration{First, Absent, Absent, Absent}},
		"ended by itself": {[]error{failed, failed, ErrAnew, failed}, 0, []time.Duration{First, 2 * First, First, 2 * First}},
		"long streams":    {[]error{failed, failed, failed}, 3 * Longest, []time.Duration{First, First, First}},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				var last time.Time // end of the previous stream
				n := 0
				open := func(context.Context) error {
					if n > 0 {
						if pause := time.Since(last); pause != c.want[n-1] {
							t.Errorf("pause %d is %v, want %v", n, pause, c.want[n-1])
						}
					}
					if n == len(c.ends) {
						cancel()
						return nil
					}
					time.Sleep(c.lasts)
					n++
					return c.ends[n-1]
				}
				ended := func(err error) {
					last = time.Now()
					if !errors.Is(err, c.ends[n-1]) {
						t.Errorf("told %v, want %v", err, c.ends[n-1])
					}
				}
				if err := Keep(ctx, open, ended); !errors.Is(err, context.Canceled) {
					t.Errorf("the end is %v", err)
				}
			})
		})
	}
}

// TestReceiveEndsWithItsStreamOrItsCaller: Receive ends with its stream or its context, and delivers all earlier
// messages.
func TestReceiveEndsWithItsStreamOrItsCaller(t *testing.T) {
	broken := errors.New("broken")
	next := 0
	messages, done := Receive(t.Context(), func() (int, error) {
		next++
		if next > 3 {
			return 0, broken
		}
		return next, nil
	})
	for want := 1; want <= 3; want++ {
		if r := <-messages; r.Message != want || r.Err != nil {
			t.Fatalf("received %+v, want %d", r, want)
		}
	}
	if r := <-messages; !errors.Is(r.Err, broken) {
		t.Errorf("the end is %+v", r)
	}
	<-done
	ctx, cancel := context.WithCancel(t.Context())
	_, done = Receive(ctx, func() (int, error) { return 1, nil })
	cancel()
	<-done
}
