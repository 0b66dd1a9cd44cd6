// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
)

// before is the subscription of a datapath that has already enforced a state.
func before(state []byte, revision uint64, sources ...string) *policyv1.Subscribe {
	s := subscribe("datapath", 301)
	s.Enforced = &policyv1.EnforcedState{State: state, Revision: revision, Sources: sources}
	return s
}

func (s *service) complete() {
	s.t.Helper()
	if err := s.owner.Identities().CompleteIdentities(s.ctx(), map[identity.Numeric]struct{}{300: {}, 301: {}, 302: {}, 9: {}}); err != nil {
		s.t.Fatal(err)
	}
}

func TestStateHasOneNameForItsLife(t *testing.T) {
	s := serve(t)
	s.know(town)
	first := s.watch(subscribe("datapath", 301)).snapshot()
	name := first.barrier.GetState()
	if len(name) != 16 || len(first.barrier.GetSources()) != 0 {
		t.Fatalf("state %x, sources %v; want 16 bytes and none", name, first.barrier.GetSources())
	}
	s.apply(allowWeb)
	first.until("the source", func() bool { return slices.Equal(first.barrier.GetSources(), []string{"grpc"}) })
	s.stop()
	s.start()
	if again := s.watch(subscribe("datapath", 301)).snapshot().barrier; !slices.Equal(again.GetState(), name) || !slices.Equal(again.GetSources(), []string{"grpc"}) {
		t.Errorf("after a restart: state %x, sources %v; want %x, [grpc]", again.GetState(), again.GetSources(), name)
	}
	s.stop()
	if err := os.RemoveAll(s.state); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(s.state, 0o750); err != nil {
		t.Fatal(err)
	}
	s.start()
	if other := s.watch(subscribe("datapath", 301)).snapshot().barrier.GetState(); len(other) != 16 || slices.Equal(other, name) {
		t.Errorf("without its files: state %x, want another name than %x", other, name)
	}
}

// TestBarrierHasTheRevisionOfTheIdentityService, which a check across processes compares with the revision of the
// identity service.
func TestBarrierHasTheRevisionOfTheIdentityService(t *testing.T) {
	s := serve(t)
	f := s.watch(subscribe("datapath", 301)).snapshot()
	if b := f.barrier; len(b.GetIdentityServiceIncarnation()) != 0 || b.GetIdentityServiceRevision() != 0 {
		t.Errorf("before a listing: revision %d of %x", b.GetIdentityServiceRevision(), b.GetIdentityServiceIncarnation())
	}
	if b := f.barrier; b.GetStoreRevision() != nil {
		t.Errorf("before a listing: %v of the store", b.GetStoreRevision())
	}
	at := peer.Revision{Incarnation: "run-of-i", Number: 41, Store: peer.StoreRevision{Cluster: 7, Revision: 100}}
	if err := s.owner.Identities().TakeIdentities(s.ctx(), identitiesOf(t, town), nil, at); err != nil {
		t.Fatal(err)
	}
	f.until("the revision", func() bool { return f.barrier.GetIdentityServiceRevision() == 41 })
	f.look(func() {
		if string(f.barrier.GetIdentityServiceIncarnation()) != "run-of-i" || len(f.words) != len(town) {
			t.Errorf("revision of %q with %d identities, want of run-of-i with %d", f.barrier.GetIdentityServiceIncarnation(), len(f.words), len(town))
		}
	})
	at.Number++ // its content does not matter here
	if err := s.owner.Identities().TakeIdentities(s.ctx(), nil, nil, at); err != nil {
		t.Fatal(err)
	}
	f.until("the next revision", func() bool { return f.barrier.GetIdentityServiceRevision() == 42 })
	if b := s.watch(subscribe("datapath", 301)).snapshot().barrier; b.GetIdentityServiceRevision() != 42 {
		t.Errorf("a new subscriber is at revision %d, want 42", b.GetIdentityServiceRevision())
	}
}

func TestViewsOfTwoNodesAreComparedByTheStore(t *testing.T) {
	s := serve(t)
	at := peer.Revision{Incarnation: "run-of-i", Number: 41, Store: peer.StoreRevision{Cluster: 7, Revision: 100}}
	take := func(revision int64) {
		t.Helper()
		at.Store.Revision = revision
		if err := s.owner.Identities().TakeIdentities(s.ctx(), identitiesOf(t, town), nil, at); err != nil {
			t.Fatal(err)
		}
	}
	take(100)
	var acks atomic.Bool
	acks.Store(true)
	f := s.watch(subscribe("datapath", 301), func(*follower, *policyv1.WatchPolicyTablesResponse) bool {
		return acks.Load()
	}).snapshot()
	is := func(what string, got *identityv1.StoreRevision, revision int64) {
		t.Helper()
		if got.GetClusterId() != 7 || got.GetRevision() != revision {
			t.Errorf("%s: %v, want revision %d of 7", what, got, revision)
		}
	}
	is("the stream", f.barrier.GetStoreRevision(), 100)
	servicetest.Eventually(t, "it is enforced", func() bool {
		w, err := s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{})
		return err == nil && w.GetStoreRevision() != nil
	})
	acks.Store(false)
	take(101)
	f.until("the next revision", func() bool { return f.barrier.GetStoreRevision().GetRevision() == 101 })
	w, err := s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{})
	if err != nil {
		t.Fatal(err)
	}
	is("what is enforced before the acknowledgement", w.GetStoreRevision(), 100)
	table, err := s.GetPolicyTable(s.ctx(), &policyv1.GetPolicyTableRequest{Subject: 301})
	if err != nil {
		t.Fatal(err)
	}
	is("the table", table.GetStoreRevision(), 101)
	st, err := s.GetStatus(s.ctx(), &policyv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	is("the status", st.GetStoreRevision(), 101)
	is("the subscriber", st.GetSubscribers()[0].GetStoreRevision(), 100)
}

func TestBarrierNamesWhatIsNotComplete(t *testing.T) {
	for what, test := range map[string]struct {
		sources []string // sources that had policies
		do      func(*service, *owner.Feed)
		want    []string
	}{
		"nothing happened":             {[]string{"file", "grpc", "grpc/argo"}, func(*service, *owner.Feed) {}, []string{"file", "grpc", "grpc/argo", "identity"}},
		"identities came":              {[]string{"file"}, func(s *service, _ *owner.Feed) { s.complete() }, []string{"file"}},
		"sources are not known":        {nil, func(s *service, _ *owner.Feed) { s.complete() }, []string{"unknown sources"}},
		"another manager has listed":   {[]string{"grpc/argo"}, func(s *service, _ *owner.Feed) { s.complete(); s.replace("flux") }, []string{"grpc/argo"}},
		"the manager has listed":       {[]string{"grpc/argo"}, func(s *service, _ *owner.Feed) { s.complete(); s.replace("argo") }, nil},
		"an apply is no listing":       {[]string{"grpc"}, func(s *service, _ *owner.Feed) { s.complete(); s.apply(allowWeb) }, []string{"grpc"}},
		"the directory was read":       {[]string{"file"}, func(s *service, f *owner.Feed) { s.complete(); s.set(f) }, nil},
		"confirmed":                    {[]string{"file", "grpc"}, func(s *service, _ *owner.Feed) { s.complete(); s.confirm() }, nil},
		"confirmed, sources not known": {nil, func(s *service, _ *owner.Feed) { s.complete(); s.confirm() }, nil},
		"confirmed without identities": {[]string{"grpc"}, func(s *service, _ *owner.Feed) { s.confirm() }, []string{"identity"}},
	} {
		t.Run(what, func(t *testing.T) {
			s := serve(t)
			s.stop()
			s.sources = []string{managed.SourceFile}
			s.start()
			f := s.watch(before(make([]byte, 16), 7, test.sources...)).snapshot()
			test.do(s, s.owner.Feed(managed.SourceFile))
			f.until("the answer", func() bool { return slices.Equal(f.barrier.GetIncomplete(), test.want) })
			// A new subscriber gets the same state.
			f.leave()
			g := s.watch(before(make([]byte, 16), 7, test.sources...)).snapshot()
			if got := g.barrier.GetIncomplete(); !slices.Equal(got, test.want) {
				t.Errorf("incomplete: %v, want %v", got, test.want)
			}
		})
	}
}

func (s *service) replace(manager string) {
	s.t.Helper()
	if _, err := s.ReplacePolicies(s.ctx(), &policyv1.ReplacePoliciesRequest{Manager: manager}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *service) set(f *owner.Feed) {
	s.t.Helper()
	if err := f.Set(s.ctx(), nil); err != nil {
		s.t.Fatal(err)
	}
}

func (s *service) confirm() *policyv1.ConfirmPoliciesResponse {
	s.t.Helper()
	out, err := s.ConfirmPolicies(s.ctx(), &policyv1.ConfirmPoliciesRequest{})
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

func TestCallersAreToldOfAHeldState(t *testing.T) {
	s := serve(t, func(c *owner.Config) { c.Stream.Unacked, c.Stream.Stall = 4, time.Minute })
	s.know(town)
	s.complete()
	sub := before(make([]byte, 16), 7, "grpc")
	sub.Subjects = []uint32{300, 301}
	var holds atomic.Int64
	f := s.watch(sub, func(f *follower, m *policyv1.WatchPolicyTablesResponse) bool {
		for _, step := range m.GetSteps() {
			if b := step.GetBarrier(); len(b.GetIncomplete()) > 0 {
				f.Send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Hold{Hold: &policyv1.Hold{ //nolint:errcheck // Recv returns the error
					Seq: m.GetSeq(), Revision: 7, Reason: "the state is another one",
				}}})
				holds.Add(1)
				return false
			}
		}
		return true
	}).snapshot()
	s.eventually("held before the changes", func(st *policyv1.GetStatusResponse) bool {
		return st.GetSubscribers()[0].GetHeld() != ""
	})
	var revision uint64
	first := holds.Load()
	for i := range int64(12) { // more than the limit of unacknowledged barriers
		revision = s.apply(named(string(rune('a'+i)), allowWeb)).GetRevision()
		// A burst of changes that the follower cannot read in time would exceed the limit of four unacknowledged
		// barriers. So wait until the subscriber reports each one.
		servicetest.Eventually(t, "the subscriber says that it holds", func() bool { return holds.Load() > first+i })
	}
	_, err := s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: revision})
	wantCode(t, err, codes.FailedPrecondition, "an earlier state stays enforced: datapath: the state is another one")
	s.apply(learnWeb)
	_, err = s.LearnNames(s.ctx(), &policyv1.LearnNamesRequest{Name: "api.example.com", Addresses: []string{"192.0.2.7"}})
	wantCode(t, err, codes.FailedPrecondition, "an earlier state stays enforced")
	f.until("the learned name", func() bool { return f.barrier.GetAddressRevision() > 0 })
	s.eventually("held", func(st *policyv1.GetStatusResponse) bool {
		sub := st.GetSubscribers()[0]
		return sub.GetConnected() && sub.GetHeld() == "the state is another one" && sub.GetRevision() == 7
	})
	if out := s.confirm(); !slices.Equal(out.GetHeld(), []string{"datapath: the state is another one"}) || out.GetPolicies() != 13 || out.GetRevision() != revision+1 {
		t.Errorf("confirmation: %v", out)
	}
	if out, err := s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: revision + 1}); err != nil || !slices.Equal(out.GetEnforcing(), []string{"datapath"}) {
		t.Errorf("after the confirmation: %v, %v", out, err)
	}
	s.eventually("enforced", func(st *policyv1.GetStatusResponse) bool {
		sub := st.GetSubscribers()[0]
		return sub.GetHeld() == "" && sub.GetRevision() == revision+1
	})
	f.send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Hold{Hold: &policyv1.Hold{Seq: 1 << 50}}})
	<-f.ended
	wantCode(t, f.err, codes.InvalidArgument, "")
}
