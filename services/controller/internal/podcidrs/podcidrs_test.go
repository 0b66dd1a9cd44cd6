// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package podcidrs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// identity is a Publisher that records its calls.
type identity struct {
	away atomic.Bool

	mu    sync.Mutex
	calls []string // guarded by mu
}

// take returns the calls since the last take.
func (i *identity) take() (calls []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	calls, i.calls = i.calls, nil
	return calls
}

func (i *identity) PublishPodCIDRs(_ context.Context, nodes map[string][]netip.Prefix) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.calls = append(i.calls, fmt.Sprint(nodes))
	if i.away.Load() {
		return errors.New("away")
	}
	return nil
}

// always is the Leadership of the only candidate.
type always struct{}

func (always) While(ctx context.Context, lead func(context.Context)) { lead(ctx) }

// led runs steps while nodes lead.
func led(t *testing.T, steps func(i *identity, n *Nodes)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		i := &identity{}
		n := New(i, always{}, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			if err := n.Run(ctx); err != nil {
				t.Error(err)
			}
		}()
		steps(i, n)
		cancel()
		<-done
	})
}

// pass advances the clock of the test.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestNothingIsPublishedBeforeAllNodesAreKnown(t *testing.T) {
	led(t, func(i *identity, n *Nodes) {
		n.Upsert("a", []string{"10.0.1.0/24"})
		pass(time.Hour)
		n.Failed(errors.New("away"))
		n.Complete()
		pass(time.Hour)
		if calls := i.take(); len(calls) != 0 {
			t.Errorf("published is %q", calls)
		}
		n.Failed(nil)
		pass(time.Second)
		if calls, want := i.take(), []string{"map[a:[10.0.1.0/24]]"}; !slices.Equal(calls, want) {
			t.Errorf("published: %q, want %q", calls, want)
		}
	})
}

func TestChangesArePublishedInGroups(t *testing.T) {
	led(t, func(i *identity, n *Nodes) {
		n.Complete()
		pass(time.Second)
		i.take()
		for k := range 10 {
			n.Upsert(fmt.Sprint("n", k), []string{fmt.Sprintf("10.0.%d.0/24", k), fmt.Sprintf("fd00:0:0:%d::/64", k)})
			n.Upsert(fmt.Sprint("n", k), []string{fmt.Sprintf("10.0.%d.0/24", k), fmt.Sprintf("fd00:0:0:%d::/64", k)})
		}
		pass(time.Second)
		for k := range 9 {
			n.Delete(fmt.Sprint("n", k))
		}
		n.Upsert("n9", nil) // without podCIDRs, as a new Node
		pass(time.Second)
		if calls := i.take(); len(calls) != 2 || calls[1] != "map[n9:[]]" {
			t.Errorf("published is %q", calls)
		}
	})
}

func TestPodCIDRsArePublishedAgain(t *testing.T) {
	led(t, func(i *identity, n *Nodes) {
		i.away.Store(true)
		n.Complete()
		pass(time.Hour)
		if tries := len(i.take()); tries < 100 || tries > 200 {
			t.Errorf("%d tries in an hour while the identity service is down", tries)
		}
		n.Upsert("a", []string{"10.0.1.0/24"})
		pass(time.Second)
		if s := n.Status(); s.Pending != 1 || s.Failed < 100 || s.Problem != "away" {
			t.Errorf("the status is %+v", s)
		}
		i.away.Store(false)
		pass(time.Minute)
		if s := n.Status(); s.Pending != 0 || s.Done == 0 || s.Problem != "" {
			t.Errorf("the status is %+v", s)
		}
		i.take()
		pass(time.Hour)
		if n := len(i.take()); n != 120 {
			t.Errorf("%d calls in an hour", n)
		}
	})
}

func TestMalformedPodCIDRsStopNoOtherNode(t *testing.T) {
	led(t, func(i *identity, n *Nodes) {
		pass(time.Second) // until the process leads
		n.Upsert("a", []string{"10.0.1.0/24"})
		n.Upsert("b", []string{"10.0.2.1/24", "010.0.3.0/24", "", "::ffff:10.0.0.0/120", "fd00:0:0:2::/64"})
		n.Complete()
		pass(time.Second)
		want := []string{"map[a:[10.0.1.0/24] b:[fd00:0:0:2::/64]]"}
		if calls := i.take(); !slices.Equal(calls, want) {
			t.Errorf("published: %q, want %q", calls, want)
		}
	})
}
