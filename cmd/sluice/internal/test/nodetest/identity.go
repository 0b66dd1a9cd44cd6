// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetest

import (
	"context"
	"net/netip"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

type identity struct {
	identityv1.UnimplementedIdentityServiceServer
	StoreError string // error of etcd; empty: connected
	StoreFull  string // error of writes although etcd is connected
	Problems   []*statusv1.Problem
	Cluster    *identityv1.ClusterStatus
	More       [][]*workloadv1.Label // identities from 302 on
}

func newIdentity() *identity {
	return &identity{Cluster: &identityv1.ClusterStatus{Registered: true, Nodes: 2, Mappings: 3}}
}

func (f *identity) ListIdentities(r *identityv1.ListIdentitiesRequest,
	s grpc.ServerStreamingServer[identityv1.ListIdentitiesResponse],
) error {
	if len(r.GetScopes()) == 0 || r.GetScopes()[0] == identityv1.Scope_SCOPE_RESERVED {
		host := &identityv1.Identity{
			Number: 1, Scope: identityv1.Scope_SCOPE_RESERVED,
			Labels: []*workloadv1.Label{{Source: "reserved", Key: "host"}},
		}
		if err := s.Send(&identityv1.ListIdentitiesResponse{Identity: host}); err != nil {
			return err
		}
	}
	web := &identityv1.Identity{
		Number: 300, Scope: identityv1.Scope_SCOPE_CLUSTER,
		Labels: []*workloadv1.Label{Label("tier", ""), Label("app", "web")},
	}
	if err := s.Send(&identityv1.ListIdentitiesResponse{Identity: web, ReferenceCount: 2}); err != nil {
		return err
	}
	for i, labels := range f.More {
		more := &identityv1.Identity{Number: 302 + uint32(i), Scope: identityv1.Scope_SCOPE_CLUSTER, Labels: labels}
		if err := s.Send(&identityv1.ListIdentitiesResponse{Identity: more}); err != nil {
			return err
		}
	}
	return nil
}

func (*identity) GetIdentity(_ context.Context, r *identityv1.GetIdentityRequest) (*identityv1.GetIdentityResponse,
	error,
) {
	if r.GetNumber() != 300 {
		return nil, status.Error(codes.NotFound, "no such identity")
	}
	return &identityv1.GetIdentityResponse{
		Identity: &identityv1.Identity{
			Number: 300, Scope: identityv1.Scope_SCOPE_CLUSTER,
			Labels: []*workloadv1.Label{Label("app", "web")},
		},
		References: []string{"warm"},
		Endpoints:  []*identityv1.HoldingEndpoint{{Owner: &workloadv1.Owner{ContainerId: "a", InterfaceName: "eth0"}}},
	}, nil
}

func (f *identity) GetStatus(context.Context, *identityv1.GetStatusRequest) (*identityv1.GetStatusResponse, error) {
	service := serviceStatus()
	service.Problems = f.Problems
	return &identityv1.GetStatusResponse{
		Service: service, NodeName: "node-a", StoreConnected: f.StoreError == "",
		StoreError: f.StoreError + f.StoreFull, ClusterIdentities: 5, HeldIdentities: 1,
		Cluster: f.Cluster,
	}, nil
}

// cluster is the cluster service of node-a; node-b does not answer.
type cluster struct {
	identityv1.UnimplementedClusterServiceServer
	node      *Node
	Forgotten *identityv1.ForgetNodeRequest // the last request
	// Mapped maps addresses to nodes; nil: the default mappings.
	Mapped map[string]string
	// Listed are further listed mappings.
	Listed []*identityv1.IPMapping
}

func (c *cluster) nodes() []*identityv1.ListNodesResponse {
	nodes := []*identityv1.ListNodesResponse{
		{
			Local: true, State: identityv1.NodeState_NODE_STATE_ALIVE, MappingCount: 2,
			Node: &identityv1.Node{
				Name: "node-a", PodRanges: []string{"10.244.0.0/24", "fd00:244::/64"}, Version: "1.0", Incarnation: "0a",
				Underlay: &identityv1.Underlay{
					Addresses: []string{"192.0.2.1", "2001:db8::1"}, OverlayAddresses: []string{"10.244.0.1"},
					Mode: identityv1.RoutingMode_ROUTING_MODE_OVERLAY, TunnelPort: 8472, Mtu: 1450,
				},
			},
		},
		{
			State: identityv1.NodeState_NODE_STATE_SILENT, RefusedMappingCount: 1,
			Node: &identityv1.Node{
				Name: "node-b", Version: "1.0",
				RefusedRanges: []*identityv1.RefusedRange{{
					Prefix: "10.244.0.0/25", Holder: "node-a", Reason: "node node-a had addresses of it before",
				}},
			},
		},
	}
	if c.node.Identity.StoreError != "" {
		for _, n := range nodes {
			n.State = identityv1.NodeState_NODE_STATE_UNSPECIFIED
		}
	}
	return nodes
}

func (c *cluster) ListNodes(_ *identityv1.ListNodesRequest,
	s grpc.ServerStreamingServer[identityv1.ListNodesResponse],
) error {
	for _, n := range c.nodes() {
		if err := s.Send(n); err != nil {
			return err
		}
	}
	return nil
}

func (c *cluster) ListIPMappings(r *identityv1.ListIPMappingsRequest,
	s grpc.ServerStreamingServer[identityv1.ListIPMappingsResponse],
) error {
	all := slices.Clone(c.Listed)
	for a, node := range c.Mapped {
		if node != "" {
			p := netip.MustParseAddr(a)
			all = append(all, &identityv1.IPMapping{Prefix: netip.PrefixFrom(p, p.BitLen()).String(), Node: node})
		}
	}
	for _, m := range all {
		if r.GetNode() != "" && m.GetNode() != r.GetNode() {
			continue
		}
		if err := s.Send(&identityv1.ListIPMappingsResponse{Mappings: []*identityv1.IPMapping{m}}); err != nil {
			return err
		}
	}
	return nil
}

func (c *cluster) GetIPMapping(_ context.Context, r *identityv1.GetIPMappingRequest) (
	*identityv1.GetIPMappingResponse, error,
) {
	if c.Mapped != nil {
		node, ok := c.Mapped[r.GetAddress()]
		if !ok {
			return nil, status.Error(codes.NotFound, "the address is unknown: "+r.GetAddress())
		}
		return &identityv1.GetIPMappingResponse{Mapping: &identityv1.IPMapping{Node: node}}, nil
	}
	mapping := func(node string, number uint32) *identityv1.IPMapping {
		return &identityv1.IPMapping{Prefix: r.GetAddress() + "/32", Node: node, Identity: number}
	}
	switch r.GetAddress() {
	case "10.244.0.2":
		return &identityv1.GetIPMappingResponse{
			Mapping: mapping("node-a", 300), Range: "10.244.0.0/24", RangeNode: "node-a",
			Refused: []*identityv1.RefusedMapping{{
				Mapping: mapping("node-b", 301), Reason: "the address lies in a range of node node-a",
			}},
		}, nil
	case "10.244.0.9":
		return &identityv1.GetIPMappingResponse{Range: "10.244.0.0/24", RangeNode: "node-a"}, nil
	case "10.9.0.1":
		return &identityv1.GetIPMappingResponse{Refused: []*identityv1.RefusedMapping{{
			Mapping: mapping("node-b", 301), Reason: "the address lies in no range of the node",
		}}}, nil
	case "10.244.1.2", "10.244.1.3":
		return &identityv1.GetIPMappingResponse{
			Mapping: mapping("node-b", 301), Range: "10.244.1.0/24", RangeNode: "node-b",
		}, nil
	case "10.244.1.9":
		return &identityv1.GetIPMappingResponse{Range: "10.244.1.0/24", RangeNode: "node-b"}, nil
	case "192.0.2.2":
		return &identityv1.GetIPMappingResponse{Mapping: mapping("node-b", 6)}, nil
	case "192.0.2.7":
		return &identityv1.GetIPMappingResponse{Mapping: mapping("", 7)}, nil
	}
	return nil, status.Error(codes.NotFound, "the address is unknown: "+r.GetAddress())
}

func (c *cluster) ForgetNode(_ context.Context, r *identityv1.ForgetNodeRequest) (
	*identityv1.ForgetNodeResponse, error,
) {
	for _, n := range c.nodes() {
		switch {
		case n.GetNode().GetName() != r.GetName():
		case n.GetState() == identityv1.NodeState_NODE_STATE_ALIVE && !r.GetForce():
			return nil, status.Errorf(codes.FailedPrecondition, "the node is alive: %q", r.GetName())
		default:
			c.Forgotten = r
			return &identityv1.ForgetNodeResponse{Node: n.GetNode(), MappingCount: n.GetMappingCount()}, nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "no such node: %q", r.GetName())
}
