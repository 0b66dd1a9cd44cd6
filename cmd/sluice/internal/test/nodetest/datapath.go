// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	hubblev1 "github.com/sluice-net/sluice/proto/gen/sluice/hubble/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func (f *observer) Explain(_ context.Context, r *datapathv1.ExplainRequest) (*datapathv1.ExplainResponse, error) {
	f.node.Evaluated = r
	if x := f.node.Explained[r.GetDestinationAddress()]; x != nil {
		return x, nil
	}
	if r.GetDestinationAddress() == "192.0.2.1" {
		return nil, status.Error(codes.NotFound, "neither address belongs to an endpoint of this node")
	}
	return &datapathv1.ExplainResponse{
		Verdict: datapathv1.Verdict_VERDICT_DROPPED, Reason: datapathv1.Reason_REASON_POLICY_DENIED,
		Source: &datapathv1.ExplainedPeer{
			Identity: 300, Known: true, IdentityClass: 4,
			Owner:         &workloadv1.Owner{ContainerId: LongID, InterfaceName: "eth0"},
			EndpointIndex: 1, IpcachePrefix: "10.244.0.2/32",
			Labels: []*workloadv1.Label{Label("app", "web\a")},
		},
		Destination: &datapathv1.ExplainedPeer{Identity: 301, IpcachePrefix: "10.244.0.3/32"},
		Egress: &datapathv1.ExplainedSide{Verdict: &datapathv1.SideVerdict{
			Verdict: datapathv1.Verdict_VERDICT_FORWARDED,
			Table:   verdict.TableAllow, DecidedBy: netv1.DecidedBy_DECIDED_BY_NO_POLICY,
		}},
		Ingress: &datapathv1.ExplainedSide{
			Verdict: &datapathv1.SideVerdict{
				Verdict: datapathv1.Verdict_VERDICT_DROPPED, Table: 17, Rule: 2,
				Epoch: 9, Revision: 6, DecidedBy: netv1.DecidedBy_DECIDED_BY_RULE,
				RuleSources: []string{"NetworkPolicy shop/db"},
			},
			IdentityClass: 3, IdentityRow: true, AddressClass: 1, AddressPrefix: "10.244.0.0/24",
		},
		Connection: &datapathv1.Connection{
			InitiatorAddress: "10.244.0.2", InitiatorPort: 4000, ResponderAddress: "10.244.0.3", ResponderPort: 80, Protocol: 6,
			States:       []datapathv1.ConnectionState{datapathv1.ConnectionState_CONNECTION_STATE_ESTABLISHED},
			LastSeenTime: timestamppb.New(time.Now().Add(-3 * time.Second)), IngressRule: 1,
			NextVerdict: datapathv1.Verdict_VERDICT_DROPPED, NextReason: datapathv1.Reason_REASON_POLICY_DENIED,
		},
	}, nil
}

func (f *datapath) DumpMap(r *datapathv1.DumpMapRequest,
	s grpc.ServerStreamingServer[datapathv1.DumpMapResponse],
) error {
	if r.GetName() != "sl_peer" {
		return status.Error(codes.NotFound, fmt.Sprintf("no map %q; there are sl_ct, sl_peer", r.GetName()))
	}
	for i := range 3 {
		m := &datapathv1.DumpMapResponse{Key: fmt.Sprintf("set 16 class %d", i), Value: "class 2"}
		last := uint32(i+1) == r.GetLimit()
		if last {
			m.OmittedEntryCount = uint64(2 - i)
		}
		if err := s.Send(m); err != nil || last {
			return err
		}
	}
	return nil
}

func (f *datapath) AuditMaps(r *datapathv1.AuditMapsRequest,
	s grpc.ServerStreamingServer[datapathv1.AuditMapsResponse],
) error {
	for _, d := range f.node.Differences {
		if err := s.Send(&datapathv1.AuditMapsResponse{
			Difference: d,
			Repaired:   r.GetRepair() && d.GetSubject() != "pin",
		}); err != nil {
			return err
		}
	}
	if r.GetRepair() {
		f.node.Differences = slices.DeleteFunc(f.node.Differences,
			func(d *datapathv1.Difference) bool { return d.GetSubject() != "pin" })
	}
	return nil
}

type datapath struct {
	datapathv1.UnimplementedDatapathServiceServer
	node *Node
}

func (f *datapath) ListEndpoints(_ *datapathv1.ListEndpointsRequest,
	s grpc.ServerStreamingServer[datapathv1.ListEndpointsResponse],
) error {
	if f.node.Endpoints != nil {
		for _, e := range f.node.Endpoints {
			if err := s.Send(&datapathv1.ListEndpointsResponse{Endpoint: e}); err != nil {
				return err
			}
		}
		return nil
	}
	for i, id := range []string{LongID, "evil\x1b[2J"} {
		e := endpointOf(&workloadv1.Owner{ContainerId: id, InterfaceName: "eth0"}, i+1)
		if i == 0 {
			e.Pod = f.node.Pod
		}
		if err := s.Send(&datapathv1.ListEndpointsResponse{Endpoint: e}); err != nil {
			return err
		}
	}
	return nil
}

// endpointOf returns an endpoint of the node.
func endpointOf(o *workloadv1.Owner, index int) *datapathv1.Endpoint {
	return &datapathv1.Endpoint{
		Owner: o, EndpointIndex: uint32(index),
		State:    datapathv1.EndpointState_ENDPOINT_STATE_READY,
		Identity: 300, Labels: []*workloadv1.Label{Label("app", "web\x1b]0;x\a")}, Mtu: 1500,
		NetworkNamespace:   "/run/netns/x",
		Addresses:          []string{fmt.Sprintf("10.244.0.%d", index+1), "fd00:244::2"},
		HostInterface:      &datapathv1.Interface{Name: "sl0", Index: 7, Mac: "02:00:00:00:00:01"},
		ContainerInterface: &datapathv1.Interface{Name: "eth0", Index: 2, Mac: "02:00:00:00:00:02"},
		NamedPorts:         []*workloadv1.NamedPort{{Name: "http", Port: 80, Protocol: netv1.Protocol_PROTOCOL_TCP}},
		PortMappings: []*datapathv1.PortMapping{
			{HostPort: 8080, ContainerPort: 80, Protocol: netv1.Protocol_PROTOCOL_TCP},
			{HostPort: 53, ContainerPort: 5353, Protocol: netv1.Protocol_PROTOCOL_UDP, HostIp: "2001:db8::1"},
		},
		LeaveSockets: true,
		Policy: &datapathv1.EndpointPolicy{
			Revision: 6, EgressTable: verdict.TableAllow, IngressTable: 17,
			Epoch: 9, Refusal: "no capacity",
		},
	}
}

func (*datapath) UpdateEndpoint(_ context.Context, r *datapathv1.UpdateEndpointRequest,
) (*datapathv1.UpdateEndpointResponse, error) {
	e := &datapathv1.Endpoint{
		Owner: r.GetOwner(), Identity: 300, Labels: r.GetLabels().GetLabels(), NamedPorts: r.GetNamedPorts().GetNamedPorts(),
	}
	if len(e.GetLabels()) > 0 {
		e.Identity = 301
	}
	return &datapathv1.UpdateEndpointResponse{Endpoint: e}, nil
}

func (f *datapath) CheckEndpoint(_ context.Context, r *datapathv1.CheckEndpointRequest,
) (*datapathv1.CheckEndpointResponse, error) {
	if r.GetOwner().GetContainerId() != LongID {
		return &datapathv1.CheckEndpointResponse{}, nil
	}
	return &datapathv1.CheckEndpointResponse{Differences: f.node.Differences}, nil
}

// DeleteEndpoint knows the endpoints LongID, whose container still exists, one whose container has ended, and
// "unreadable".
func (f *datapath) DeleteEndpoint(_ context.Context, r *datapathv1.DeleteEndpointRequest,
) (*datapathv1.DeleteEndpointResponse, error) {
	f.node.Deleted = r
	switch id := r.GetOwner().GetContainerId(); {
	case id == LongID && r.GetUnlessInUse():
		return nil, rpcerr.New(codes.FailedPrecondition, rpcerr.Of(datapathv1.ErrorReason_ERROR_REASON_ENDPOINT_IN_USE),
			errors.New("endpoint of x: it is in use: its network namespace /run/netns/x still exists"))
	case id == "unreadable":
		return &datapathv1.DeleteEndpointResponse{Existed: true}, nil
	case id == "missing":
		return &datapathv1.DeleteEndpointResponse{}, nil
	}
	return &datapathv1.DeleteEndpointResponse{Existed: true, Endpoint: endpointOf(r.GetOwner(), 1)}, nil
}

// SetAuditMode returns the requested mode with a fixed end.
func (f *datapath) SetAuditMode(_ context.Context, r *datapathv1.SetAuditModeRequest,
) (*datapathv1.SetAuditModeResponse, error) {
	f.node.Audited = r
	answer := &datapathv1.SetAuditModeResponse{Mode: &datapathv1.AuditMode{}}
	var until *timestamppb.Timestamp
	if r.GetEnabled() {
		until, answer.Mode.EndpointCount = timestamppb.New(time.Unix(1e9, 0)), 1
	}
	if r.GetNode() {
		answer.Mode.NodeExpireTime = until
		return answer, nil
	}
	answer.Endpoint = endpointOf(r.GetOwner(), 1)
	answer.Endpoint.Policy.Audit, answer.Endpoint.Policy.AuditExpireTime = r.GetEnabled(), until
	return answer, nil
}

// ListEndpointEvents sends the recorded changes.
func (f *datapath) ListEndpointEvents(_ *datapathv1.ListEndpointEventsRequest,
	s grpc.ServerStreamingServer[datapathv1.ListEndpointEventsResponse],
) error {
	at := timestamppb.New(time.Date(2026, 11, 27, 10, 0, 0, 0, time.UTC))
	web, gone := endpointOf(&workloadv1.Owner{ContainerId: LongID, InterfaceName: "eth0"}, 1),
		endpointOf(&workloadv1.Owner{ContainerId: "gone", InterfaceName: "eth0"}, 2)
	gone.Pod = &workloadv1.PodReference{Namespace: "shop", Name: "gone"}
	later := proto.CloneOf(web)
	later.Identity = 999
	for _, m := range []*datapathv1.ListEndpointEventsResponse{
		{Endpoint: gone}, {Endpoint: web}, {Endpoint: later, Previous: web}, {Previous: gone},
	} {
		m.Time = at
		if err := s.Send(m); err != nil {
			return err
		}
	}
	return nil
}

// WatchEndpoints plays the next stream; after the last one, it blocks until the call ends.
func (f *datapath) WatchEndpoints(r *datapathv1.WatchEndpointsRequest,
	s grpc.ServerStreamingServer[datapathv1.WatchEndpointsResponse],
) error {
	f.node.mu.Lock()
	f.node.Watched = append(f.node.Watched, r)
	var next EndpointStream
	last := len(f.node.endpointStreams) == 0
	if !last {
		next, f.node.endpointStreams = f.node.endpointStreams[0], f.node.endpointStreams[1:]
	}
	f.node.mu.Unlock()
	if last {
		<-s.Context().Done()
		return nil
	}
	for _, m := range next.Messages {
		if err := s.Send(m); err != nil {
			return err
		}
	}
	return next.End
}

func (f *datapath) GetStatus(context.Context, *datapathv1.GetStatusRequest) (*datapathv1.GetStatusResponse, error) {
	r := &datapathv1.GetStatusResponse{
		Service: serviceStatus(), AddReady: f.node.AddReady, KnownAddReady: f.node.KnownReady,
		PolicyMode: f.node.PolicyMode, KernelRelease: "6.18",
		NodeAddresses: []string{"10.244.0.1"}, PodPrefixes: []string{"10.244.0.0/24", "fd00:244::/64"}, PolicyRevision: 5,
		PolicyRefusals: []string{"identity 300: no capacity"},
		Warnings:       []string{"a/eth0: tcx program sl1 egress: expected nothing, found passes, program 113"},
		Connections:    &datapathv1.ConnectionCounts{Live: 7, Created: 9, Revoked: 1, Expired: 1},
		IdentityStream: &datapathv1.IdentityStream{
			Complete: f.node.StreamError == "", Error: f.node.StreamError, Changed: 4, Pending: 1,
		},
		Maps: []*datapathv1.MapUsage{
			{Name: "sl_ct", Entries: -1, MaxEntries: 65536, Bytes: 1024},
			{Name: "sl_peer", Entries: 3, MaxEntries: 16, Bytes: 512},
		},
		Endpoints: []*datapathv1.EndpointStateCount{{State: datapathv1.EndpointState_ENDPOINT_STATE_READY, Count: 2}},
		PacketCounters: []*datapathv1.PacketCounter{
			{
				Reason: datapathv1.Reason_REASON_NO_ROUTE, Direction: netv1.Direction_DIRECTION_EGRESS,
				Dropped: true, Packets: 4, Bytes: 400,
			},
			{Reason: datapathv1.Reason_REASON_HAIRPIN, Direction: netv1.Direction_DIRECTION_EGRESS},
		},
	}
	if f.node.Healthy {
		r.PolicyRefusals, r.Warnings = nil, nil
	}
	r.NodeProbes, r.PodRouting, r.Proxies = f.node.Probes, f.node.Routing, f.node.Proxies
	if f.node.Balances {
		r.FrontendStream = &datapathv1.FrontendStream{
			Complete: f.node.FrontendError == "", Error: f.node.FrontendError, Revision: 6, EndedRevision: 6, Frontends: 1,
			Backends: 2,
		}
	}
	if !f.node.AddReady {
		r.Service = serviceStatus("identity does not answer")
	}
	return r, nil
}

func (f *datapath) ListFrontends(_ *datapathv1.ListFrontendsRequest,
	s grpc.ServerStreamingServer[datapathv1.ListFrontendsResponse],
) error {
	for _, frontend := range f.node.Frontends {
		if err := s.Send(&datapathv1.ListFrontendsResponse{Frontend: frontend}); err != nil {
			return err
		}
	}
	return nil
}

func (f *datapath) ListBackendConnections(_ *datapathv1.ListBackendConnectionsRequest,
	s grpc.ServerStreamingServer[datapathv1.ListBackendConnectionsResponse],
) error {
	if f.node.ConnectionsError != nil {
		return f.node.ConnectionsError
	}
	for _, b := range f.node.Connections {
		if err := s.Send(&datapathv1.ListBackendConnectionsResponse{Backend: b}); err != nil {
			return err
		}
	}
	return nil
}

type observer struct {
	datapathv1.UnimplementedObserverServiceServer
	node *Node
}

// deletions delete 7 stored events.
type deletions struct {
	hubblev1.UnimplementedHistoryServiceServer
	node *Node
}

func (f deletions) DeleteFlows(
	_ context.Context, r *hubblev1.DeleteFlowsRequest,
) (*hubblev1.DeleteFlowsResponse, error) {
	f.node.DeletedFlows = r
	return &hubblev1.DeleteFlowsResponse{DeletedCount: 7}, nil
}

// pages is the web page of sluice-hubble.
type pages struct {
	hubblev1.UnimplementedPageServiceServer
}

func (pages) GetPage(context.Context, *hubblev1.GetPageRequest) (*hubblev1.GetPageResponse, error) {
	return &hubblev1.GetPageResponse{Url: "http://127.0.0.1:4246/#token"}, nil
}

// stored is the events of sluice-hubble: those of the datapath, unless the node has others.
type stored struct{ observer }

func (f *stored) Observe(r *datapathv1.ObserveRequest, s grpc.ServerStreamingServer[datapathv1.ObserveResponse]) error {
	if f.node.Stored == nil {
		return f.observer.Observe(r, s)
	}
	f.node.Observed <- r
	for _, m := range f.node.Stored {
		if err := s.Send(m); err != nil {
			return err
		}
	}
	return nil
}

func (f *observer) Observe(r *datapathv1.ObserveRequest,
	s grpc.ServerStreamingServer[datapathv1.ObserveResponse],
) error {
	f.node.Observed <- r
	if i := slices.Index(r.GetPorts(), 1); i >= 0 {
		field := fmt.Sprintf("ports[%d]", i)
		return rpcerr.New(codes.InvalidArgument, rpcerr.Reason{Domain: "datapath.sluice.io", Name: "INVALID"},
			errors.New("a text that is for people"),
			rpcerr.Field(field, field+": this node does not have it"),
			rpcerr.Field("selectors[0].requirements[1].key", "must be shorter"))
	}
	for _, flow := range f.node.Flows {
		if err := s.Send(&datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Flow{Flow: flow}}); err != nil {
			return err
		}
	}
	for _, m := range []*datapathv1.ObserveResponse{
		{Event: &datapathv1.ObserveResponse_Flow{Flow: &datapathv1.Flow{
			Time: timestamppb.New(time.Unix(1e9, 0)), Verdict: datapathv1.Verdict_VERDICT_DROPPED,
			Reason:    datapathv1.Reason_REASON_SPOOFED_IP,
			Direction: netv1.Direction_DIRECTION_EGRESS,
			Uuid:      "1f0c2a5e-7b1d-8e42-8000-000000000001", NodeName: "node-1",
			Source: &datapathv1.FlowEnd{
				Address: "198.51.100.7", Port: 1234, Identity: 300, EndpointIndex: 1,
				Owner: &workloadv1.Owner{ContainerId: LongID, InterfaceName: "eth0"},
				Pod:   &workloadv1.PodReference{Namespace: "shop", Name: "web-0", Uid: "u"},
			},
			Destination: &datapathv1.FlowEnd{Address: "10.244.0.2", Port: 53},
			Protocol:    17, Length: 60,
			SourceMac: "02:00:00:00:00:02", Ethertype: 0x800,
		}}},
		{Event: &datapathv1.ObserveResponse_Lost{Lost: &datapathv1.LostEvents{
			Source: datapathv1.LossSource_LOSS_SOURCE_KERNEL, Count: 12,
		}}},
	} {
		if err := s.Send(m); err != nil {
			return err
		}
	}
	return nil
}
