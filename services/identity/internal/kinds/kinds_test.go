// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kinds

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// cluster is a Store.
type cluster struct {
	mu    sync.Mutex
	state State       // guarded by mu
	sink  func(State) // guarded by mu
	away  error       // guarded by mu
	ended chan error
}

func (c *cluster) PublishKinds(_ context.Context, kinds []string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.away != nil {
		return c.away
	}
	c.state = State{Published: true, Kinds: kinds}
	if c.sink != nil {
		c.sink(c.state)
	}
	return nil
}

func (c *cluster) FollowKinds(ctx context.Context, sink func(State)) error {
	c.mu.Lock()
	if c.away != nil {
		defer c.mu.Unlock()
		return c.away
	}
	c.sink = sink
	sink(c.state)
	c.mu.Unlock()
	select {
	case err := <-c.ended:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func TestBoardHasWhatTheStoreHadLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &cluster{ended: make(chan error), away: errors.New("away")}
		b := New(c, log.Discard())
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- b.Run(ctx) }()
		want := func(what string, read bool, state State) {
			t.Helper()
			synctest.Wait()
			if s, r, _ := b.State(); r != read || !s.Equal(state) {
				t.Errorf("%s: %+v, read %t, want %+v, %t", what, s, r, state, read)
			}
		}
		time.Sleep(time.Minute)
		want("the store is unavailable", false, State{})
		if err := b.Publish(ctx, []string{"g/v1/k"}); err == nil {
			t.Error("a publication without a store succeeds")
		}
		c.mu.Lock()
		c.away = nil
		c.mu.Unlock()
		time.Sleep(2 * retry)
		want("before a publication", true, State{})
		_, _, changed := b.State()
		if err := b.Publish(ctx, []string{"g/v1/z", "g/v1/k"}); err != nil {
			t.Fatal(err)
		}
		<-changed
		want("published", true, State{true, []string{"g/v1/k", "g/v1/z"}})
		_, _, changed = b.State()
		if err := b.Publish(ctx, []string{"g/v1/k", "g/v1/z"}); err != nil {
			t.Fatal(err)
		}
		select {
		case <-changed:
			t.Error("the same kinds are a change")
		default:
		}
		c.ended <- errors.New("gap")
		c.mu.Lock()
		c.state = State{true, nil}
		c.mu.Unlock()
		want("the store has failed", true, State{true, []string{"g/v1/k", "g/v1/z"}})
		time.Sleep(2 * retry)
		want("it is read again", true, State{true, nil})
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("it ended with %v", err)
		}
	})
}

func TestKindsHaveThreeParts(t *testing.T) {
	b := New(&cluster{}, log.Discard())
	for _, kind := range []string{"", "v1/pods", "g/v1/", "//", "a/b/c/d", "g/v 1/k", "g/v1/k\n", "g/v1/ké"} {
		if err := b.Publish(t.Context(), []string{"g/v1/k", kind}); !errors.Is(err, ErrMalformed) {
			t.Errorf("%q: %v, want a refusal", kind, err)
		}
	}
	given := []string{"b/v1/k", "a/v1/k"}
	if err := b.Publish(t.Context(), given); err != nil || slices.IsSorted(given) {
		t.Errorf("%v, and the caller's list is %q", err, given)
	}
}
