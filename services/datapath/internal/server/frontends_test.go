// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/model/frontend"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendstream"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
)

// translated are the frontends in a kernel.
type translated []servicemap.Frontend

func (t translated) ListFrontends() ([]servicemap.Frontend, error) { return t, nil }
func (t translated) CountFrontends() (servicemap.Counts, error) {
	return servicemap.Counts{Frontends: len(t), Backends: 2, Resting: 3}, nil
}

// listed is the stream of an answer.
type listed struct {
	grpc.ServerStream
	sent []*datapathv1.ListFrontendsResponse
}

func (l *listed) Send(m *datapathv1.ListFrontendsResponse) error {
	l.sent = append(l.sent, m)
	return nil
}

func TestFrontendsAreListedAsTheKernelHasThem(t *testing.T) {
	s := &Server{services: translated{{
		Key:     frontend.Key{Addr: netip.IPv4Unspecified(), Port: 30080, Protocol: frontend.UDP, Node: true},
		Service: "shop/web:dns", Kind: frontend.NodePort,
		Outside: &servicemap.Front{
			Number:   9,
			Drop:     true,
			Backends: []servicemap.Backend{{AddrPort: netip.MustParseAddrPort("10.244.0.1:53"), Number: 4}},
		},
		Affinity: 3 * time.Hour,
	}}}
	var l listed
	if err := s.ListFrontends(nil, &l); err != nil || len(l.sent) != 1 {
		t.Fatalf("%v, %v", l.sent, err)
	}
	want := &datapathv1.KernelFrontend{
		Address: "0.0.0.0", Port: 30080, Protocol: netv1.Protocol_PROTOCOL_UDP, NodePort: true,
		Service: "shop/web:dns", AffinitySeconds: 10800, Kind: datapathv1.FrontendKind_FRONTEND_KIND_NODE_PORT,
		Outside: &datapathv1.KernelBackendList{
			Front:    9,
			Drop:     true,
			Backends: []*datapathv1.KernelBackend{{Address: "10.244.0.1", Port: 53, Number: 4}},
		},
	}
	if got := l.sent[0].GetFrontend(); !proto.Equal(got, want) {
		t.Errorf("listed %v, want %v", got, want)
	}
}

func TestRefusedFrontendsAreShown(t *testing.T) {
	st := frontendstream.Status{
		Err: errors.New("loadbalancer: away"), Complete: true, Revision: 8, Ended: 7, Earlier: 4, Unsaved: "the disk is full",
		Refusals: map[frontend.Key]string{},
	}
	for port := range uint16(120) {
		k := frontend.Key{Addr: netip.MustParseAddr("10.96.0.1"), Port: port + 1, Protocol: frontend.TCP}
		st.Refusals[k] = "no capacity"
	}
	got := frontendStream(st, servicemap.Counts{Frontends: 5, Backends: 6, Resting: 7})
	if n := len(got.GetRefused()); n != maxRefusedFrontends || got.GetRefusedCount() != 120 ||
		got.GetRefused()[0] != "10.96.0.1:1/tcp: no capacity" {
		t.Errorf("%d of %d refused frontends listed, first %q", n, got.GetRefusedCount(), got.GetRefused()[0])
	}
	got.Refused, got.RefusedCount = nil, 0
	want := &datapathv1.FrontendStream{
		Complete: true, Error: "loadbalancer: away", Revision: 8, EndedRevision: 7,
		Frontends: 5, Backends: 6, RestingNumbers: 7, EarlierFrontends: 4,
	}
	if !proto.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	warnings := frontendWarnings(st)
	if len(warnings) != maxRefused+3 ||
		warnings[maxRefused] != fmt.Sprintf("services: not enforced: %d more", 120-maxRefused) ||
		!slices.Contains(warnings, "services: the disk is full") {
		t.Errorf("warnings %q", warnings)
	}
	if w := frontendWarnings(frontendstream.Status{Complete: true}); len(w) != 0 {
		t.Errorf("warnings without a problem: %q", w)
	}
}

// inUse are backends with their connections.
type inUse []conntrack.Count

func (c inUse) Connections(context.Context) ([]conntrack.Count, error) { return c, nil }

// countsSent is the stream of an answer.
type countsSent struct {
	grpc.ServerStream
	ctx  context.Context
	sent []*datapathv1.ListBackendConnectionsResponse
}

func (c *countsSent) Context() context.Context { return c.ctx }

func (c *countsSent) Send(m *datapathv1.ListBackendConnectionsResponse) error {
	c.sent = append(c.sent, m)
	return nil
}

func TestConnectionsOfBackendsAreListed(t *testing.T) {
	s := &Server{backends: inUse{{
		Responder: conntrack.Responder{AddrPort: netip.MustParseAddrPort("[fd00:244::1]:53"), Protocol: 17}, Connections: 12,
	}}}
	l := countsSent{ctx: t.Context()}
	if err := s.ListBackendConnections(nil, &l); err != nil || len(l.sent) != 1 {
		t.Fatalf("%v, %v", l.sent, err)
	}
	want := &datapathv1.BackendConnections{
		Address: "fd00:244::1", Port: 53, Protocol: netv1.Protocol_PROTOCOL_UDP, ConnectionCount: 12,
	}
	if got := l.sent[0].GetBackend(); !proto.Equal(got, want) {
		t.Errorf("listed %v, want %v", got, want)
	}
	err := (&Server{}).ListBackendConnections(nil, &l)
	if reason, _ := rpcerr.ReasonIn(err); status.Code(err) != codes.FailedPrecondition ||
		reason != rpcerr.Of(datapathv1.ErrorReason_ERROR_REASON_LOAD_BALANCING_OFF) {
		t.Errorf("without services: %v", err)
	}
}
