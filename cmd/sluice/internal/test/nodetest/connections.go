// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetest

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

type connections struct {
	datapathv1.UnimplementedConnectionServiceServer
	node *Node
}

// ListConnections returns three connections: from a pod to a service, from a container to the node, and one in
// transit.
func (f *connections) ListConnections(r *datapathv1.ListConnectionsRequest,
	s grpc.ServerStreamingServer[datapathv1.ListConnectionsResponse],
) error {
	f.node.Listed = r
	seen := timestamppb.New(time.Now().Add(-3 * time.Second))
	all := []*datapathv1.TrackedConnection{{
		Connection: &datapathv1.Connection{
			InitiatorAddress: "10.244.0.2", InitiatorPort: 4000, ResponderAddress: "10.244.0.3", ResponderPort: 8080,
			Protocol:     6,
			States:       []datapathv1.ConnectionState{datapathv1.ConnectionState_CONNECTION_STATE_ESTABLISHED},
			LastSeenTime: seen, Current: true,
		},
		Initiator: &datapathv1.ConnectionEnd{
			Identity: 300, EndpointIndex: 1, Owner: &workloadv1.Owner{ContainerId: LongID, InterfaceName: "eth0"},
			Pod: &workloadv1.PodReference{Namespace: "shop", Name: "web-0", Uid: "u"},
		},
		Responder: &datapathv1.ConnectionEnd{Identity: 301}, AskedAddress: "10.96.0.1", AskedPort: 80, Service: "shop/db:sql",
	}, {
		Connection: &datapathv1.Connection{
			InitiatorAddress: "fd00:244::2", ResponderAddress: "fd00:244::1", Protocol: netv1.Protocol_PROTOCOL_ICMPV6,
			States:       []datapathv1.ConnectionState{datapathv1.ConnectionState_CONNECTION_STATE_OPENING},
			LastSeenTime: seen,
		},
		Initiator: &datapathv1.ConnectionEnd{
			Identity: 300, EndpointIndex: 2, Owner: &workloadv1.Owner{ContainerId: "evil\x1b[2J", InterfaceName: "eth0"},
		},
		Responder: &datapathv1.ConnectionEnd{Identity: 1, LocalNode: true},
	}, {
		Connection: &datapathv1.Connection{
			InitiatorAddress: "198.51.100.7", InitiatorPort: 5000, ResponderAddress: "10.244.1.3", ResponderPort: 8080,
			Protocol:     6,
			States:       []datapathv1.ConnectionState{datapathv1.ConnectionState_CONNECTION_STATE_ESTABLISHED},
			LastSeenTime: seen, Current: true, InTransit: true, SourceAddress: "10.244.0.1", SourcePort: 20000,
		},
		Initiator: &datapathv1.ConnectionEnd{Identity: 9}, Responder: &datapathv1.ConnectionEnd{Identity: 301},
		AskedAddress: "192.0.2.1", AskedPort: 30080, Service: "shop/web:http", NodeName: "node-b", EarlierLayout: true,
	}}
	for i, c := range all {
		m := &datapathv1.ListConnectionsResponse{Connection: c}
		last := uint32(i+1) == r.GetLimit()
		if last {
			m.OmittedConnectionCount = uint64(len(all) - 1 - i)
		}
		if err := s.Send(m); err != nil || last {
			return err
		}
	}
	return nil
}

func (f *connections) FlushConnections(_ context.Context, r *datapathv1.FlushConnectionsRequest,
) (*datapathv1.FlushConnectionsResponse, error) {
	f.node.Flushed = r
	filter := r.GetFilter()
	if len(filter.GetPorts())+len(filter.GetOwners()) == 0 && !r.GetAll() {
		return nil, rpcerr.New(codes.InvalidArgument, rpcerr.Of(datapathv1.ErrorReason_ERROR_REASON_INVALID_REQUEST),
			errors.New("filter: has no criterion"), rpcerr.Field("filter", "has no criterion, which means every connection"))
	}
	if r.GetAll() {
		return &datapathv1.FlushConnectionsResponse{
			FlushedCount: 9, TerminatedCount: 1, UnrememberedCount: 2, BusyCount: 3,
		}, nil
	}
	return &datapathv1.FlushConnectionsResponse{FlushedCount: 1}, nil
}
