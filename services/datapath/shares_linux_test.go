// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/model/shares"
	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/server"
)

// shareStream keeps the messages by limit.
type shareStream struct {
	grpc.ServerStream
	got map[string]*sharesv1.ListSharesResponse
}

func (s *shareStream) Send(r *sharesv1.ListSharesResponse) error {
	s.got[r.GetLimit().GetName()] = r
	return nil
}

// TestKernelSharesNameTheEndpointThatFillsABound lets a pod open more connections than its share, and another pod one.
// ListShares must report the usage and refusals of both, and no other endpoint.
func TestKernelSharesNameTheEndpointThatFillsABound(t *testing.T) {
	w := newWorld(t)
	w.start(false)
	greedy, modest, server4 := w.pod("greedy"), w.pod("modest"), w.pod("server")
	to := server4.echo(server4.spec.Addrs[0])
	if _, err := w.node.Collector.Collect(t.Context()); err != nil {
		t.Fatal(err)
	}
	const few, refused = 5, 3
	budget := bpf.MapsSlBudget{Limit: few}
	if err := w.node.Kernel.Pins.Map(bpf.MapsMapSlBudget).Put(uint32(greedy.ep.Slot)<<1, budget); err != nil {
		t.Fatal(err)
	}
	ask := func(p *pod) {
		c, err := dialIn(p.ns, "udp", to, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		_, _ = c.Write([]byte("x")) // the connection beyond the share is dropped
	}
	for range few + refused {
		ask(greedy)
	}
	ask(modest)
	list := func(tenant string) map[string]*sharesv1.ListSharesResponse {
		s := server.New(server.Options{Subjects: w.node.shown()})
		stream := &shareStream{got: map[string]*sharesv1.ListSharesResponse{}}
		if err := s.ListShares(&sharesv1.ListSharesRequest{Tenant: tenant}, stream); err != nil {
			t.Fatal(err)
		}
		return stream.got
	}
	got := list("")
	l := got["connections-ipv4"]
	if n := len(l.GetEndpoints()); n != 2 || !l.GetLimit().GetByEndpoint() || l.GetLimit().GetSize() == 0 {
		t.Fatalf("%d endpoints have connections, want the two that opened some: %v", n, l)
	}
	for i, want := range []struct {
		id            string
		used, refused uint64
	}{{"greedy", few, refused}, {"modest", 1, 0}} {
		e := l.GetEndpoints()[i]
		if e.GetOwner().GetContainerId() != want.id || e.GetUsed() != want.used || e.GetRefused() != want.refused ||
			e.GetKind() != sharesv1.EndpointKind_ENDPOINT_KIND_CONTAINER || e.GetMost() < e.GetUsed() {
			t.Errorf("entry %d: %v, want %d connections and %d refusals of %s", i, e, want.used, want.refused, want.id)
		}
	}
	for _, name := range []string{"fragments", "events", "answers", "too-big", "connections-ipv6"} {
		if x := got[name]; x == nil || name != "events" && len(x.GetEndpoints()) != 0 {
			t.Errorf("limit %s: %v, want an unused limit", name, x)
		}
	}
	if x := list(shares.Labelled("acme").Name())["connections-ipv4"]; len(x.GetEndpoints()) != 0 {
		t.Errorf("endpoints of a tenant without pods: %v", x)
	}
	if _, err := w.node.Collector.Collect(t.Context()); err != nil {
		t.Fatal(err)
	}
	if used, most := w.node.Collector.Use(conntrack.Outside, 0); used != 0 || most == 0 {
		t.Errorf("external clients have %d connections of at most %d, want none", used, most)
	}
}
