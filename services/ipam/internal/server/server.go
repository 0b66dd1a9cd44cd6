// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package server implements the IPAM API with an Allocator. It converts messages to Go values and back, and errors to
// codes.
package server

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/watch"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/ipam/internal/cluster"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/poolevents"
)

// maxLists is the maximum number of concurrent listings, because each holds a copy of the list.
const maxLists = 4

// maxWatches is the maximum number of concurrent watches.
const maxWatches = 64

// Server implements the IPAM service.
type Server struct {
	ipamv1.UnimplementedIPAMServiceServer
	ipam    *ipam.Allocator
	metrics *Metrics
	version string
	started time.Time

	// NoRange returns the reason for which no range serves. It is nil if the node always has ranges.
	NoRange func() error
	// Restored returns an error if the API server was restored from a backup and the Node has not been read since.
	// It is nil unless the mode is kubernetes.
	Restored func() error
	// Cluster is the agent that agrees with the other nodes on the ranges; nil on a single node.
	Cluster *cluster.Agent
	// Shortage receives the results of allocations; may be nil.
	Shortage *poolevents.Tracker
	// Settings are the settings that must be equal on all nodes.
	Settings cluster.Settings
	// Process describes this process.
	Process wire.Process
}

// New returns the service for an allocator.
func New(a *ipam.Allocator, m *Metrics, version string, started time.Time) *Server {
	return &Server{ipam: a, metrics: m, version: version, started: started}
}

// Register adds the service to a server.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	ipamv1.RegisterIPAMServiceServer(r, s)
	statusv1.RegisterProcessServiceServer(r, s.Process)
}

// Methods returns the access rules: root (the user of the CNI plugin) and the datapath's user may change allocations,
// and the group may read.
func Methods() rpc.Methods {
	datapath := rpc.Method{Access: rpc.RootAnd(instance.DatapathID), Prepared: true}
	read := rpc.Method{Access: rpc.Group()}
	return rpc.Methods{
		statusv1.ProcessService_GetConfig_FullMethodName:    {Access: rpc.Group()},
		statusv1.ProcessService_SetLogLevel_FullMethodName:  {Access: rpc.Root()},
		ipamv1.IPAMService_Allocate_FullMethodName:          datapath,
		ipamv1.IPAMService_ConfirmAllocation_FullMethodName: datapath,
		ipamv1.IPAMService_Release_FullMethodName:           datapath,
		ipamv1.IPAMService_ListAllocations_FullMethodName:   {Access: rpc.Group(), Limit: rpc.Limit{InFlight: maxLists, Waiting: 4 * maxLists}},
		ipamv1.IPAMService_ListPools_FullMethodName:         read,
		ipamv1.IPAMService_WatchPools_FullMethodName:        {Access: rpc.Group(), Limit: rpc.Limit{InFlight: maxWatches}},
		ipamv1.IPAMService_GetStatus_FullMethodName:         read,
	}
}

// Allocate implements the RPC.
func (s *Server) Allocate(ctx context.Context, req *ipamv1.AllocateRequest) (*ipamv1.AllocateResponse, error) {
	allocation, err := s.allocate(ctx, req)
	if !req.GetValidateOnly() {
		s.metrics.allocated(err)
		if s.Shortage != nil {
			s.Shortage.Answered(err)
		}
	}
	if err != nil {
		return nil, statusOf(err)
	}
	return &ipamv1.AllocateResponse{Allocation: fromAllocation(allocation)}, nil
}

func (s *Server) allocate(ctx context.Context, req *ipamv1.AllocateRequest) (*ipam.Allocation, error) {
	r := ipam.Request{
		Owner: wire.OwnerOf(req.GetOwner()), ValidateOnly: req.GetValidateOnly(), Manager: req.GetManager(),
		Namespace: req.GetNamespace(),
	}
	for i, f := range req.GetFamilies() {
		switch f {
		case ipamv1.Family_FAMILY_IPV4:
			r.Families = append(r.Families, ipam.IPv4)
		case ipamv1.Family_FAMILY_IPV6:
			r.Families = append(r.Families, ipam.IPv6)
		default:
			return nil, &ipam.FieldError{Field: fmt.Sprintf("families[%d]", i), Text: "not a family: " + f.String(), Kind: ipam.ErrBadRequest}
		}
	}
	wanted, err := toAddrs("requested_addresses", req.GetRequestedAddresses())
	if err != nil {
		return nil, err
	}
	r.Wanted = wanted
	return s.lease(ctx, r)
}

// lease allocates addresses. If none is free, it waits until the agent has claimed another block of the cluster's pool.
func (s *Server) lease(ctx context.Context, r ipam.Request) (*ipam.Allocation, error) {
	if s.Cluster == nil {
		return s.ipam.Allocate(ctx, r)
	}
	if err := s.Cluster.Checked(); err != nil {
		return nil, err
	}
	for grown := false; ; grown = true {
		a, err := s.ipam.Allocate(ctx, r)
		if err == nil {
			s.Cluster.Note()
			return a, nil
		}
		if r.ValidateOnly || !errors.Is(err, ipam.ErrExhausted) && !errors.Is(err, ipam.ErrNoRange) {
			return nil, err
		}
		switch grow := s.Cluster.Grow(ctx); {
		case errors.Is(grow, errors.ErrUnsupported), grow != nil && waits(err), grown && reserved(err):
			if !waits(err) || !s.awaitReuse(ctx) {
				return nil, err
			}
		case grow != nil:
			return nil, &growError{cause: err, grow: grow}
		}
	}
}

// waits reports whether there are released addresses that may be allocated again later.
func waits(err error) bool {
	var full *ipam.ExhaustedError
	return errors.As(err, &full) && full.Waiting > 0
}

// reserved reports whether the free addresses are reserved for other namespaces.
func reserved(err error) bool {
	var full *ipam.ExhaustedError
	return errors.As(err, &full) && full.Namespace != ""
}

// Limits on how long Allocate waits for a released address.
const (
	reuseMargin = time.Second      // time that is left before the call's deadline, so that the error reaches the caller
	reuseMost   = 30 * time.Second // maximum wait of a call without a deadline
)

// awaitReuse waits for the agent's next check of the addresses that may be reused. It returns false if the caller's
// deadline is too near.
func (s *Server) awaitReuse(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(reuseMost)
	}
	limited, cancel := context.WithDeadline(ctx, deadline.Add(-reuseMargin))
	defer cancel()
	return s.Cluster.AwaitStep(limited) == nil
}

// growError contains the reason for which no address is free, and the reason for which no further block was claimed.
type growError struct{ cause, grow error }

func (e *growError) Error() string   { return e.cause.Error() + "; " + e.grow.Error() }
func (e *growError) Unwrap() []error { return []error{e.grow, e.cause} }

// ConfirmAllocation implements the RPC.
func (s *Server) ConfirmAllocation(ctx context.Context, req *ipamv1.ConfirmAllocationRequest) (*ipamv1.ConfirmAllocationResponse, error) {
	addrs, err := toAddrs("addresses", req.GetAddresses())
	if err != nil {
		return nil, statusOf(err)
	}
	confirm := s.ipam.Confirm
	if req.GetValidateOnly() {
		confirm = s.ipam.ValidateConfirm
	}
	allocation, err := confirm(ctx, wire.OwnerOf(req.GetOwner()), addrs)
	if err != nil {
		return nil, statusOf(err)
	}
	return &ipamv1.ConfirmAllocationResponse{Allocation: fromAllocation(allocation)}, nil
}

// Release implements the RPC.
func (s *Server) Release(ctx context.Context, req *ipamv1.ReleaseRequest) (*ipamv1.ReleaseResponse, error) {
	only, err := toAddrs("addresses", req.GetAddresses())
	if err != nil {
		return nil, statusOf(err)
	}
	release := s.ipam.Release
	if req.GetValidateOnly() {
		release = s.ipam.ValidateRelease
	}
	released, err := release(ctx, wire.OwnerOf(req.GetOwner()), only...)
	if err != nil {
		return nil, statusOf(err)
	}
	if released == nil {
		return &ipamv1.ReleaseResponse{}, nil
	}
	return &ipamv1.ReleaseResponse{Released: fromAllocation(released)}, nil
}

// ListAllocations implements the RPC.
func (s *Server) ListAllocations(_ *ipamv1.ListAllocationsRequest, stream grpc.ServerStreamingServer[ipamv1.ListAllocationsResponse]) error {
	all, err := s.ipam.List(stream.Context())
	if err != nil {
		return statusOf(err)
	}
	for _, a := range all {
		if err := stream.Send(&ipamv1.ListAllocationsResponse{Allocation: fromAllocation(a)}); err != nil {
			return err
		}
	}
	return nil
}

// ListPools implements the RPC.
func (s *Server) ListPools(context.Context, *ipamv1.ListPoolsRequest) (*ipamv1.ListPoolsResponse, error) {
	return &ipamv1.ListPoolsResponse{Pools: fromFigures(s.ipam.Summary().Pools)}, nil
}

// WatchPools implements the RPC.
func (s *Server) WatchPools(
	req *ipamv1.WatchPoolsRequest, stream grpc.ServerStreamingServer[ipamv1.WatchPoolsResponse],
) error {
	send := func(e watch.Event[netip.Prefix, ipam.Range]) error {
		m := &ipamv1.WatchPoolsResponse{ResumeToken: e.Token}
		switch e.Kind {
		case watch.Upsert:
			m.Event = &ipamv1.WatchPoolsResponse_Upsert{Upsert: &ipamv1.Range{
				Prefix: e.Key.String(), State: stateOf(e.Value.Draining), NodeAddresses: []string{e.Value.Gateway.String()},
				Primary: e.Value.Primary,
			}}
		case watch.Delete:
			m.Event = &ipamv1.WatchPoolsResponse_Delete{Delete: e.Key.String()}
		case watch.Bookmark:
			m.Event = &ipamv1.WatchPoolsResponse_Bookmark{Bookmark: &ipamv1.Bookmark{SnapshotComplete: e.SnapshotComplete}}
		}
		return stream.Send(m)
	}
	return watch.Serve(stream.Context(), s.ipam.Hub(), req.GetResumeToken(), send)
}

func stateOf(draining bool) ipamv1.RangeState {
	if draining {
		return ipamv1.RangeState_RANGE_STATE_DRAINING
	}
	return ipamv1.RangeState_RANGE_STATE_SERVING
}

func poolStateOf(f ipam.Figures) ipamv1.RangeState {
	if f.Refused != "" && !f.Draining {
		return ipamv1.RangeState_RANGE_STATE_REFUSED
	}
	return stateOf(f.Draining)
}

// GetStatus implements the RPC.
func (s *Server) GetStatus(context.Context, *ipamv1.GetStatusRequest) (*ipamv1.GetStatusResponse, error) {
	sum := s.ipam.Summary()
	service := &statusv1.ServiceStatus{Version: s.version, StartTime: timestamppb.New(s.started)}
	if err := s.ipam.Problem(); err != nil {
		service.Problems = []*statusv1.Problem{{Reason: statusv1.ProblemReason_PROBLEM_REASON_STORAGE, Text: err.Error()}}
	}
	for _, f := range sum.Pools {
		if f.Refused != "" {
			service.Problems = append(service.Problems, &statusv1.Problem{
				Reason: statusv1.ProblemReason_PROBLEM_REASON_SETTINGS,
				Text:   fmt.Sprintf("no new addresses are allocated from %s: %s", f.Prefix, f.Refused),
			})
		}
	}
	if s.Cluster != nil {
		for _, err := range s.Cluster.Problems() {
			service.Problems = append(service.Problems,
				&statusv1.Problem{Reason: statusv1.ProblemReason_PROBLEM_REASON_STORE, Text: err.Error()})
		}
	}
	if s.NoRange != nil {
		if err := s.NoRange(); err != nil {
			service.Problems = append(service.Problems,
				&statusv1.Problem{Reason: statusv1.ProblemReason_PROBLEM_REASON_SETTINGS, Text: err.Error()})
		}
	}
	if s.Restored != nil {
		if err := s.Restored(); err != nil {
			service.Problems = append(service.Problems, &statusv1.Problem{
				Reason: statusv1.ProblemReason_PROBLEM_REASON_SERVICE, Text: "Kubernetes: " + err.Error(),
			})
		}
	}
	return &ipamv1.GetStatusResponse{
		Service:             service,
		Pools:               fromFigures(sum.Pools),
		StateBytes:          uint64(s.ipam.StateBytes()),
		OutsideAddressCount: sum.Outside, Cluster: s.cluster(),
	}, nil
}

// cluster returns this node's state in the cluster; nil on a single node.
func (s *Server) cluster() *ipamv1.ClusterRanges {
	if s.Cluster == nil {
		return nil
	}
	out := &ipamv1.ClusterRanges{
		Mode: string(s.Settings.Mode), Registered: s.Cluster.Registered(),
		MaxBlocks: uint32(s.Settings.MaxBlocks), //nolint:gosec // checked
	}
	for _, p := range s.Settings.Prefixes {
		bits := s.Settings.IPv4Block
		if p.Addr().Is6() {
			bits = s.Settings.IPv6Block
		}
		out.Pools = append(out.Pools, &ipamv1.ClusterPool{
			Prefix: p.String(), BlockLength: uint32(bits), //nolint:gosec // checked
		})
	}
	return out
}

func toAddrs(field string, list []string) ([]netip.Addr, error) {
	out := make([]netip.Addr, 0, len(list))
	for i, text := range list {
		a, err := wire.AddressOf(text)
		if err != nil {
			return nil, &ipam.FieldError{Field: fmt.Sprintf("%s[%d]", field, i), Text: err.Error(), Kind: ipam.ErrBadRequest}
		}
		out = append(out, a)
	}
	return out, nil
}

func fromAllocation(a *ipam.Allocation) *ipamv1.Allocation {
	out := &ipamv1.Allocation{
		Owner: wire.Owner(a.Owner),
		State: ipamv1.AllocationState_ALLOCATION_STATE_CONFIRMED, Manager: a.Manager,
	}
	if a.State == ipam.Leased {
		out.State = ipamv1.AllocationState_ALLOCATION_STATE_LEASED
		out.LeaseExpireTime = timestamppb.New(a.Expires)
	}
	for _, x := range a.Addresses {
		out.Addresses = append(out.Addresses, &ipamv1.Address{Address: wire.Address(x.Addr), PoolPrefixLength: uint32(x.PoolBits)})
	}
	return out
}

func fromFigures(list []ipam.Figures) []*ipamv1.Pool {
	out := make([]*ipamv1.Pool, 0, len(list))
	for _, f := range list {
		out = append(out, &ipamv1.Pool{
			Prefix: f.Prefix.String(), Gateway: f.Gateway.String(), AddressCount: f.Size, ReservedCount: f.Reserved,
			LeasedCount: f.Leased, ConfirmedCount: f.Confirmed, QuarantinedCount: f.Quarantined, FreeCount: f.Free,
			State: poolStateOf(f), RefusedReason: f.Refused, Primary: f.Primary,
		})
	}
	return out
}
