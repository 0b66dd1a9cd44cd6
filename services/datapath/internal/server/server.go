// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package server implements the datapath's gRPC API. It only converts requests and answers; decisions are made by the
// core.
package server

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/observe"
)

// Server implements the services of the datapath.
type Server struct {
	sharesv1.UnimplementedSharesServiceServer
	datapathv1.UnimplementedConnectionServiceServer
	datapathv1.UnimplementedDatapathServiceServer
	datapathv1.UnimplementedDNSReportServiceServer
	datapathv1.UnimplementedObserverServiceServer

	Endpoints lifecycle.Parts
	Ring      *observe.Ring
	Facts     Facts
	// Parts describe the subjects in status and metrics, in the order of their warnings.
	Parts []Part
	// Bounds are the limits that endpoints share in the programs' maps; nil: ListShares omits them.
	Bounds *bound.Bounds
	// Budgets are the budgets in the maps of connections; nil: ListShares omits them.
	Budgets Budgets
	Called  Called
	// Named returns the name that identity registered this node under, empty if it is unknown; nil: unknown.
	Named func() string
	// Services reads the services that the kernel translates.
	Services Services
	// Backends counts connections; nil: services are not translated.
	Backends Backends
	// Ranges are the node's pod ranges.
	Ranges PodRanges
	// Policy describes the policies; nil in policy mode none.
	Policy *PolicyPart
	// Records reports whether endpoint records can be written.
	Records interface{ Err() error }
	// Subjects are the parts of the process.
	Subjects []Subject
	// Explainer answers Explain.
	Explainer Explainer
	// Tracked are the connections of the kernel.
	Tracked Tracked
	// Ends looks up the ends of reported DNS messages.
	Ends Ends
	// Maps reads maps for DumpMap.
	Maps Maps
	// Labels looks up the labels of identities; nil: all are unknown.
	Labels *observe.Labels
	// NameOf returns the name of another node by its node ID, "" if it is unknown; nil: all are unknown.
	NameOf func(uint16) string
	// Rules resolves the rules in verdicts; nil: all are unknown.
	Rules Rules

	history history

	mu      sync.Mutex
	unready time.Time // guarded by mu; since when no ADD can be served
	// Process describes the configuration of this process.
	Process wire.Process
}

// Options are what the server needs beside the subjects.
type Options struct {
	// Process describes the configuration of this process.
	Process wire.Process
	Facts   Facts
	Called  Called
	// Named returns the name that identity registered this node under, empty if it is unknown.
	Named func() string
	// Records reports whether endpoint records can be written.
	Records interface{ Err() error }
	// Labels looks up the labels of identities that no endpoint of this node has.
	Labels observe.LabelSource
	// Subjects contribute to status, metrics and calls.
	Subjects []Subject
}

// New returns a server of the subjects.
func New(o Options) *Server {
	of := o.Subjects
	endpoints := find[Endpoints](of)
	calls := endpoints.Calls()
	var policy *PolicyPart
	var rules Rules
	if p := find[Policy](of); p != nil {
		policy = &PolicyPart{
			Tables: p, Modes: p.AuditModes(), Report: calls.Report, Required: p.Required(), Audit: p.AuditsAll(),
		}
		rules = p.History()
	}
	return &Server{
		Process: o.Process, Facts: o.Facts, Called: o.Called, Named: o.Named, Records: o.Records,
		Labels:   &observe.Labels{Local: calls.Report.LabelsOf, Source: o.Labels},
		Subjects: of, Parts: parts(of, policy), Policy: policy, Rules: rules,
		Endpoints: calls, Ranges: endpoints,
		Ring: find[Events](of).EventRing(), Ends: find[Ends](of), Explainer: find[Explainer](of), Tracked: find[Tracked](of),
		Maps: find[Maps](of), Bounds: find[Bounds](of).SharedBounds(), Budgets: find[Budgets](of),
		Services: find[Services](of), Backends: find[Backends](of), NameOf: find[Cluster](of).Name,
	}
}

// Register registers the services.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	datapathv1.RegisterConnectionServiceServer(r, s)
	datapathv1.RegisterDatapathServiceServer(r, s)
	datapathv1.RegisterObserverServiceServer(r, s)
	datapathv1.RegisterDNSReportServiceServer(r, s)
	sharesv1.RegisterSharesServiceServer(r, s)
	statusv1.RegisterProcessServiceServer(r, s.Process)
}

// More concurrent creations do not help, because the kernel serialises them.
const (
	creating = 4
	waiting  = 8
)

// Methods returns the access rules and concurrency limits of the methods.
func Methods() rpc.Methods {
	root, group := rpc.Method{Access: rpc.Root()}, rpc.Method{Access: rpc.Group()}
	streams := rpc.Method{Access: rpc.Group(), Limit: rpc.Limit{InFlight: 64}}
	look := rpc.Method{Access: rpc.Group(), Limit: rpc.Limit{InFlight: 8, Waiting: 64}}
	return rpc.Methods{
		statusv1.ProcessService_GetConfig_FullMethodName:   {Access: rpc.Group()},
		statusv1.ProcessService_SetLogLevel_FullMethodName: {Access: rpc.Root()},
		datapathv1.DatapathService_CreateEndpoint_FullMethodName: {
			Access: rpc.Root(), Limit: rpc.Limit{InFlight: creating, Waiting: waiting}, Prepared: true,
		},
		datapathv1.DatapathService_UpdateEndpoint_FullMethodName: {
			Access: rpc.Root(), Limit: rpc.Limit{InFlight: 64, Waiting: 1024},
		},
		datapathv1.DatapathService_DeleteEndpoint_FullMethodName: root,
		datapathv1.DatapathService_SetAuditMode_FullMethodName: {
			Access: rpc.Root(), Limit: rpc.Limit{InFlight: 1, Waiting: 64},
		},
		datapathv1.DatapathService_ReclaimEndpoints_FullMethodName: {Access: rpc.Root(), Limit: rpc.Limit{InFlight: 1, Waiting: 1}},
		// a request may ask for a repair, so only root may call the method
		datapathv1.DatapathService_AuditMaps_FullMethodName:          {Access: rpc.Root(), Limit: rpc.Limit{InFlight: 1, Waiting: 1}},
		datapathv1.DatapathService_CheckEndpoint_FullMethodName:      look,
		datapathv1.DatapathService_GetEndpoint_FullMethodName:        group,
		datapathv1.DatapathService_ListEndpoints_FullMethodName:      group,
		datapathv1.DatapathService_WatchEndpoints_FullMethodName:     streams,
		datapathv1.DatapathService_ListEndpointEvents_FullMethodName: look,
		datapathv1.DatapathService_GetStatus_FullMethodName:          look,
		datapathv1.DatapathService_ListFrontends_FullMethodName:      look,
		// each call of the next three methods reads the whole connection table
		datapathv1.DatapathService_ListBackendConnections_FullMethodName: {
			Access: rpc.Group(), Limit: rpc.Limit{InFlight: 2, Waiting: 16},
		},
		datapathv1.ConnectionService_ListConnections_FullMethodName: {
			Access: rpc.Group(), Limit: rpc.Limit{InFlight: 4, Waiting: 16},
		},
		datapathv1.ConnectionService_FlushConnections_FullMethodName: {
			Access: rpc.Root(), Limit: rpc.Limit{InFlight: 1, Waiting: 8},
		},
		datapathv1.DatapathService_DumpMap_FullMethodName: {Access: rpc.Root(), Limit: rpc.Limit{InFlight: 2, Waiting: 8}},
		datapathv1.ObserverService_Observe_FullMethodName: streams,
		datapathv1.ObserverService_Explain_FullMethodName: look,
		datapathv1.DNSReportService_ReportDNSMessages_FullMethodName: {
			Access: rpc.RootAnd(instance.DNSID), Limit: rpc.Limit{InFlight: 1, Waiting: 4},
		},
		sharesv1.SharesService_ListShares_FullMethodName: {Access: rpc.Group(), Limit: rpc.Limit{InFlight: 4, Waiting: 32}},
	}
}

// ListShares implements SharesService.
func (s *Server) ListShares(
	req *sharesv1.ListSharesRequest, stream grpc.ServerStreamingServer[sharesv1.ListSharesResponse],
) error {
	if s.Policy != nil {
		if err := wire.SendShares(s.Policy.Tables.Shares(), req, stream); err != nil {
			return err
		}
	}
	return s.sendEndpointShares(req.GetTenant(), stream)
}

// CreateEndpoint implements the API.
func (s *Server) CreateEndpoint(ctx context.Context, r *datapathv1.CreateEndpointRequest) (*datapathv1.CreateEndpointResponse, error) {
	spec, err := specOf(r)
	if err != nil {
		return nil, statusOf(err)
	}
	e, err := s.Endpoints.Lifecycle.Create(ctx, spec, r.GetValidateOnly())
	if err != nil {
		return nil, statusOf(err)
	}
	return &datapathv1.CreateEndpointResponse{Endpoint: s.endpoint(e)}, nil
}

// UpdateEndpoint implements the API.
func (s *Server) UpdateEndpoint(
	ctx context.Context, r *datapathv1.UpdateEndpointRequest,
) (*datapathv1.UpdateEndpointResponse, error) {
	u := lifecycle.Update{Owner: wire.OwnerOf(r.GetOwner()), Manager: r.GetManager()}
	if r.GetLabels() != nil {
		labels := wire.LabelsOf(r.GetLabels().GetLabels())
		u.Labels = &labels
	}
	if r.GetNamedPorts() != nil {
		ports := wire.NamedPortsOf(r.GetNamedPorts().GetNamedPorts())
		u.Ports = &ports
	}
	e, err := s.Endpoints.Relabeller.Update(ctx, u, r.GetValidateOnly())
	if err != nil {
		return nil, statusOf(err)
	}
	return &datapathv1.UpdateEndpointResponse{Endpoint: s.endpoint(e)}, nil
}

// DeleteEndpoint implements the API.
func (s *Server) DeleteEndpoint(ctx context.Context, r *datapathv1.DeleteEndpointRequest) (*datapathv1.DeleteEndpointResponse, error) {
	how := lifecycle.Removal{UnlessInUse: r.GetUnlessInUse(), ValidateOnly: r.GetValidateOnly()}
	was, existed, err := s.Endpoints.Lifecycle.Remove(ctx, wire.OwnerOf(r.GetOwner()), how)
	if err != nil {
		return nil, statusOf(err)
	}
	answer := &datapathv1.DeleteEndpointResponse{Existed: existed}
	if was.Spec.Owner != (workload.Owner{}) {
		answer.Endpoint = s.endpoint(was)
	}
	return answer, nil
}

// CheckEndpoint implements the API.
func (s *Server) CheckEndpoint(ctx context.Context, r *datapathv1.CheckEndpointRequest) (*datapathv1.CheckEndpointResponse, error) {
	addrs, err := addrsOf("addresses", r.GetAddresses())
	if err != nil {
		return nil, statusOf(err)
	}
	expected := lifecycle.Expected{Netns: r.GetNetworkNamespace(), Addrs: addrs}
	diffs, err := s.Endpoints.Reconciler.Check(ctx, wire.OwnerOf(r.GetOwner()), expected)
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &datapathv1.CheckEndpointResponse{}
	for _, d := range diffs {
		resp.Differences = append(resp.Differences, protoDifference(d))
	}
	return resp, nil
}

// GetEndpoint implements the API.
func (s *Server) GetEndpoint(_ context.Context, r *datapathv1.GetEndpointRequest) (*datapathv1.GetEndpointResponse, error) {
	e, err := s.Endpoints.Report.Get(wire.OwnerOf(r.GetOwner()))
	if err != nil {
		return nil, statusOf(err)
	}
	return &datapathv1.GetEndpointResponse{Endpoint: s.endpoint(e)}, nil
}

// ListEndpoints implements the API.
func (s *Server) ListEndpoints(r *datapathv1.ListEndpointsRequest, stream grpc.ServerStreamingServer[datapathv1.ListEndpointsResponse]) error {
	for _, e := range s.Endpoints.Report.List() {
		if m := r.GetManager(); m != "" && m != e.Spec.Manager {
			continue
		}
		if n := r.GetNetwork(); n != "" && n != e.Spec.Network {
			continue
		}
		if err := stream.Send(&datapathv1.ListEndpointsResponse{Endpoint: s.endpoint(e)}); err != nil {
			return err
		}
	}
	return nil
}

// WatchEndpoints implements the API.
func (s *Server) WatchEndpoints(r *datapathv1.WatchEndpointsRequest, stream grpc.ServerStreamingServer[datapathv1.WatchEndpointsResponse]) error {
	return watch.Serve(stream.Context(), s.Endpoints.Report.Hub(), r.GetResumeToken(), func(e watch.Event[workload.Owner, endpoint.Endpoint]) error {
		m := &datapathv1.WatchEndpointsResponse{ResumeToken: e.Token}
		switch e.Kind {
		case watch.Upsert:
			m.Event = &datapathv1.WatchEndpointsResponse_Upsert{Upsert: s.endpoint(e.Value)}
		case watch.Delete:
			m.Event = &datapathv1.WatchEndpointsResponse_Delete{Delete: wire.Owner(e.Key)}
		case watch.Bookmark:
			m.Event = &datapathv1.WatchEndpointsResponse_Bookmark{Bookmark: &datapathv1.Bookmark{SnapshotComplete: e.SnapshotComplete}}
		}
		return stream.Send(m)
	})
}

// ReclaimEndpoints implements the API.
func (s *Server) ReclaimEndpoints(ctx context.Context, r *datapathv1.ReclaimEndpointsRequest) (*datapathv1.ReclaimEndpointsResponse, error) {
	if len(r.GetValidOwners()) == 0 && !r.GetNoneValid() {
		return nil, statusOf(&endpoint.FieldError{Field: "valid_owners", Reason: "is empty, which deletes every endpoint of the network; set none_valid if that is meant"})
	}
	if len(r.GetValidOwners()) > 0 && r.GetNoneValid() {
		return nil, statusOf(&endpoint.FieldError{Field: "none_valid", Reason: "is set, and valid_owners is not empty"})
	}
	var valid []workload.Owner
	for _, o := range r.GetValidOwners() {
		valid = append(valid, wire.OwnerOf(o))
	}
	in := endpoint.Scope{Manager: r.GetManager(), Network: r.GetNetwork()}
	reclaimed, err := s.Endpoints.Lifecycle.Reclaim(ctx, in, valid, r.GetValidateOnly())
	if err != nil {
		return nil, statusOf(err)
	}
	resp := &datapathv1.ReclaimEndpointsResponse{}
	for _, o := range reclaimed {
		resp.Reclaimed = append(resp.Reclaimed, wire.Owner(o))
	}
	return resp, nil
}

// AuditMaps implements the API.
func (s *Server) AuditMaps(r *datapathv1.AuditMapsRequest, stream grpc.ServerStreamingServer[datapathv1.AuditMapsResponse]) error {
	send := func(f endpoint.Finding) error {
		m := &datapathv1.AuditMapsResponse{Difference: protoDifference(f.Difference), Repaired: f.Repaired}
		if f.Err != nil {
			m.Error = f.Err.Error()
		}
		return stream.Send(m)
	}
	if err := s.Endpoints.Reconciler.Audit(stream.Context(), r.GetRepair(), send); err != nil {
		return statusOf(err)
	}
	return statusOf(s.Endpoints.Reconciler.AuditContainers(stream.Context(), r.GetRepair(), send))
}

func direction(egress bool) netv1.Direction {
	if egress {
		return netv1.Direction_DIRECTION_EGRESS
	}
	return netv1.Direction_DIRECTION_INGRESS
}
