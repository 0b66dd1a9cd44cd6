// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetest

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

type ipam struct {
	ipamv1.UnimplementedIPAMServiceServer
	Problems      []string
	StoreProblems []string // problems of the cluster's registry
	// Allocations are the successive listings; the last one repeats. Empty: the default listing.
	Allocations [][]*ipamv1.Allocation
	Released    *ipamv1.ReleaseRequest
	ReleaseOf   error
}

func (*ipam) pools() []*ipamv1.Pool {
	return []*ipamv1.Pool{
		{
			Prefix: "10.244.0.0/24", State: ipamv1.RangeState_RANGE_STATE_SERVING, Gateway: "10.244.0.1",
			AddressCount: 256, ReservedCount: 3, ConfirmedCount: 2, FreeCount: 251,
		},
		{
			Prefix: "fd00:244::/64", State: ipamv1.RangeState_RANGE_STATE_SERVING, Gateway: "fd00:244::1",
			AddressCount: 1<<64 - 1, ReservedCount: 2, ConfirmedCount: 2, FreeCount: 1<<64 - 5,
		},
		{
			Prefix: "10.243.7.0/24", State: ipamv1.RangeState_RANGE_STATE_DRAINING, Gateway: "10.243.7.1",
			AddressCount: 256, ReservedCount: 3, ConfirmedCount: 1,
		},
		{
			Prefix: "10.242.0.0/24", State: ipamv1.RangeState_RANGE_STATE_REFUSED, Gateway: "10.242.0.1",
			AddressCount: 256, ReservedCount: 3, RefusedReason: "node n2 has it and is alive",
		},
	}
}

func (f *ipam) ListPools(context.Context, *ipamv1.ListPoolsRequest) (*ipamv1.ListPoolsResponse, error) {
	return &ipamv1.ListPoolsResponse{Pools: f.pools()}, nil
}

func (f *ipam) ListAllocations(_ *ipamv1.ListAllocationsRequest,
	s grpc.ServerStreamingServer[ipamv1.ListAllocationsResponse],
) error {
	if len(f.Allocations) > 0 {
		for _, a := range f.Allocations[0] {
			if err := s.Send(&ipamv1.ListAllocationsResponse{Allocation: a}); err != nil {
				return err
			}
		}
		f.Allocations = f.Allocations[min(1, len(f.Allocations)-1):]
		return nil
	}
	return s.Send(&ipamv1.ListAllocationsResponse{Allocation: &ipamv1.Allocation{
		Owner:           &workloadv1.Owner{ContainerId: LongID, InterfaceName: "eth0"},
		Addresses:       []*ipamv1.Address{{Address: "10.244.0.2"}},
		State:           ipamv1.AllocationState_ALLOCATION_STATE_LEASED,
		LeaseExpireTime: timestamppb.New(time.Now().Add(time.Minute)),
	}})
}

// Release implements the service.
func (f *ipam) Release(_ context.Context, r *ipamv1.ReleaseRequest) (*ipamv1.ReleaseResponse, error) {
	f.Released = r
	for _, a := range f.Allocations[0] {
		if proto.Equal(a.GetOwner(), r.GetOwner()) {
			return &ipamv1.ReleaseResponse{Released: a}, f.ReleaseOf
		}
	}
	return &ipamv1.ReleaseResponse{}, f.ReleaseOf
}

func (f *ipam) GetStatus(context.Context, *ipamv1.GetStatusRequest) (*ipamv1.GetStatusResponse, error) {
	service := serviceStatus(f.Problems...)
	for _, text := range f.StoreProblems {
		p := &statusv1.Problem{Reason: statusv1.ProblemReason_PROBLEM_REASON_STORE, Text: text}
		service.Problems = append(service.Problems, p)
	}
	return &ipamv1.GetStatusResponse{Service: service, Pools: f.pools()}, nil
}
