// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"sync"
	"testing"

	"github.com/sluice-net/sluice/kit/rpc/client"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/proto/wire/policywire"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
)

// TestDatapathGoesOnBesideManySubscribersThatNeverRead: during many changes, more subscribers than the limit connect
// and never read. The datapath still receives all changes, and each call returns.
func TestDatapathGoesOnBesideManySubscribersThatNeverRead(t *testing.T) {
	s := serve(t, func(c *owner.Config) {
		c.Stream.Message, c.Stream.Behind, c.Stream.Resume = 16<<10, 256<<10, 64<<10
	})
	s.know(town)
	for i := range 64 {
		conn, err := client.Dial(filepath.Join(s.dir, "s"), client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		w, err := policyv1.NewPolicyServiceClient(conn).WatchPolicyTables(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		sub := &policyv1.Subscribe{Name: fmt.Sprint("stuck", i), Subjects: []uint32{301}, Role: policyv1.SubscriberRole_SUBSCRIBER_ROLE_WATCHES, Formats: []policyv1.TableFormat{policywire.Format}}
		if err := w.Send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Subscribe{Subscribe: sub}}); err != nil {
			t.Fatal(err)
		}
	}
	s.eventually("the maximum number of subscribers is connected",
		func(st *policyv1.GetStatusResponse) bool { return len(st.GetSubscribers()) == 16 })
	f := s.watch(subscribe("datapath", 301)).snapshot()
	for i := range 30 {
		revision := s.apply(manyRules(i)).GetRevision()
		out, err := s.WaitForRevision(s.ctx(), &policyv1.WaitForRevisionRequest{Revision: revision})
		if err != nil || out.GetRevision() != revision {
			t.Fatalf("change %d: %v, %v", i, out, err)
		}
	}
	if f.err != nil {
		t.Errorf("the datapath's stream ended: %v", f.err)
	}
	s.eventually("only the datapath is left", func(st *policyv1.GetStatusResponse) bool { return len(st.GetSubscribers()) == 1 })
	if _, n := s.owner.Reader().Figures(); n != 16 {
		t.Errorf("%d were disconnected because they are slow, want 16", n)
	}
}

func TestManyNamesAtOnceAreLearned(t *testing.T) {
	const names, callers = 2000, 64
	s := serve(t, func(c *owner.Config) { c.MaxNames, c.MaxAddresses = names, names })
	s.know(town)
	s.apply(learnWeb)
	f := s.watch(subscribe("datapath", 300)).snapshot()
	next := make(chan int)
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for i := range next {
				at := netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)})
				name := fmt.Sprintf("n%d.example.com", i)
				if i%100 == 0 {
					name = "api.example.com" // a table uses it
				}
				if _, err := s.LearnNames(t.Context(), &policyv1.LearnNamesRequest{Name: name, Addresses: []string{at.String()}}); err != nil {
					t.Errorf("name %d: %v", i, err)
				}
			}
		})
	}
	for i := range names {
		next <- i
	}
	close(next)
	wg.Wait()
	f.until("everything is there", func() bool { return f.barrier.GetAddressRevision() == names })
	st, err := s.owner.Reader().Status(s.ctx())
	if err != nil || st.Addresses != names {
		t.Errorf("%d addresses are stored, want %d; %v", st.Addresses, names, err)
	}
}
