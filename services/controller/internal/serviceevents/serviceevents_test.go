// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package serviceevents

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/controller/internal/policystatus"
	"github.com/sluice-net/sluice/services/controller/internal/subject"
	"github.com/sluice-net/sluice/services/policy/evaluation"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// server has Services and keeps the names of Events, as an API server does.
type server struct {
	mu     sync.Mutex
	uids   map[string]string // guarded by mu; by namespace and name
	kept   map[string]bool   // guarded by mu
	made   []string          // guarded by mu
	notes  []string          // guarded by mu
	asked  int               // guarded by mu
	answer error             // guarded by mu
}

func (s *server) ServiceUID(_ context.Context, namespace, name string) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked++
	if s.answer != nil {
		return "", s.answer
	}
	if uid, ok := s.uids[namespace+"/"+name]; ok {
		return uid, nil
	}
	return "", policystatus.ErrGone
}

func (s *server) Record(_ context.Context, o policystatus.Object, e policystatus.Event) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.kept[o.Namespace+"/"+e.Name] {
		s.kept[o.Namespace+"/"+e.Name] = true
		s.made = append(s.made, fmt.Sprintf("%s/%s@%s %s", o.Namespace, o.Name, o.UID, e.Reason))
		s.notes = append(s.notes, e.Note)
	}
	return nil
}

func (s *server) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	made := s.made
	s.made = nil
	return made
}

// always is elected.
type always struct{}

func (always) While(ctx context.Context, lead func(context.Context)) { lead(ctx) }

type cluster struct {
	*testing.T
	api      *server
	tenants  *shares.Tenants
	services *Services
}

func run(t *testing.T, f func(c *cluster)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c := &cluster{T: t, tenants: shares.NewTenants(shares.Settings{})}
		c.api = &server{uids: map[string]string{"shop/web": "u", "shop/db": "v"}, kept: make(map[string]bool)}
		c.lead(func() { f(c) })
	})
}

// lead runs new Services, as a process that is elected does.
func (c *cluster) lead(f func()) {
	c.services = New(c.api, c.tenants.Of, always{}, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(c.Context())
	done := make(chan error, 1)
	go func() { done <- c.services.Run(ctx) }()
	f()
	cancel()
	if err := <-done; err != nil {
		c.Error(err)
	}
}

func key(namespace, name string) evaluation.Key {
	return evaluation.Key{Kind: "Service", Namespace: namespace, Name: name}
}

// report reports Services on one of three nodes.
func (c *cluster) report(others policystatus.Nodes, keys ...evaluation.Key) {
	all := make(map[evaluation.Key]policystatus.Nodes)
	for _, k := range keys {
		all[k] = policystatus.Nodes{Names: "n1", Count: 1, All: 3, Reason: "9 frontends refuse connections"}
	}
	c.services.SetRefused(all, others)
}

func (c *cluster) wants(want ...string) {
	c.Helper()
	synctest.Wait()
	if made := c.api.take(); !slices.Equal(made, want) {
		c.Errorf("Events %q, want %q", made, want)
	}
}

// TestEachChangeMakesOneEvent: also if reports repeat it, and if another process is elected.
func TestEachChangeMakesOneEvent(t *testing.T) {
	run(t, func(c *cluster) {
		web := key("shop", "web")
		c.report(policystatus.Nodes{}, web)
		c.wants("shop/web@u ExceedsShare")
		const note = "beyond the share of its tenant on 1 of 3 nodes (n1): 9 frontends refuse connections; " +
			"`sluice shares` shows the share"
		if c.api.notes[0] != note {
			t.Errorf("%q, want %q", c.api.notes[0], note)
		}
		c.report(policystatus.Nodes{}, web)
		time.Sleep(time.Hour)
		c.wants()
		c.lead(func() {
			c.report(policystatus.Nodes{}, web)
			c.wants()
			c.report(policystatus.Nodes{UnknownCount: 1}) // it may be left out
			c.report(policystatus.Nodes{UnreadableCount: 1})
			c.wants()
			c.report(policystatus.Nodes{})
			c.report(policystatus.Nodes{}, web)
			c.report(policystatus.Nodes{})
			time.Sleep(spacing)
			c.wants("shop/web@u WithinShare")
			c.report(policystatus.Nodes{}, web)
			time.Sleep(spacing)
			c.wants("shop/web@u ExceedsShare")
		})
	})
}

// TestServiceThatIsGoneGetsNoEvent: neither a deleted one nor one that a node invents. Reports name nothing but
// Services, and no other path of the API.
func TestServiceThatIsGoneGetsNoEvent(t *testing.T) {
	run(t, func(c *cluster) {
		c.report(policystatus.Nodes{}, key("shop", "invented"), key("shop", "web"), key("", "web"), key("shop", "../web"),
			key("..", "web"), evaluation.Key{Kind: "Secret", Namespace: "shop", Name: "db"})
		c.wants("shop/web@u ExceedsShare")
		if c.api.asked != 2 {
			t.Errorf("%d Services were read, want 2", c.api.asked)
		}
		delete(c.api.uids, "shop/web")
		c.report(policystatus.Nodes{})
		time.Sleep(24 * time.Hour)
		c.wants()
		if n := c.services.Status().Pending; n != 0 || len(c.services.services) != 0 {
			t.Errorf("%d wait, %d are remembered", n, len(c.services.services))
		}
		// A Service that was made again is another one, and was never beyond its share.
		c.report(policystatus.Nodes{}, key("shop", "db"))
		c.wants("shop/db@v ExceedsShare")
		c.api.uids["shop/db"] = "new"
		c.report(policystatus.Nodes{})
		time.Sleep(time.Hour)
		c.wants()
	})
}

// TestServicesOfOneTenantNeitherDelayOthersNorFillTheStore: nodes report 1,000 Services of a
// namespace.
func TestServicesOfOneTenantNeitherDelayOthersNorFillTheStore(t *testing.T) {
	run(t, func(c *cluster) {
		var flood []evaluation.Key
		for i := range 1000 {
			k := key("evil", fmt.Sprint("s", i))
			c.api.uids["evil/"+k.Name] = k.Name
			flood = append(flood, k)
		}
		c.report(policystatus.Nodes{}, append(flood, key("shop", "web"))...)
		synctest.Wait()
		made := c.api.take()
		at := slices.Index(made, "shop/web@u ExceedsShare")
		if at < 0 || at > subject.MaxBatch+1 || len(made) != maxEvents+1 {
			t.Errorf("%d Events, the other tenant's is number %d; want %d and at most %d", len(made), at,
				maxEvents+1, subject.MaxBatch+1)
		}
		c.report(policystatus.Nodes{}, append(flood, key("shop", "web"), key("shop", "db"))...)
		c.wants("shop/db@v ExceedsShare")
		for range 3 { // it goes on at the rate of the allowance, also if the set changes all the time
			c.report(policystatus.Nodes{})
			c.report(policystatus.Nodes{}, flood...)
			time.Sleep(refill)
			synctest.Wait()
			other := func(text string) bool { return strings.HasPrefix(text, "shop/") }
			if n := len(slices.DeleteFunc(c.api.take(), other)); n > maxEvents+1 {
				t.Errorf("%d Events in %s, limit %d", n, refill, maxEvents+1)
			}
		}
	})
}

// TestEventThatTheAPIServerDidNotTakeIsMadeLater: after no answer soon, after a rejection once it may help.
func TestEventThatTheAPIServerDidNotTakeIsMadeLater(t *testing.T) {
	for _, answer := range []error{errors.New("connection refused"), policystatus.ErrRefused} {
		run(t, func(c *cluster) {
			c.api.answer = answer
			c.report(policystatus.Nodes{}, key("shop", "web"))
			synctest.Wait()
			c.api.mu.Lock()
			c.api.answer = nil
			c.api.mu.Unlock()
			c.wants()
			time.Sleep(again)
			c.wants("shop/web@u ExceedsShare")
		})
	}
}
