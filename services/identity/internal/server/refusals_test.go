// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"sync"
	"testing"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/identity/internal/refusals"
)

// refusalsStore is a refusals.Store in memory of one node, "here".
type refusalsStore struct {
	mu      sync.Mutex
	reports map[string]refusals.Report // guarded by mu
	node    func(string, refusals.Subject, refusals.Report)
}

func (s *refusalsStore) ReportRefusals(_ context.Context, subject refusals.Subject, r refusals.Report) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if subject == refusals.Policies {
		s.reports["here"] = r
	}
	if s.node != nil {
		s.node("here", subject, r)
	}
	return nil
}

func (s *refusalsStore) FollowRefusals(ctx context.Context, sink refusals.Sink) error {
	s.mu.Lock()
	sink.Begin()
	for node, r := range s.reports {
		sink.Node(node, refusals.Policies, r)
	}
	sink.Complete()
	s.node = sink.Node
	s.mu.Unlock()
	<-ctx.Done()
	return nil
}

func TestRefusalsOfANodeAreWatched(t *testing.T) {
	s := serve(t)
	report := func(names ...string) {
		t.Helper()
		req := &identityv1.ReportRefusalsRequest{Omitted: 3, OmittedReasons: map[string]uint32{"NotStored": 3}}
		for _, name := range names {
			x := &identityv1.PolicyRefusal{Kind: "NetworkPolicy", Namespace: "shop", Name: name, Reason: "too large"}
			req.Refusals = append(req.Refusals, x)
		}
		if _, err := s.cluster.ReportRefusals(t.Context(), req); err != nil {
			t.Fatal(err)
		}
	}
	report("a")
	stream, err := s.cluster.WatchRefusals(t.Context(), &identityv1.WatchRefusalsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	want := func(node, name string, complete bool) {
		t.Helper()
		m, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		for _, r := range m.GetRefusals() {
			got += r.GetNamespace() + "/" + r.GetName() + ": " + r.GetReason()
		}
		if !complete && (m.GetOmitted() != 3 || m.GetOmittedReasons()["NotStored"] != 3) {
			t.Errorf("%v, want 3 omitted policies that are not stored", m)
		}
		if m.GetNode() != node || got != name || m.GetComplete() != complete {
			t.Errorf("%v, want %s %s, complete %t", m, node, name, complete)
		}
	}
	want("here", "shop/a: too large", false)
	want("", "", true)
	report("b")
	want("here", "shop/b: too large", false)
	report()
	want("here", "", false)
	store, _ := s.impl.Cluster.Refusals.(*refusalsStore)
	store.mu.Lock()
	store.node("there", refusals.Policies, refusals.Report{Corrupt: true})
	store.mu.Unlock()
	if m, err := stream.Recv(); err != nil || m.GetNode() != "there" || !m.GetUnreadable() || m.GetOmitted() != 1 {
		t.Errorf("a corrupt report: %v, %v", m, err)
	}
}

// TestReportsAboutServicesAreForWatchersThatAskForThem: an earlier controller would take the report about Services for
// the report of the node about policies.
func TestReportsAboutServicesAreForWatchersThatAskForThem(t *testing.T) {
	s := serve(t)
	store, _ := s.impl.Cluster.Refusals.(*refusalsStore)
	services := identityv1.RefusalSubject_REFUSAL_SUBJECT_SERVICES
	for _, asks := range []bool{false, true} {
		ctx, cancel := context.WithCancel(t.Context())
		stream, err := s.cluster.WatchRefusals(ctx, &identityv1.WatchRefusalsRequest{Services: asks})
		if err != nil {
			t.Fatal(err)
		}
		if m, err := stream.Recv(); err != nil || !m.GetComplete() {
			t.Fatalf("%v, %v, want that the empty list is complete", m, err)
		}
		x := &identityv1.PolicyRefusal{Kind: "Service", Namespace: "shop", Name: "web", Reason: "frontends"}
		req := &identityv1.ReportRefusalsRequest{Subject: services, Refusals: []*identityv1.PolicyRefusal{x}}
		if _, err := s.cluster.ReportRefusals(t.Context(), req); err != nil {
			t.Fatal(err)
		}
		store.mu.Lock()
		store.node("there", refusals.Policies, refusals.Report{Corrupt: true})
		store.mu.Unlock()
		if asks {
			m, err := stream.Recv()
			if err != nil || m.GetSubject() != services || m.GetNode() != "here" || len(m.GetRefusals()) != 1 {
				t.Errorf("%v, %v, want the report about Services", m, err)
			}
		}
		if m, err := stream.Recv(); err != nil || m.GetSubject() == services || m.GetNode() != "there" {
			t.Errorf("%v, %v, want the report about policies", m, err)
		}
		cancel()
	}
}
