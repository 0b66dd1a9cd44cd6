// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lbipam

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/controller/internal/policystatus"
)

// server is an API server with Services and pools.
type server struct {
	t *testing.T

	mu       sync.Mutex
	to       *Allocator
	services map[Key]*Service // guarded by mu
	version  int              // guarded by mu
	fault    error            // guarded by mu; writes take effect and fail with it
	silent   bool             // guarded by mu; changes are not reported
	writes   int              // guarded by mu
}

func (s *server) SetService(_ context.Context, k Key, uid, version string, ingress, conditions []byte) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writes++
	old := s.services[k]
	switch {
	case old == nil || old.UID != uid:
		return version, policystatus.ErrGone
	case old.ResourceVersion != version:
		return version, policystatus.ErrChanged
	}
	written := *old
	written.Ingress, written.Conditions = nil, nil
	var entries []struct{ IP netip.Addr }
	if err := errors.Join(json.Unmarshal(ingress, &entries), json.Unmarshal(conditions, &written.Conditions)); err != nil {
		s.t.Error(err)
	}
	for _, e := range entries {
		written.Ingress = append(written.Ingress, e.IP)
	}
	s.put(&written)
	if s.fault != nil {
		return version, s.fault
	}
	return written.ResourceVersion, nil
}

func (s *server) SetPool(_ context.Context, _, _, version string, _ []byte) (string, error) {
	return version, nil
}

// put stores a Service and reports it. Called with mu held.
func (s *server) put(x *Service) {
	s.version++
	x.ResourceVersion = strconv.Itoa(s.version)
	s.services[x.Key] = x
	if !s.silent {
		report := *x
		go s.to.UpsertService(&report)
	}
}

// set changes the server.
func (s *server) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

// wants waits and compares the addresses of all Services.
func (s *server) wants(what, want string) {
	s.t.Helper()
	time.Sleep(time.Minute) // in a bubble: all retries have happened
	s.mu.Lock()
	defer s.mu.Unlock()
	var got []string
	for _, name := range []string{"x", "y", "z"} {
		if x := s.services[Key{"a", name}]; x != nil {
			got = append(got, fmt.Sprint(name, x.Ingress))
		}
	}
	if got := strings.Join(got, " "); got != want {
		s.t.Errorf("%s: %s, want %s", what, got, want)
	}
}

type always struct{}

func (always) While(ctx context.Context, lead func(context.Context)) { lead(ctx) }

// TestUncertainWritesMoveNoAddress: a write may take effect although it fails, and reports of the API server may be
// late. Meanwhile no other Service gets the address, and the stored status is not written again.
func TestUncertainWritesMoveNoAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{t: t, services: make(map[Key]*Service)}
		a := New(s, true, func(string) shares.Tenant { return shares.System }, always{}, slog.New(slog.DiscardHandler))
		s.to = a
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- a.Run(ctx) }()
		a.UpsertPool(newPool(t, "p", 0, "192.0.2.0/30"))
		s.set(func() { s.put(newService("a/y", 2)) })
		a.SetListed(Services, true)
		a.SetListed(Pools, true)
		s.wants("before the Nodes are known", "y[]")
		a.SetListed(Nodes, true)
		s.wants("once they are", "y[192.0.2.0]")

		s.set(func() { s.silent, s.fault = true, errors.New("no answer") })
		s.set(func() { s.put(newService("a/z", 3)) })
		s.set(func() { s.silent = false })
		late := *s.services[Key{"a", "z"}]
		s.set(func() { s.silent = true })
		a.UpsertService(&late)
		time.Sleep(time.Second)
		s.set(func() { s.fault = nil })
		early := newService("a/x", 1) // older than both, and known before the write of z
		s.set(func() { s.put(early) })
		known := *early
		a.UpsertService(&known)
		time.Sleep(time.Second)
		s.set(func() {
			s.silent = false
			for _, x := range s.services {
				report := *x
				go a.UpsertService(&report)
			}
		})
		s.wants("an older Service takes no address", "x[192.0.2.2] y[192.0.2.0] z[192.0.2.1]")

		s.set(func() { s.writes = 0 })
		a.UpsertService(&late) // older than the version that was written
		for range 3 {
			a.SetListed(Services, true)
			time.Sleep(time.Second)
		}
		s.wants("a late report", "x[192.0.2.2] y[192.0.2.0] z[192.0.2.1]")
		s.set(func() {
			if s.writes > 1 {
				t.Errorf("%d writes after a late report", s.writes)
			}
		})
		a.SetListed(Pools, false)
		s.set(func() { s.put(newService("a/x", 1)) })
		s.wants("without knowledge of the pools", "x[] y[192.0.2.0] z[192.0.2.1]")
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
