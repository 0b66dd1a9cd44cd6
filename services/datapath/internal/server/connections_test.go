// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"fmt"
	"net/netip"
	"reflect"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/conntrackview"
)

// table is a table of connections that records the calls.
type table struct {
	connections []conntrackview.Connection
	filter      conntrack.Filter
	flushes     int
}

func (f *table) ListConnections(
	_ context.Context, filter conntrack.Filter, visit func(*conntrackview.Connection) error,
) error {
	f.filter = filter
	for i := range f.connections {
		if err := visit(&f.connections[i]); err != nil {
			return err
		}
	}
	return nil
}

func (f *table) FlushConnections(_ context.Context, filter conntrack.Filter, _ bool) (conntrack.Flushed, error) {
	f.filter = filter
	f.flushes++
	return conntrack.Flushed{Removed: 4, Terminated: 3, Unremembered: 2, Busy: 1}, nil
}

// recorder is a stream that keeps the sent messages.
type recorder[R any] struct {
	grpc.ServerStream
	ctx  context.Context
	sent []*R
}

func (r *recorder[R]) Context() context.Context { return r.ctx }

func (r *recorder[R]) Send(m *R) error {
	r.sent = append(r.sent, m)
	return nil
}

func TestConnectionFilterIsThatOfTheRequest(t *testing.T) {
	f := &table{}
	s := &Server{tracked: f, endpoints: lifecycle.New(lifecycle.Config{Links: noLinks{}})}
	r, err := s.FlushConnections(t.Context(), &datapathv1.FlushConnectionsRequest{Filter: &datapathv1.ConnectionFilter{
		Prefixes: []string{"10.0.0.1/8", "fd00::/8"}, Ports: []uint32{53}, Protocols: []netv1.Protocol{0, 255},
		States: []datapathv1.ConnectionState{datapathv1.ConnectionState_CONNECTION_STATE_HALF_CLOSED},
		Family: datapathv1.AddressFamily_ADDRESS_FAMILY_IPV6,
	}})
	if err != nil || r.GetFlushedCount() != 4 || r.GetTerminatedCount() != 3 || r.GetUnrememberedCount() != 2 ||
		r.GetBusyCount() != 1 {
		t.Errorf("%v, %v", r, err)
	}
	want := conntrack.Filter{
		Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")},
		Ports:    []uint16{53}, Protocols: []uint8{0, 255}, States: []string{"half-closed"}, Without: [2]bool{true, false},
	}
	if !reflect.DeepEqual(f.filter, want) {
		t.Errorf("filter %+v, want %+v", f.filter, want)
	}
}

// TestNoCriterionIsLeftOut tests that invalid criteria are errors, because ignoring one would make the filter match too
// much.
func TestNoCriterionIsLeftOut(t *testing.T) {
	for name, c := range map[string]struct {
		request *datapathv1.FlushConnectionsRequest
		code    codes.Code
		field   string
	}{
		"nothing": {&datapathv1.FlushConnectionsRequest{}, codes.InvalidArgument, "filter"},
		"an empty filter": {
			&datapathv1.FlushConnectionsRequest{Filter: &datapathv1.ConnectionFilter{}}, codes.InvalidArgument, "filter",
		},
		"all, and a criterion": {
			&datapathv1.FlushConnectionsRequest{All: true, Filter: &datapathv1.ConnectionFilter{Ports: []uint32{1}}},
			codes.InvalidArgument, "all",
		},
		"a mapped prefix": {
			&datapathv1.FlushConnectionsRequest{Filter: &datapathv1.ConnectionFilter{Prefixes: []string{"::ffff:10.0.0.1/128"}}},
			codes.InvalidArgument, "filter.prefixes[0]",
		},
		"a text": {
			&datapathv1.FlushConnectionsRequest{Filter: &datapathv1.ConnectionFilter{Prefixes: []string{"10.0.0.0/8", "x"}}},
			codes.InvalidArgument, "filter.prefixes[1]",
		},
		"a port": {
			&datapathv1.FlushConnectionsRequest{Filter: &datapathv1.ConnectionFilter{Ports: []uint32{65536 + 53}}},
			codes.InvalidArgument, "filter.ports[0]",
		},
		"a protocol": {
			&datapathv1.FlushConnectionsRequest{Filter: &datapathv1.ConnectionFilter{Protocols: []netv1.Protocol{256 + 17}}},
			codes.InvalidArgument, "filter.protocols[0]",
		},
		"an owner without an endpoint": {
			&datapathv1.FlushConnectionsRequest{Filter: &datapathv1.ConnectionFilter{Owners: []*workloadv1.Owner{
				{ContainerId: "gone", InterfaceName: "eth0"},
			}}},
			codes.NotFound, "",
		},
	} {
		f := &table{}
		s := &Server{tracked: f, endpoints: lifecycle.New(lifecycle.Config{Links: noLinks{}})}
		_, err := s.FlushConnections(t.Context(), c.request)
		field := ""
		for _, v := range rpcerr.Fields(err) {
			field = v.GetField()
		}
		if status.Code(err) != c.code || field != c.field || f.flushes != 0 {
			t.Errorf("%s: %v of field %q after %d flushes, want %v of %q", name, err, field, f.flushes, c.code, c.field)
		}
	}
}

func TestConnectionsAreCutToTheLimitAndCounted(t *testing.T) {
	f := &table{}
	for i := range 5 {
		tuple := conntrack.Tuple{
			Initiator: netip.MustParseAddrPort(fmt.Sprintf("10.0.0.1:%d", i+1)),
			Responder: netip.MustParseAddrPort("10.0.0.2:53"), Protocol: 17,
		}
		f.connections = append(f.connections, conntrackview.Connection{
			Connection: &conntrack.Connection{Tuple: tuple, Flags: conntrack.SeenReply},
			Asked:      netip.MustParseAddrPort("10.96.0.1:53"), Service: "a/b:c",
		})
	}
	s := &Server{tracked: f, endpoints: lifecycle.New(lifecycle.Config{Links: noLinks{}})}
	for limit, want := range map[uint32]struct {
		sent    int
		omitted uint64
	}{0: {5, 0}, 1: {1, 4}, 4: {4, 1}, 5: {5, 0}, 9: {5, 0}} {
		stream := &recorder[datapathv1.ListConnectionsResponse]{ctx: t.Context()}
		if err := s.ListConnections(&datapathv1.ListConnectionsRequest{Limit: limit}, stream); err != nil {
			t.Fatal(err)
		}
		omitted := uint64(0)
		for i, m := range stream.sent {
			omitted += m.GetOmittedConnectionCount()
			c := m.GetConnection()
			if c.GetConnection().GetInitiatorPort() != uint32(i+1) || c.GetAskedAddress() != "10.96.0.1" ||
				c.GetService() != "a/b:c" || c.GetConnection().GetStates()[0] != datapathv1.ConnectionState_CONNECTION_STATE_ESTABLISHED {
				t.Errorf("limit %d: %v", limit, m)
			}
		}
		if len(stream.sent) != want.sent || omitted != want.omitted {
			t.Errorf("limit %d: %d sent, %d omitted, want %+v", limit, len(stream.sent), omitted, want)
		}
	}
}
