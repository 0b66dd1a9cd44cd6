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
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/policysync"
	"github.com/sluice-net/sluice/services/datapath/internal/policytable"
)

// scriptedPolicy sends one message, hears six, and ends.
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
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(srv.Stop)
	cc, err := client.Dial(path, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cc.Close() })
	return NewPolicy(cc)
}

func TestPolicyStreamCarriesEverythingBothWays(t *testing.T) {
	s := &scriptedPolicy{send: wholeMessage(), heard: make(chan *policyv1.WatchPolicyTablesRequest, 6)}
	p := servePolicy(t, s)
	a := netip.MustParseAddr("10.0.0.1")
	stream, err := p.Subscribe(t.Context(), policysync.Subscription{
		Name: "node", Incarnation: "run", Seq: 7, Subjects: []uint32{300}, Locations: map[netip.Addr]uint32{a: 300},
		Enforced: &policysync.Enforced{State: "0123456789abcdef", Revision: 12, Sources: []string{"file"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	m, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if want := wholeSteps(); !reflect.DeepEqual(m, want) {
		t.Errorf("came\n%+v, want\n%+v", m, want)
	}
	for _, err := range []error{
		stream.Subjects([]uint32{301}, []uint32{300}), stream.Locate(map[netip.Addr]uint32{a: 301}, []netip.Addr{netip.MustParseAddr("fd00::1")}),
		stream.Nack(policysync.Nack{Seq: 1, Subject: 300, Table: 9, Reason: "full"}), stream.Ack(1),
		stream.Hold(policysync.Hold{Seq: 1, Revision: 12, Reason: strings.Repeat("é", 600)}),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	here := []*policyv1.Location{{Address: a.AsSlice(), Identity: 300}}
	for _, want := range []*policyv1.WatchPolicyTablesRequest{
		{Message: &policyv1.WatchPolicyTablesRequest_Subscribe{Subscribe: &policyv1.Subscribe{
			Name: "node", Incarnation: []byte("run"), Seq: 7, Subjects: []uint32{300}, Locations: here,
			Role:     policyv1.SubscriberRole_SUBSCRIBER_ROLE_ENFORCES,
			Enforced: &policyv1.EnforcedState{State: []byte("0123456789abcdef"), Revision: 12, Sources: []string{"file"}},
		}}},
		{Message: &policyv1.WatchPolicyTablesRequest_Subjects{Subjects: &policyv1.SubjectChange{Add: []uint32{301}, Remove: []uint32{300}}}},
		{Message: &policyv1.WatchPolicyTablesRequest_Locate{Locate: &policyv1.Locate{
			Add: []*policyv1.Location{{Address: a.AsSlice(), Identity: 301}}, Remove: [][]byte{netip.MustParseAddr("fd00::1").AsSlice()},
		}}},
		{Message: &policyv1.WatchPolicyTablesRequest_Nack{Nack: &policyv1.Nack{Seq: 1, Subject: 300, Table: 9, Reason: "full"}}},
		{Message: &policyv1.WatchPolicyTablesRequest_Ack{Ack: &policyv1.Ack{Seq: 1}}},
		{Message: &policyv1.WatchPolicyTablesRequest_Hold{Hold: &policyv1.Hold{Seq: 1, Revision: 12, Reason: strings.Repeat("é", 512)}}},
	} {
		if got := <-s.heard; !proto.Equal(got, want) {
			t.Errorf("the service heard %v, want %v", got, want)
		}
	}
	if _, err := stream.Recv(); !errors.Is(err, endpoint.ErrExhausted) || !strings.Contains(err.Error(), "too far behind") {
		t.Errorf("cut: %v", err)
	}
	if p.Err() != nil {
		t.Errorf("a service that answers is called unhealthy: %v", p.Err())
	}
}

func TestPolicyThatIsAwayIsUnavailable(t *testing.T) {
	cc, err := client.Dial(filepath.Join(t.TempDir(), "none.sock"), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	p := NewPolicy(cc)
	stream, err := p.Subscribe(context.Background(), policysync.Subscription{Name: "node"})
	if err == nil {
		_, err = stream.Recv()
	}
	if !errors.Is(err, endpoint.ErrUnavailable) || p.Err() == nil {
		t.Errorf("%v, health %v", err, p.Err())
	}
}

func ints[T any](n int, v T) []T {
	out := make([]T, n)
	for i := range out {
		out[i] = v
	}
	return out
}

func wholeMessage() *policyv1.WatchPolicyTablesResponse {
	key, hash := ints(16, byte(1)), ints(32, byte(2))
	node := []*policyv1.PortNode{{High: ints(16, uint32(0xFFFFFFFF)), Value: ints(16, uint32(0x7FFF0001))}}
	block := &policyv1.AddressBlock{Address: []byte{10, 0, 0, 0}, Bits: 8, Classes: []uint32{0, 0, 0}}
	return &policyv1.WatchPolicyTablesResponse{Incarnation: []byte("run"), Seq: 1, Steps: []*policyv1.Step{
		{Step: &policyv1.Step_NodeClassDefine{NodeClassDefine: &policyv1.NodeClassDefine{NodeClass: 5, Key: key}}},
		{Step: &policyv1.Step_IdentityUpdate{IdentityUpdate: &policyv1.IdentityUpdate{Identity: 300, NodeClass: 5, Kind: 4, Scope: 2}}},
		{Step: &policyv1.Step_IdentityUpdate{IdentityUpdate: &policyv1.IdentityUpdate{Identity: 301}}},
		{Step: &policyv1.Step_TableDefine{TableDefine: &policyv1.TableDefine{
			Table: 9, StructureHash: hash, DefaultAllow: true, HostAllow: true, HasAddresses: true, DefaultClasses: ints(8, uint32(0)), AddressClasses: ints(3, uint32(0)),
			Rules: []*policyv1.TableRule{{Action: 3, Tier: 1, Proxy: 2}}, Classes: []uint32{0}, Nodes: node,
			Peers: []*policyv1.PeerRow{{NodeClass: 5}}, Blocks: []*policyv1.AddressBlock{block},
		}}},
		{Step: &policyv1.Step_TableGrow{TableGrow: &policyv1.TableGrow{Table: 9, Nodes: node, Classes: []uint32{1}}}},
		{Step: &policyv1.Step_PeerUpdate{PeerUpdate: &policyv1.PeerUpdate{Table: 9, Row: &policyv1.PeerRow{NodeClass: 5, Class: 1}, Delete: true}}},
		{Step: &policyv1.Step_AddressUpdate{AddressUpdate: &policyv1.AddressUpdate{Table: 9, Block: block}}},
		{Step: &policyv1.Step_Bind{Bind: &policyv1.Bind{
			Subject: 300, Direction: 1, Table: 9, PolicyRevision: 4,
			Rules: []*policyv1.RuleSources{{Sources: []*policyv1.RuleSource{{Kind: "K", Namespace: "n", Name: "m", Path: "p"}}}},
		}}},
		{Step: &policyv1.Step_SubjectGone{SubjectGone: &policyv1.SubjectGone{Subject: 300}}},
		{Step: &policyv1.Step_TableRetire{TableRetire: &policyv1.TableRetire{Table: 9}}},
		{Step: &policyv1.Step_NodeClassRetire{NodeClassRetire: &policyv1.NodeClassRetire{NodeClass: 5}}},
		{Step: &policyv1.Step_SnapshotComplete{SnapshotComplete: &policyv1.SnapshotComplete{}}},
		{Step: &policyv1.Step_Barrier{Barrier: &policyv1.Barrier{
			PolicyRevision: 4, IdentityRevision: 5, AddressRevision: 6, State: []byte("fedcba9876543210"), Sources: []string{"file", "grpc"}, Incomplete: []string{"identity"},
		}}},
	}}
}

func wholeSteps() policytable.Message {
	var node policytable.PortNode
	for i := range node.High {
		node.High[i], node.Value[i] = 0xFFFFFFFF, 0x7FFF0001
	}
	c := policytable.Content{
		DefaultAllow: true, HostAllow: true, HasAddresses: true, Rules: []policytable.Rule{{Action: policytable.ActionAllow, Tier: 1, Proxy: 2}},
		Classes: []uint32{0}, Nodes: []policytable.PortNode{node}, Prefixes: map[netip.Prefix]policytable.PrefixClasses{netip.MustParsePrefix("10.0.0.0/8"): {}},
	}
	for i := range c.Hash {
		c.Hash[i] = 2
	}
	return policytable.Message{Incarnation: "run", Seq: 1, Steps: []policytable.Step{
		policytable.DefineIdentityClass{IdentityClass: 5, Key: policytable.ClassKey(ints(16, byte(1)))},
		policytable.SetIdentity{Identity: 300, IdentityClass: 5, Kind: policytable.KindHost, Scope: 1},
		policytable.SetIdentity{Identity: 301},
		policytable.DefineTable{Table: 9, Content: c, Peers: []policytable.Row{{IdentityClass: 5}}},
		policytable.GrowTable{Table: 9, Nodes: []policytable.PortNode{node}, Classes: []uint32{1}},
		policytable.DeletePeer{Table: 9, IdentityClass: 5},
		policytable.SetPrefix{Table: 9, Prefix: netip.MustParsePrefix("10.0.0.0/8")},
		policytable.BindSubject{Subject: 300, Direction: policytable.Ingress, Table: 9, Revision: 4, Rules: [][]policytable.Source{{{Kind: "K", Namespace: "n", Name: "m", Path: "p"}}}},
		policytable.RemoveSubject{Subject: 300},
		policytable.RetireTable{Table: 9},
		policytable.RetireIdentityClass{IdentityClass: 5},
		policytable.SnapshotComplete{},
		policytable.Barrier{
			PolicyRevision: 4, IdentityRevision: 5, AddressRevision: 6, State: "fedcba9876543210", Sources: []string{"file", "grpc"}, Incomplete: []string{"identity"},
		},
	}}
}

func TestMalformedStepsNameTheField(t *testing.T) {
	for want, change := range map[string]func(m *policyv1.WatchPolicyTablesResponse){
		"incarnation":                        func(m *policyv1.WatchPolicyTablesResponse) { m.Incarnation = nil },
		"steps[0].node_class_define.key":     func(m *policyv1.WatchPolicyTablesResponse) { m.Steps[0].GetNodeClassDefine().Key = nil },
		"steps[1].identity_update.kind":      func(m *policyv1.WatchPolicyTablesResponse) { m.Steps[1].GetIdentityUpdate().Kind = 9 },
		"steps[1].identity_update.scope":     func(m *policyv1.WatchPolicyTablesResponse) { m.Steps[1].GetIdentityUpdate().Scope = 0 },
		"steps[3].table_define.structure_ha": func(m *policyv1.WatchPolicyTablesResponse) { m.Steps[3].GetTableDefine().StructureHash = nil },
		"table_define.default_classes: 7": func(m *policyv1.WatchPolicyTablesResponse) {
			m.Steps[3].GetTableDefine().DefaultClasses = ints(7, uint32(0))
		},
		"table_define.address_classes[0]": func(m *policyv1.WatchPolicyTablesResponse) {
			m.Steps[3].GetTableDefine().AddressClasses = ints(3, uint32(1<<16))
		},
		"table_define.rules[0]":            func(m *policyv1.WatchPolicyTablesResponse) { m.Steps[3].GetTableDefine().Rules[0].Action = 0 },
		"table_define.nodes[0]":            func(m *policyv1.WatchPolicyTablesResponse) { m.Steps[3].GetTableDefine().Nodes[0] = nil },
		"table_define.peers[0].node_class": func(m *policyv1.WatchPolicyTablesResponse) { m.Steps[3].GetTableDefine().Peers[0].NodeClass = 0 },
		"table_define.blocks[0].bits":      func(m *policyv1.WatchPolicyTablesResponse) { m.Steps[3].GetTableDefine().Blocks[0].Bits = 33 },
		"table_grow.nodes[0]":              func(m *policyv1.WatchPolicyTablesResponse) { m.Steps[4].GetTableGrow().Nodes[0].High = nil },
		"peer_update.row.class":            func(m *policyv1.WatchPolicyTablesResponse) { m.Steps[5].GetPeerUpdate().Row.Class = 1 << 16 },
		"address_update.block.address":     func(m *policyv1.WatchPolicyTablesResponse) { m.Steps[6].GetAddressUpdate().Block.Address = nil },
		"bind.direction":                   func(m *policyv1.WatchPolicyTablesResponse) { m.Steps[7].GetBind().Direction = 3 },
		"steps[2].step":                    func(m *policyv1.WatchPolicyTablesResponse) { m.Steps[2] = &policyv1.Step{} },
	} {
		m := proto.Clone(wholeMessage()).(*policyv1.WatchPolicyTablesResponse)
		change(m)
		if _, err := message(m); !errors.Is(err, policytable.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// Whatever bytes come, they are a message or an error.
func FuzzMessage(f *testing.F) {
	whole, err := proto.Marshal(wholeMessage())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		var m policyv1.WatchPolicyTablesResponse
		if proto.Unmarshal(b, &m) != nil {
			return
		}
		out, err := message(&m)
		if err != nil && !errors.Is(err, policytable.ErrInvalid) {
			t.Errorf("%v is no ErrInvalid", err)
		}
		if err == nil && len(out.Steps) != len(m.GetSteps()) {
			t.Errorf("%d steps of %d", len(out.Steps), len(m.GetSteps()))
		}
	})
}
