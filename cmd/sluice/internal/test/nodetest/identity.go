// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetest

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

type identity struct {
	identityv1.UnimplementedIdentityServiceServer
	StoreError string // why etcd is away
	StoreFull  string // what it refuses although it answers
}

func (*identity) ListIdentities(r *identityv1.ListIdentitiesRequest,
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
	return s.Send(&identityv1.ListIdentitiesResponse{Identity: web, ReferenceCount: 2})
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
	return &identityv1.GetStatusResponse{
		Service: serviceStatus(), NodeName: "node-a", StoreConnected: f.StoreError == "",
		StoreError: f.StoreError + f.StoreFull, ClusterIdentities: 5, HeldIdentities: 1,
	}, nil
}
