// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kinds

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const (
	networks = "networking.k8s.io/v1/networkpolicies"
	groups   = "cilium.io/v2/ciliumcidrgroups"
)

// server is an API server with some kinds.
type server struct {
	mu    sync.Mutex
	kinds []string // guarded by mu
	all   bool     // guarded by mu
	fault error    // guarded by mu
	looks int      // guarded by mu
}

func (s *server) set(all bool, fault error, kinds ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kinds, s.all, s.fault = kinds, all, fault
}

func (s *server) Look(context.Context) ([]string, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.looks++
	return s.kinds, s.all, s.fault
}

// take returns the number of queries since the last call.
func (s *server) take() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	looks := s.looks
	s.looks = 0
	return looks
}

// board is a Board that keeps the published kinds.
type board struct {
	mu        sync.Mutex
	kinds     []string             // guarded by mu
	published bool                 // guarded by mu
	told      func([]string, bool) // guarded by mu
	fault     error                // guarded by mu
	calls     int                  // guarded by mu
}

func (b *board) Watch(ctx context.Context, told func([]string, bool)) {
	b.mu.Lock()
	b.told = told
	told(b.kinds, b.published)
	b.mu.Unlock()
	<-ctx.Done()
}

func (b *board) Publish(_ context.Context, kinds []string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls++
	if b.fault != nil {
		return b.fault
	}
	b.kinds, b.published = kinds, true
	if b.told != nil { // Watch was called
		b.told(kinds, true)
	}
	return nil
}

func (b *board) set(fault error, published bool, kinds ...string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fault, b.kinds, b.published = fault, kinds, published
	b.told(kinds, published)
}

func (b *board) wants(t *testing.T, what string, calls int, kinds ...string) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if !slices.Equal(b.kinds, kinds) || b.calls != calls {
		t.Errorf("%s: the board shows %q after %d calls, want %q after %d", what, b.kinds, b.calls, kinds, calls)
	}
	b.calls = 0
}

// elected is the Leadership of the only candidate. The candidate is not elected while the channel is nil.
type elected struct{ yes chan struct{} }

func (e elected) While(ctx context.Context, lead func(context.Context)) {
	select {
	case <-e.yes:
		lead(ctx)
	case <-ctx.Done():
	}
}

// run runs steps while Kinds runs.
func run(t *testing.T, leads bool, steps func(s *server, b *board, k *Kinds, pass func(time.Duration))) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		e := elected{}
		if leads {
			e.yes = make(chan struct{})
			close(e.yes)
		}
		s, b := &server{kinds: []string{networks}}, &board{}
		k := New(s, b, e, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- k.Run(ctx) }()
		steps(s, b, k, func(d time.Duration) { time.Sleep(d); synctest.Wait() })
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestElectedProcessPublishesWhatItFinds: the elected process publishes the kinds within seconds, once, and again if
// the board loses them.
func TestElectedProcessPublishesWhatItFinds(t *testing.T) {
	run(t, true, func(s *server, b *board, k *Kinds, pass func(time.Duration)) {
		pass(time.Second)
		b.wants(t, "at first", 1, networks)
		pass(time.Minute)
		b.wants(t, "a minute later", 0, networks)
		s.set(false, nil, groups, networks)
		pass(5 * time.Second)
		b.wants(t, "a new kind", 1, groups, networks)
		b.set(nil, false)
		pass(2 * time.Second)
		b.wants(t, "the board was empty", 1, groups, networks)
		b.set(nil, true, networks)
		pass(2 * time.Second)
		b.wants(t, "another process has published", 1, groups, networks)
		s.set(false, errors.New("away"))
		pass(time.Minute)
		b.wants(t, "the API server is unavailable", 0, groups, networks)
		s.set(false, nil, groups, networks)
		b.set(errors.New("away"), true, networks)
		pass(time.Minute)
		if st := k.Status(); st.Pending != 1 || st.Problem != "away" || st.Failed == 0 {
			t.Errorf("the status is %+v", st)
		}
		b.set(nil, true, networks)
		pass(5 * time.Second)
		if st := k.Status(); st.Pending != 0 || st.Problem != "" {
			t.Errorf("the status is %+v", st)
		}
	})
}

// TestElectedProcessLooksOftenWhileAKindMayAppear: the elected process queries the API server often while a kind is
// missing, and rarely once it has every kind.
func TestElectedProcessLooksOftenWhileAKindMayAppear(t *testing.T) {
	run(t, true, func(s *server, _ *board, _ *Kinds, pass func(time.Duration)) {
		pass(time.Minute)
		s.take()
		pass(time.Hour)
		if n := s.take(); n < 800 || n > 1200 { // every 3 to 4.5 s
			t.Errorf("%d queries in an hour while a kind is missing", n)
		}
		s.set(true, nil, groups, networks)
		pass(time.Minute)
		s.take()
		pass(time.Hour)
		if n := s.take(); n < 80 || n > 120 {
			t.Errorf("%d queries in an hour", n)
		}
	})
}

// TestOtherProcessesFollowTheBoard: processes that are not elected neither query nor publish.
func TestOtherProcessesFollowTheBoard(t *testing.T) {
	run(t, false, func(s *server, b *board, k *Kinds, pass func(time.Duration)) {
		var mu sync.Mutex
		var last []string
		ctx, cancel := context.WithCancel(context.Background()) // the context of t belongs to no bubble
		done := make(chan struct{})
		go func() {
			defer close(done)
			k.Watch(ctx, func(kinds []string, _ bool) {
				mu.Lock()
				defer mu.Unlock()
				last = kinds
			})
		}()
		pass(time.Hour)
		b.set(nil, true, networks)
		pass(time.Hour)
		b.wants(t, "as a follower", 0, networks)
		mu.Lock()
		if !slices.Equal(last, []string{networks}) || s.take() != 0 {
			t.Errorf("told %q, but queried the API server", last)
		}
		mu.Unlock()
		cancel()
		<-done
	})
}

// TestWatchTellsWhatWasFoundThoughTheBoardIsAway: Watch reports the found kinds even while the board is unavailable,
// so that the status of policies of a new kind does not depend on etcd.
func TestWatchTellsWhatWasFoundThoughTheBoardIsAway(t *testing.T) {
	run(t, true, func(s *server, b *board, k *Kinds, pass func(time.Duration)) {
		pass(time.Second)
		told := make(chan []string, 100)
		ctx, cancel := context.WithCancel(context.Background()) // the context of t belongs to no bubble
		done := make(chan struct{})
		go func() {
			defer close(done)
			k.Watch(ctx, func(kinds []string, _ bool) { told <- kinds })
		}()
		b.set(errors.New("away"), false)
		s.set(false, nil, groups, networks)
		pass(5 * time.Second)
		cancel()
		<-done
		var last []string
		for len(told) > 0 {
			last = <-told
		}
		if !slices.Equal(last, []string{groups, networks}) {
			t.Errorf("told %q", last)
		}
	})
}
