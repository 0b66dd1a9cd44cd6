// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/model/policytable"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/proto/wire/policywire"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

// scriptedPolicy sends one message, receives six, and ends.
type scriptedPolicy struct {
	policyv1.UnimplementedPolicyServiceServer
	send  *policyv1.WatchPolicyTablesResponse
	heard chan *policyv1.WatchPolicyTablesRequest
}

func (s *scriptedPolicy) WatchPolicyTables(stream grpc.BidiStreamingServer[policyv1.WatchPolicyTablesRequest, policyv1.WatchPolicyTablesResponse]) error {
	if err := stream.Send(s.send); err != nil {
		return err
	}
	for range 6 {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		s.heard <- m
	}
	return status.Error(codes.ResourceExhausted, "too far behind")
}

func servePolicy(t *testing.T, s *scriptedPolicy) *Policy {
	t.Helper()
	path := filepath.Join(t.TempDir(), "policy.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	policyv1.RegisterPolicyServiceServer(srv, s)
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Stop(); <-served })
	cc, err := client.Dial(path, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cc.Close() })
	return NewPolicy(cc)
}

func TestPolicyStreamCarriesEverythingBothWays(t *testing.T) {
	want := policytable.Message{Incarnation: "run", Seq: 1, Steps: []policytable.Step{
		policytable.SetIdentity{Identity: 301}, policytable.Barrier{PolicyRevision: 4, State: "fedcba9876543210"},
	}}
	send := &policyv1.WatchPolicyTablesResponse{Format: policywire.Format, Incarnation: []byte(want.Incarnation), Seq: want.Seq}
	for _, st := range want.Steps {
		send.Steps = append(send.Steps, policywire.Step(st))
	}
	s := &scriptedPolicy{send: send, heard: make(chan *policyv1.WatchPolicyTablesRequest, 6)}
	p := servePolicy(t, s)
	a := netip.MustParseAddr("10.0.0.1")
	stream, err := p.Subscribe(t.Context(), policystream.Subscription{
		Name: "node", Incarnation: "run", Seq: 7, Subjects: []uint32{300}, Locations: map[netip.Addr]uint32{a: 300},
		Enforced: &policystream.Enforced{State: "0123456789abcdef", Revision: 12, Sources: []string{"file"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	m, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(m, want) {
		t.Errorf("received\n%+v, want\n%+v", m, want)
	}
	for _, err := range []error{
		stream.Subjects([]uint32{301}, []uint32{300}), stream.Locate(map[netip.Addr]uint32{a: 301}, []netip.Addr{netip.MustParseAddr("fd00::1")}),
		stream.Nack(policystream.Nack{Seq: 1, Subject: 300, Table: 9, Reason: "full"}), stream.Ack(1),
		stream.Hold(policystream.Hold{Seq: 1, Revision: 12, Reason: strings.Repeat("é", 600)}),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	here := []*policyv1.Location{{Address: a.String(), Identity: 300}}
	for _, want := range []*policyv1.WatchPolicyTablesRequest{
		{Message: &policyv1.WatchPolicyTablesRequest_Subscribe{Subscribe: &policyv1.Subscribe{
			Name: "node", Incarnation: []byte("run"), Seq: 7, Subjects: []uint32{300}, Locations: here,
			Role:     policyv1.SubscriberRole_SUBSCRIBER_ROLE_ENFORCES,
			Formats:  []policyv1.TableFormat{policyv1.TableFormat_TABLE_FORMAT_RANGES},
			Enforced: &policyv1.EnforcedState{State: []byte("0123456789abcdef"), Revision: 12, Sources: []string{"file"}},
		}}},
		{Message: &policyv1.WatchPolicyTablesRequest_Subjects{Subjects: &policyv1.SubjectChange{Add: []uint32{301}, Remove: []uint32{300}}}},
		{Message: &policyv1.WatchPolicyTablesRequest_Locate{Locate: &policyv1.Locate{
			Add: []*policyv1.Location{{Address: a.String(), Identity: 301}}, Remove: []string{"fd00::1"},
		}}},
		{Message: &policyv1.WatchPolicyTablesRequest_Nack{Nack: &policyv1.Nack{Seq: 1, Subject: 300, Table: 9, Reason: "full"}}},
		{Message: &policyv1.WatchPolicyTablesRequest_Ack{Ack: &policyv1.Ack{Seq: 1}}},
		{Message: &policyv1.WatchPolicyTablesRequest_Hold{Hold: &policyv1.Hold{Seq: 1, Revision: 12, Reason: strings.Repeat("é", 512)}}},
	} {
		if got := <-s.heard; !proto.Equal(got, want) {
			t.Errorf("the service received %v, want %v", got, want)
		}
	}
	if _, err := stream.Recv(); !errors.Is(err, endpoint.ErrExhausted) || !strings.Contains(err.Error(), "too far behind") {
		t.Errorf("cut: %v", err)
	}
	if p.Err() != nil {
		t.Errorf("a service that answers counts as unhealthy: %v", p.Err())
	}
}

func TestPolicyThatIsAwayIsUnavailable(t *testing.T) {
	cc, err := client.Dial(filepath.Join(t.TempDir(), "none.sock"), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	p := NewPolicy(cc)
	stream, err := p.Subscribe(context.Background(), policystream.Subscription{Name: "node"})
	if err == nil {
		_, err = stream.Recv()
	}
	if !errors.Is(err, endpoint.ErrUnavailable) || p.Err() == nil {
		t.Errorf("%v, health %v", err, p.Err())
	}
}
