// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetest

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	storev1 "github.com/sluice-net/sluice/proto/gen/sluice/store/v1"
)

// keeper is a fake of a member of a store with the nodes node-a and node-b.
type keeper struct {
	storev1.UnimplementedStoreServiceServer
}

func (*keeper) GetStatus(context.Context, *storev1.GetStatusRequest) (*storev1.GetStatusResponse, error) {
	issued := time.Date(2026, 11, 30, 8, 0, 0, 0, time.UTC)
	return &storev1.GetStatusResponse{
		Service: &statusv1.ServiceStatus{Version: "v1", StartTime: timestamppb.New(issued), Problems: []*statusv1.Problem{{
			Reason: statusv1.ProblemReason_PROBLEM_REASON_SERVICE,
			Text:   "two members have a vote, so the store needs both: add or remove one",
		}}},
		Name: "node-a", Epoch: 2, ClusterId: "cdf818194e3a8c32", ClientAddress: "192.0.2.1:23790",
		DatabaseBytes: 65536, DatabaseUsedBytes: 20480, DatabaseLimitBytes: 1 << 30,
		Members: []*storev1.Member{
			{Name: "node-a", Address: "192.0.2.1:23800", Leader: true, Voting: true, Self: true},
			{Name: "node-c", Address: "192.0.2.3:23800", Voting: true},
		},
		Nodes: []*storev1.Node{
			{Name: "node-a"},
			{Name: "node-b", IssuedTime: timestamppb.New(issued), ExpiryTime: timestamppb.New(issued.Add(24 * time.Hour))},
		},
	}, nil
}

func (*keeper) CreateJoinToken(
	context.Context, *storev1.CreateJoinTokenRequest,
) (*storev1.CreateJoinTokenResponse, error) {
	return &storev1.CreateJoinTokenResponse{
		Token: "sluice-join-1-e30", ExpiryTime: timestamppb.New(time.Date(2026, 11, 30, 9, 0, 0, 0, time.UTC)),
	}, nil
}

func (*keeper) RevokeNode(_ context.Context, r *storev1.RevokeNodeRequest) (*storev1.RevokeNodeResponse, error) {
	return &storev1.RevokeNodeResponse{Revoked: r.GetNode() == "node-b"}, nil
}

func (*keeper) RemoveMember(
	_ context.Context, r *storev1.RemoveMemberRequest,
) (*storev1.RemoveMemberResponse, error) {
	if r.GetName() != "node-c" {
		return nil, status.Errorf(codes.NotFound, "no such member: %q", r.GetName())
	}
	return &storev1.RemoveMemberResponse{}, nil
}

func (*keeper) SaveSnapshot(
	_ *storev1.SaveSnapshotRequest, stream grpc.ServerStreamingServer[storev1.SaveSnapshotResponse],
) error {
	for range 2 {
		if err := stream.Send(&storev1.SaveSnapshotResponse{Data: []byte("part")}); err != nil {
			return err
		}
	}
	return nil
}
