// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/desired/subscription"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

// away is a service that is unreachable until a time of the fake clock.
type away struct {
	script
	back  time.Time
	tries int
}

func (s *away) Subscribe(ctx context.Context, sub policystream.Subscription) (policystream.Stream, error) {
	s.tries++
	if time.Now().Before(s.back) {
		return nil, errors.New("connection refused")
	}
	return s.script.Subscribe(ctx, sub)
}

// TestServiceThatIsBackIsSubscribedToAtOnce: a creation waits for the tables of its identity, which need the
// subscription.
func TestServiceThatIsBackIsSubscribedToAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &away{script: script{subscribed: make(chan *scripted)}, back: time.Now().Add(time.Minute)}
		a := New(Config{Name: "test", Kernel: newFakeKernel(), Service: s, Now: time.Now})
		if err := a.Adopt(func(uint16) bool { return true }, auditmode.Audited{}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- a.Run(ctx) }()
		<-s.subscribed
		if late := time.Since(s.back); late > 100*time.Millisecond {
			t.Errorf("the service was back for %s", late)
		}
		if s.tries > 700 {
			t.Errorf("%d tries in a minute", s.tries)
		}
		cancel()
		<-done
	})
}

// TestServiceThatEndsSubscriptionsIsAskedLessOften: a service that answers but ends each subscription is called less
// and less often.
func TestServiceThatEndsSubscriptionsIsAskedLessOften(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{subscribed: make(chan *scripted)}
		a := New(Config{Name: "test", Kernel: newFakeKernel(), Service: s, Now: time.Now})
		if err := a.Adopt(func(uint16) bool { return true }, auditmode.Audited{}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- a.Run(ctx) }()
		last := time.Now()
		for range 10 {
			st := <-s.subscribed
			last = time.Now()
			st.end <- errors.New("too far behind")
		}
		<-s.subscribed
		if pause := time.Since(last); pause < subscription.Longest {
			t.Errorf("the eleventh came after %s", pause)
		}
		cancel()
		<-done
	})
}
