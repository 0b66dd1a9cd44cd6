// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package server implements the API sluice.loadbalancer.v1 for the owner of services.
//
// It only converts: requests to types of the core and, in one function, errors of the core to status codes.
package server

import (
	"context"
	"math"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/watch"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	words "github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/proto/wire/frontendwire"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// Server implements lbv1.LoadBalancerServiceServer.
type Server struct {
	lbv1.UnimplementedLoadBalancerServiceServer
	sharesv1.UnimplementedSharesServiceServer

	Owner   *owner.Owner
	Version string
	Started time.Time
	// HealthPorts returns the number of open health check ports.
	HealthPorts func() int
	// Process describes the running process.
	Process words.Process
}

// Register registers the services.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	lbv1.RegisterLoadBalancerServiceServer(r, s)
	statusv1.RegisterProcessServiceServer(r, s.Process)
	sharesv1.RegisterSharesServiceServer(r, s)
}

// Methods returns the access rules: root may change services, the datapath's user may subscribe to frontends, and the
// group may read.
func Methods() rpc.Methods {
	change := rpc.Limit{InFlight: 4, Waiting: 64}
	return rpc.Methods{
		statusv1.ProcessService_GetConfig_FullMethodName:       {Access: rpc.Group()},
		statusv1.ProcessService_SetLogLevel_FullMethodName:     {Access: rpc.Root()},
		lbv1.LoadBalancerService_UpsertServices_FullMethodName: {Access: rpc.Root(), Limit: change},
		lbv1.LoadBalancerService_DeleteServices_FullMethodName: {Access: rpc.Root(), Limit: change},
		lbv1.LoadBalancerService_CompleteSource_FullMethodName: {Access: rpc.Root(), Limit: change},
		lbv1.LoadBalancerService_WatchFrontends_FullMethodName: {
			Access: rpc.RootAnd(instance.DatapathID),
			Limit:  rpc.Limit{InFlight: 32},
		},
		lbv1.LoadBalancerService_ListServices_FullMethodName: {
			Access: rpc.Group(),
			Limit:  rpc.Limit{InFlight: 8, Waiting: 32},
		},
		lbv1.LoadBalancerService_GetService_FullMethodName: {
			Access: rpc.Group(),
			Limit:  rpc.Limit{InFlight: 16, Waiting: 128},
		},
		lbv1.LoadBalancerService_WatchServices_FullMethodName: {Access: rpc.Group(), Limit: rpc.Limit{InFlight: 64}},
		lbv1.LoadBalancerService_WaitForRevision_FullMethodName: {
			Access: rpc.Group(),
			Limit:  rpc.Limit{InFlight: 64, Waiting: 64},
		},
		lbv1.LoadBalancerService_GetStatus_FullMethodName: {
			Access: rpc.Group(),
			Limit:  rpc.Limit{InFlight: 16, Waiting: 128},
		},
		sharesv1.SharesService_ListShares_FullMethodName: {
			Access: rpc.Group(),
			Limit:  rpc.Limit{InFlight: 4, Waiting: 32},
		},
	}
}

// UpsertServices implements the service.
func (s *Server) UpsertServices(ctx context.Context, req *lbv1.UpsertServicesRequest) (*lbv1.UpsertServicesResponse,
	error,
) {
	out, err := s.Owner.Upsert(ctx, owner.Request{
		Caller:    managed.Caller{Manager: req.GetManager(), IfRevision: req.IfRevision, ValidateOnly: req.GetValidateOnly()},
		Manifests: req.GetManifests(), Namespace: req.GetDefaultNamespace(), AllowUnknown: req.GetAllowUnknownFields(),
	})
	if err != nil {
		return nil, statusOf(err)
	}
	run := s.Owner.Incarnation()
	return &lbv1.UpsertServicesResponse{Revision: out.Revision, Changes: changes(out), Incarnation: run[:]}, nil
}

// DeleteServices implements the service.
func (s *Server) DeleteServices(ctx context.Context, req *lbv1.DeleteServicesRequest) (*lbv1.DeleteServicesResponse,
	error,
) {
	caller := managed.Caller{Manager: req.GetManager(), IfRevision: req.IfRevision, ValidateOnly: req.GetValidateOnly()}
	keys := make([]service.ObjectKey, len(req.GetKeys()))
	for i, k := range req.GetKeys() {
		keys[i] = service.ObjectKey{
			Kind: service.KindOf(k.GetKind()),
			Name: service.Name{Namespace: k.GetNamespace(), Name: k.GetName()},
		}
	}
	out, err := s.Owner.Delete(ctx, caller, keys)
	if err != nil {
		return nil, statusOf(err)
	}
	return &lbv1.DeleteServicesResponse{Revision: out.Revision, Changes: changes(out)}, nil
}

// CompleteSource implements the service.
func (s *Server) CompleteSource(ctx context.Context, req *lbv1.CompleteSourceRequest) (*lbv1.CompleteSourceResponse,
	error,
) {
	caller := managed.Caller{
		Manager: req.GetManager(), ValidateOnly: req.GetValidateOnly(), AllowEmpty: req.GetAllowEmpty(),
	}
	out, err := s.Owner.Complete(ctx, caller, [16]byte(req.GetIncarnation()))
	if err != nil {
		return nil, statusOf(err)
	}
	return &lbv1.CompleteSourceResponse{Revision: out.Revision, Changes: changes(out)}, nil
}

// ListServices implements the service.
func (s *Server) ListServices(req *lbv1.ListServicesRequest,
	stream grpc.ServerStreamingServer[lbv1.ListServicesResponse],
) error {
	f := owner.Filter{
		Namespace: req.GetNamespace(), Name: req.GetName(), Manager: req.Manager,
		WithFrontends: req.GetWithFrontends(),
	}
	if text := req.GetAddress(); text != "" {
		a, err := words.AddressOf(text)
		if err != nil {
			return statusOf(&failure.FieldError{Field: "address", Err: err})
		}
		f.Address = a
	}
	list, refused, revision, err := s.Owner.Reader().List(stream.Context(), f)
	if err != nil {
		return statusOf(err)
	}
	for i := range list {
		m := &lbv1.ListServicesResponse{
			Revision: revision,
			Element:  &lbv1.ListServicesResponse_Service{Service: toService(&list[i])},
		}
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	for _, r := range refused {
		x := &lbv1.RefusedObject{Source: r.Source, Origin: r.Origin, Error: r.Err}
		if r.Key != (service.ObjectKey{}) {
			x.Key = toKey(r.Key)
		}
		if err := stream.Send(&lbv1.ListServicesResponse{
			Revision: revision,
			Element:  &lbv1.ListServicesResponse_Refused{Refused: x},
		}); err != nil {
			return err
		}
	}
	return nil
}

// GetService implements the service.
func (s *Server) GetService(ctx context.Context, req *lbv1.GetServiceRequest) (*lbv1.GetServiceResponse, error) {
	name := service.Name{Namespace: req.GetNamespace(), Name: req.GetName()}
	if name.Namespace == "" {
		name.Namespace = "default"
	}
	l, revision, err := s.Owner.Reader().Get(ctx, name)
	if err != nil {
		return nil, statusOf(err)
	}
	return &lbv1.GetServiceResponse{Service: toService(&l), Revision: revision}, nil
}

// WatchServices implements the service.
func (s *Server) WatchServices(req *lbv1.WatchServicesRequest,
	stream grpc.ServerStreamingServer[lbv1.WatchServicesResponse],
) error {
	ctx := stream.Context()
	reader := s.Owner.Reader()
	return watch.Serve(ctx, reader.Watch(), req.GetResumeToken(), func(e watch.Event[service.Name, uint64]) error {
		out := &lbv1.WatchServicesResponse{ResumeToken: e.Token}
		switch e.Kind {
		case watch.Upsert:
			l, found, err := reader.Find(ctx, e.Key)
			if err != nil {
				return statusOf(err)
			}
			if !found {
				return nil // the deletion of the service follows
			}
			out.Event = &lbv1.WatchServicesResponse_Upsert{Upsert: toService(&l)}
		case watch.Delete:
			out.Event = &lbv1.WatchServicesResponse_Delete{Delete: &lbv1.ServiceKey{
				Namespace: e.Key.Namespace,
				Name:      e.Key.Name,
			}}
		case watch.Bookmark:
			out.Event = &lbv1.WatchServicesResponse_Bookmark{Bookmark: &lbv1.Bookmark{SnapshotComplete: e.SnapshotComplete}}
		}
		return stream.Send(out)
	})
}

// WaitForRevision implements the service.
func (s *Server) WaitForRevision(ctx context.Context,
	req *lbv1.WaitForRevisionRequest,
) (*lbv1.WaitForRevisionResponse, error) {
	of := make([]service.Name, len(req.GetServices()))
	for i, k := range req.GetServices() {
		of[i] = service.Name{Namespace: k.GetNamespace(), Name: k.GetName()}
	}
	out, err := s.Owner.Subscribers().Wait(ctx, req.GetRevision(), of, req.GetEnded())
	if err != nil {
		return nil, statusOf(err)
	}
	return &lbv1.WaitForRevisionResponse{
		Revision: out.Revision, Disconnected: out.Disconnected,
		Enforcing: out.Enforcing,
	}, nil
}

// ListShares implements SharesService.
func (s *Server) ListShares(
	req *sharesv1.ListSharesRequest, stream grpc.ServerStreamingServer[sharesv1.ListSharesResponse],
) error {
	all, err := s.Owner.Reader().Usage(stream.Context())
	if err != nil {
		return statusOf(err)
	}
	return words.SendShares(all, req, stream)
}

// GetStatus implements the service.
func (s *Server) GetStatus(ctx context.Context, _ *lbv1.GetStatusRequest) (*lbv1.GetStatusResponse, error) {
	st, err := s.Owner.Reader().Status(ctx)
	if err != nil {
		return nil, statusOf(err)
	}
	run := s.Owner.Incarnation()
	out := &lbv1.GetStatusResponse{
		Service: &statusv1.ServiceStatus{
			Version: s.Version, StartTime: timestamppb.New(s.Started), Problems: problems(st.Problems),
			OmittedProblemCount: uint32(max(0, st.ProblemCount-owner.MaxProblems)),
		},
		Revision: st.Revision, Services: uint32(st.Services), EndpointSlices: uint32(st.Slices),
		OrphanedSlices: uint32(st.Orphans),
		Frontends:      uint32(st.Frontends), Backends: uint32(st.Backends), Refused: uint32(st.Refused), Incarnation: run[:],
	}
	if s.HealthPorts != nil {
		out.HealthCheckPorts = uint32(s.HealthPorts())
	}
	out.SystemRefused = st.SystemRefused
	for _, l := range st.Limits {
		out.Limits = append(out.Limits, &lbv1.SharedLimit{
			Name: l.Name, Size: uint32(l.Size), Used: uint32(l.Used), Asked: clamp(l.Asked),
			ExceedingTenants: uint32(l.Exceeding), ExceedsSystem: l.System,
		})
	}
	for _, x := range st.Sources {
		out.Sources = append(out.Sources, &lbv1.SourceStatus{
			Name: x.Name, Manager: x.Manager, Synced: x.Synced,
			Error: x.Error, Objects: uint32(x.Objects),
		})
	}
	for _, x := range st.Subscribers {
		out.Subscribers = append(out.Subscribers, &lbv1.SubscriberStatus{
			Name: x.Name, Connected: x.Connected, Enforces: x.Enforces, Revision: x.Revision, EndedRevision: x.Ended,
			Refusals: x.Refusals, OmittedRefusalCount: uint32(x.Omitted),
		})
	}
	return out, nil
}

// clamp limits n to the maximum of a uint32 field.
func clamp(n int) uint32 { return uint32(min(n, math.MaxUint32)) }

// problems converts problems to the API, with their reasons.
func problems(all []owner.Problem) []*statusv1.Problem {
	out := make([]*statusv1.Problem, 0, len(all))
	for _, p := range all {
		reason := statusv1.ProblemReason_PROBLEM_REASON_SERVICE
		if p.Kind == owner.ProblemStorage {
			reason = statusv1.ProblemReason_PROBLEM_REASON_STORAGE
		}
		out = append(out, &statusv1.Problem{Reason: reason, Text: p.Text})
	}
	return out
}

func changes(o owner.Outcome) []*lbv1.ObjectChange {
	out := make([]*lbv1.ObjectChange, len(o.Changes))
	for i, c := range o.Changes {
		out[i] = &lbv1.ObjectChange{
			Key: toKey(c.Key), Type: lbv1.ChangeType(c.Type), DroppedFields: c.Dropped,
			Notes: c.Notes,
		}
	}
	return out
}

func toKey(k service.ObjectKey) *lbv1.ObjectKey {
	return &lbv1.ObjectKey{Kind: k.Kind.String(), Namespace: k.Namespace, Name: k.Name.Name}
}

func toService(l *owner.Listed) *lbv1.Service {
	s := l.Service
	out := &lbv1.Service{
		Namespace: s.Name.Namespace, Name: s.Name.Name, Source: l.Source, Origin: l.Origin, Manager: l.Manager,
		Type:  s.Type.String(),
		Ready: uint32(l.Ready), Endpoints: uint32(l.Endpoints), Revision: l.Revision, UpdateTime: timestamppb.New(l.Updated),
		Notes: l.Notes, Enforced: l.Enforced, Algorithm: frontendwire.Algorithm(s.Table),
		ExceedingFrontends: clamp(l.ExceedingFrontends), ExceedingBackends: clamp(l.ExceedingBackends),
	}
	if s.Headless {
		out.Type = "Headless"
	}
	out.Addresses = append(out.Addresses, words.Addresses(s.ClusterIPs)...)
	out.Addresses = append(out.Addresses, words.Addresses(s.ExternalIPs)...)
	for _, in := range s.Ingress {
		out.Addresses = append(out.Addresses, words.Address(in.Addr))
	}
	for _, p := range s.Ports {
		out.Ports = append(out.Ports, &lbv1.ServicePort{
			Name: p.Name, Protocol: netv1.Protocol(p.Protocol),
			Port: uint32(p.Port), NodePort: uint32(p.NodePort),
		})
	}
	for _, f := range l.Frontends {
		out.Frontends = append(out.Frontends, frontendwire.Frontend(f))
	}
	return out
}
