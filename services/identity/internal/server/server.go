// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package server implements sluice.identity.v1 with the allocator.
//
// It only translates: requests into the core's types, and, in one function, the core's errors into status codes.
package server

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/labels"
	"github.com/sluice-net/sluice/services/identity/internal/pods"
)

// Hub is the source of WatchIdentities; the allocator publishes into it.
type Hub = watch.Hub[identity.Numeric, identity.Identity]

// quiet delays the publication of etcd revisions that change nothing for readers. Each published address causes such a
// revision, and each publication wakes sluice-policy, and then sluice-datapath, on every node.
const quiet = time.Second

// NewHub returns a hub whose listing is complete once the allocator calls Loaded.
func NewHub() *Hub {
	return watch.NewHub[identity.Numeric](watch.Options[identity.Identity]{
		Loading: true,
		Equal:   identity.Identity.Equal,
		Quiet:   quiet,
	})
}

// EndpointHub is the source of WatchEndpoints; the allocator publishes into it.
type EndpointHub = watch.Hub[allocator.Holder, allocator.Endpoint]

// NewEndpointHub returns an empty hub, which is complete: the allocator publishes this node's holds before New
// returns.
func NewEndpointHub() *EndpointHub {
	return watch.NewHub[allocator.Holder](watch.Options[allocator.Endpoint]{Equal: allocator.Endpoint.Equal})
}

// Server implements identityv1.IdentityServiceServer.
type Server struct {
	identityv1.UnimplementedIdentityServiceServer
	sharesv1.UnimplementedSharesServiceServer

	Allocator *allocator.Allocator
	Hub       *Hub
	Endpoints *EndpointHub
	Filter    labels.Filter
	// NodeFilter selects the labels of nodes that are part of identities.
	NodeFilter labels.Filter
	Node       string
	Version    string
	Started    time.Time

	Pods      *pods.Set // nil without Kubernetes
	Relabeler *pods.Relabeler

	Cluster *Cluster
	// Credentials returns why the credentials for sluice-store are not renewed. It is nil with another etcd.
	Credentials func() error
	// Process describes this process.
	Process wire.Process
}

// Register registers the services with a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	identityv1.RegisterIdentityServiceServer(r, s)
	identityv1.RegisterClusterServiceServer(r, s.Cluster)
	statusv1.RegisterProcessServiceServer(r, s.Process)
	sharesv1.RegisterSharesServiceServer(r, s)
}

// Methods returns which users may call which method. Root may change everything, the datapath's user the identities of
// its endpoints; no other user may change endpoints.
func Methods() rpc.Methods {
	// More concurrent changes than the store can process bring no gain. A caller that would wait too long gets
	// RESOURCE_EXHAUSTED, so that waiting calls do not use up memory.
	change := rpc.Limit{InFlight: 64, Waiting: 1024}
	read := rpc.Limit{InFlight: 32, Waiting: 256}
	return rpc.Methods{
		statusv1.ProcessService_GetConfig_FullMethodName:           {Access: rpc.Group()},
		statusv1.ProcessService_SetLogLevel_FullMethodName:         {Access: rpc.Root()},
		identityv1.IdentityService_AllocateIdentity_FullMethodName: {Access: rpc.Root(), Limit: change},
		identityv1.IdentityService_ReleaseIdentity_FullMethodName:  {Access: rpc.RootAnd(instance.DatapathID), Limit: change},
		identityv1.IdentityService_ResolveEndpoint_FullMethodName: {
			Access: rpc.RootAnd(instance.DatapathID), Limit: change, Prepared: true,
		},
		identityv1.IdentityService_GetIdentity_FullMethodName: {Access: rpc.Group(), Limit: read},
		identityv1.IdentityService_ListIdentities_FullMethodName: {
			Access: rpc.Group(),
			Limit:  rpc.Limit{InFlight: 8, Waiting: 32},
		},
		identityv1.IdentityService_WatchIdentities_FullMethodName: {Access: rpc.Group(), Limit: rpc.Limit{InFlight: 64}},
		identityv1.IdentityService_WatchEndpoints_FullMethodName:  {Access: rpc.Group(), Limit: rpc.Limit{InFlight: 64}},
		identityv1.IdentityService_ConfirmEndpoint_FullMethodName: {Access: rpc.RootAnd(instance.DatapathID), Limit: change},
		identityv1.IdentityService_GetLabelFilter_FullMethodName:  {Access: rpc.Group()},
		identityv1.IdentityService_WatchWaitingLabels_FullMethodName: {
			Access: rpc.RootAnd(instance.PolicyID), Limit: rpc.Limit{InFlight: 4},
		},
		identityv1.IdentityService_AdmitLabels_FullMethodName: {Access: rpc.RootAnd(instance.PolicyID), Limit: change},
		identityv1.IdentityService_GetStatus_FullMethodName:   {Access: rpc.Group(), Limit: read},
		sharesv1.SharesService_ListShares_FullMethodName: {
			Access: rpc.Group(), Limit: rpc.Limit{InFlight: 4, Waiting: 32},
		},

		identityv1.ClusterService_RegisterNode_FullMethodName: {Access: rpc.RootAnd(instance.DatapathID,
			instance.IPAMID), Limit: change},
		identityv1.ClusterService_ClaimRange_FullMethodName:  {Access: rpc.RootAnd(instance.IPAMID), Limit: change},
		identityv1.ClusterService_ReturnRange_FullMethodName: {Access: rpc.RootAnd(instance.IPAMID), Limit: change},
		identityv1.ClusterService_ReportRefusals_FullMethodName: {
			// ReportRefusals checks that the subject belongs to the caller.
			Access: rpc.RootAnd(instance.PolicyID, instance.LoadBalancerID), Limit: change,
		},
		identityv1.ClusterService_WatchRefusals_FullMethodName: {
			Access: rpc.RootAnd(instance.ControllerID), Limit: rpc.Limit{InFlight: 4},
		},
		identityv1.ClusterService_CheckReuse_FullMethodName:      {Access: rpc.RootAnd(instance.IPAMID), Limit: read},
		identityv1.ClusterService_ConfirmMappings_FullMethodName: {Access: rpc.RootAnd(instance.DatapathID), Limit: read},
		identityv1.ClusterService_WaitForPublication_FullMethodName: {
			Access: rpc.RootAnd(instance.DatapathID), Limit: rpc.Limit{InFlight: 256},
		},
		identityv1.ClusterService_ForgetNode_FullMethodName:   {Access: rpc.RootAnd(instance.ControllerID), Limit: change},
		identityv1.ClusterService_WatchCluster_FullMethodName: {Access: rpc.Group(), Limit: rpc.Limit{InFlight: 64}},
		identityv1.ClusterService_ListNodes_FullMethodName: {
			Access: rpc.Group(),
			Limit:  rpc.Limit{InFlight: 8, Waiting: 32},
		},
		identityv1.ClusterService_GetIPMapping_FullMethodName: {Access: rpc.Group(), Limit: read},
		identityv1.ClusterService_PublishKinds_FullMethodName: {Access: rpc.RootAnd(instance.ControllerID), Limit: change},
		identityv1.ClusterService_PublishPodCIDRs_FullMethodName: {
			Access: rpc.RootAnd(instance.ControllerID), Limit: rpc.Limit{InFlight: 2},
		},
		identityv1.ClusterService_WatchKinds_FullMethodName: {Access: rpc.Group(), Limit: rpc.Limit{InFlight: 64}},
		identityv1.ClusterService_ListIPMappings_FullMethodName: {
			Access: rpc.Group(),
			Limit:  rpc.Limit{InFlight: 8, Waiting: 32},
		},
	}
}

// AllocateIdentity implements the service.
func (s *Server) AllocateIdentity(ctx context.Context,
	req *identityv1.AllocateIdentityRequest,
) (*identityv1.AllocateIdentityResponse, error) {
	labels, err := labels.Workload(s.Filter, wire.LabelsOf(req.GetLabels()), nil)
	if err != nil {
		return nil, statusOf(err)
	}
	holder := allocator.ReferenceHolder(req.GetReference())
	local := req.GetScope() == identityv1.Scope_SCOPE_NODE_LOCAL
	var id identity.Identity
	switch {
	case req.GetValidateOnly():
		id = s.Allocator.Find(labels, local)
	case local:
		id, err = s.Allocator.HoldNodeLocal(ctx, holder, labels)
	default:
		id, err = s.Allocator.Hold(ctx, holder, labels, false)
	}
	if err != nil {
		return nil, statusOf(err)
	}
	return &identityv1.AllocateIdentityResponse{Identity: toIdentity(id)}, nil
}

// ReleaseIdentity implements the service.
func (s *Server) ReleaseIdentity(ctx context.Context,
	req *identityv1.ReleaseIdentityRequest,
) (*identityv1.ReleaseIdentityResponse, error) {
	holder := allocator.ReferenceHolder(req.GetReference())
	if o := req.GetOwner(); o != nil {
		holder = endpoint(o)
	}
	if req.GetValidateOnly() {
		return &identityv1.ReleaseIdentityResponse{ReleasedNumber: uint32(s.Allocator.HeldBy(holder))}, nil
	}
	n, err := s.Allocator.Release(ctx, holder)
	if err != nil {
		return nil, statusOf(err)
	}
	return &identityv1.ReleaseIdentityResponse{ReleasedNumber: uint32(n)}, nil
}

// ResolveEndpoint implements the service.
func (s *Server) ResolveEndpoint(ctx context.Context,
	req *identityv1.ResolveEndpointRequest,
) (*identityv1.ResolveEndpointResponse, error) {
	w, err := fromWorkload(req)
	if err != nil {
		return nil, err
	}
	set, err := s.labelSet(ctx, req, w.Pod)
	if err != nil {
		return nil, statusOf(err)
	}
	var id identity.Identity
	if req.GetValidateOnly() {
		id = s.Allocator.Find(set, false)
	} else if err = s.mayUse(req.GetOwner(), w.Addresses); err != nil {
		return nil, statusOf(err)
	} else if id, err = s.Allocator.HoldEndpoint(ctx, endpoint(req.GetOwner()), set, w); err != nil {
		return nil, statusOf(err)
	}
	return &identityv1.ResolveEndpointResponse{
		Identity: toIdentity(id), NamedPorts: namedPorts(set), FromPod: s.fromPod(w.Pod), Tenant: s.tenant(w.Pod),
	}, nil
}

// tenant returns the tenant of a pod's namespace; nil if it is unknown.
func (s *Server) tenant(pod workload.PodReference) *sharesv1.Tenant {
	if s.Pods == nil || pod.Namespace == "" {
		return nil
	}
	return wire.Tenant(s.Pods.Tenant(pod.Namespace), 0)
}

// mayUse returns an error if other nodes may still map one of the addresses to another endpoint.
func (s *Server) mayUse(owner *workloadv1.Owner, texts []string) error {
	var addresses []netip.Addr
	for _, text := range texts {
		if a, err := netip.ParseAddr(text); err == nil { // fromWorkload accepts only valid addresses
			addresses = append(addresses, a)
		}
	}
	return s.Cluster.Registry.MayUse(endpointName(endpoint(owner)), addresses)
}

// fromPod reports whether the labels of a pod come from Kubernetes.
func (s *Server) fromPod(pod workload.PodReference) bool { return s.Pods != nil && pods.Named(pod) }

// labelSet returns the label set of the pod in Kubernetes or, without Kubernetes, of the request.
func (s *Server) labelSet(ctx context.Context, req *identityv1.ResolveEndpointRequest, pod workload.PodReference,
) (label.Canonical, error) {
	if !s.fromPod(pod) {
		return labels.Workload(s.Filter, wire.LabelsOf(req.GetLabels()), wire.NamedPortsOf(req.GetNamedPorts()))
	}
	return s.Pods.Find(ctx, pod, func() (label.Canonical, bool) {
		// The identity of the pod's endpoint survives a restart of this process; the labels from the API do not.
		for _, holder := range s.Endpoints.Keys() {
			if e, ok := s.Endpoints.Get(holder); ok && e.Workload.Pod == pod {
				return e.Identity.Labels, true
			}
		}
		return label.Canonical{}, false
	})
}

// GetIdentity implements the service.
func (s *Server) GetIdentity(_ context.Context, req *identityv1.GetIdentityRequest) (*identityv1.GetIdentityResponse,
	error,
) {
	id, holders, err := s.Allocator.Get(identity.Numeric(req.GetNumber()))
	if err != nil {
		return nil, statusOf(err)
	}
	out := &identityv1.GetIdentityResponse{Identity: toIdentity(id)}
	described := s.Allocator.Endpoints(id.Number)
	for _, h := range holders {
		if reference, ok := h.Reference(); ok {
			out.References = append(out.References, reference)
		}
		if owner, ok := h.Owner(); ok {
			w := described[h]
			out.Endpoints = append(out.Endpoints, &identityv1.HoldingEndpoint{
				Owner: wire.Owner(owner), Manager: w.Manager, Network: w.Network, Pod: wire.Pod(w.Pod),
				Addresses: w.Addresses,
			})
		}
	}
	return out, nil
}

// ListIdentities implements the service.
func (s *Server) ListIdentities(req *identityv1.ListIdentitiesRequest,
	stream grpc.ServerStreamingServer[identityv1.ListIdentitiesResponse],
) error {
	for _, l := range s.Allocator.List() {
		if len(req.GetScopes()) > 0 && !slices.Contains(req.GetScopes(), toScope(l.Identity.Number.Scope())) {
			continue
		}
		if err := stream.Send(&identityv1.ListIdentitiesResponse{
			Identity:       toIdentity(l.Identity),
			ReferenceCount: uint32(l.Holders),
		}); err != nil {
			return err
		}
	}
	return nil
}

// WatchIdentities implements the service.
func (s *Server) WatchIdentities(req *identityv1.WatchIdentitiesRequest,
	stream grpc.ServerStreamingServer[identityv1.WatchIdentitiesResponse],
) error {
	return watch.Serve(stream.Context(), s.Hub, req.GetResumeToken(),
		func(e watch.Event[identity.Numeric, identity.Identity]) error {
			m := &identityv1.WatchIdentitiesResponse{
				ResumeToken: e.Token, Incarnation: s.Hub.Incarnation(),
				Revision: e.Revision, StoreRevision: toStoreRevision(e.Origin),
			}
			switch e.Kind {
			case watch.Upsert:
				m.Event = &identityv1.WatchIdentitiesResponse_Upsert{Upsert: toIdentity(e.Value)}
			case watch.Delete:
				m.Event = &identityv1.WatchIdentitiesResponse_Delete{Delete: uint32(e.Key)}
			default:
				complete := &identityv1.Bookmark{SnapshotComplete: e.SnapshotComplete}
				m.Event = &identityv1.WatchIdentitiesResponse_Bookmark{Bookmark: complete}
			}
			return stream.Send(m)
		})
}

// WatchEndpoints implements the service.
func (s *Server) WatchEndpoints(req *identityv1.WatchEndpointsRequest,
	stream grpc.ServerStreamingServer[identityv1.WatchEndpointsResponse],
) error {
	return watch.Serve(stream.Context(), s.Endpoints, req.GetResumeToken(),
		func(e watch.Event[allocator.Holder, allocator.Endpoint]) error {
			m := &identityv1.WatchEndpointsResponse{ResumeToken: e.Token}
			owner, _ := e.Key.Owner()
			switch e.Kind {
			case watch.Upsert:
				m.Event = &identityv1.WatchEndpointsResponse_Upsert{Upsert: s.toEndpoint(e.Value)}
			case watch.Delete:
				m.Event = &identityv1.WatchEndpointsResponse_Delete{Delete: wire.Owner(owner)}
			default:
				complete := &identityv1.Bookmark{SnapshotComplete: e.SnapshotComplete}
				m.Event = &identityv1.WatchEndpointsResponse_Bookmark{Bookmark: complete}
			}
			return stream.Send(m)
		})
}

// ConfirmEndpoint implements the service.
func (s *Server) ConfirmEndpoint(ctx context.Context,
	req *identityv1.ConfirmEndpointRequest,
) (*identityv1.ConfirmEndpointResponse, error) {
	if err := s.Allocator.Confirm(ctx, endpoint(req.GetOwner()), identity.Numeric(req.GetNumber())); err != nil {
		return nil, statusOf(err)
	}
	return &identityv1.ConfirmEndpointResponse{}, nil
}

// WatchWaitingLabels implements the service.
func (s *Server) WatchWaitingLabels(
	_ *identityv1.WatchWaitingLabelsRequest, stream grpc.ServerStreamingServer[identityv1.WatchWaitingLabelsResponse],
) error {
	ctx := stream.Context()
	if err := stream.Send(&identityv1.WatchWaitingLabelsResponse{}); err != nil {
		return err
	}
	if s.Relabeler == nil { // nothing changes the labels of endpoints
		<-ctx.Done()
		return status.FromContextError(ctx.Err()).Err()
	}
	for sent := uint64(0); ; {
		all, changed := s.Relabeler.Held()
		for _, h := range all {
			if h.Number <= sent {
				continue
			}
			err := stream.Send(&identityv1.WatchWaitingLabelsResponse{
				Change: h.Number, Identity: uint32(h.Identity), Labels: wire.Labels(h.Labels.All()),
			})
			if err != nil {
				return err
			}
			sent = h.Number
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
	}
}

// AdmitLabels implements the service.
func (s *Server) AdmitLabels(_ context.Context, req *identityv1.AdmitLabelsRequest,
) (*identityv1.AdmitLabelsResponse, error) {
	if s.Relabeler != nil {
		s.Relabeler.Admit(req.GetChange())
	}
	return &identityv1.AdmitLabelsResponse{}, nil
}

// ListShares implements SharesService.
func (s *Server) ListShares(
	req *sharesv1.ListSharesRequest, stream grpc.ServerStreamingServer[sharesv1.ListSharesResponse],
) error {
	return wire.SendShares(s.Allocator.Usage(), req, stream)
}

// GetStatus implements the service.
func (s *Server) GetStatus(context.Context, *identityv1.GetStatusRequest) (*identityv1.GetStatusResponse, error) {
	st := s.Allocator.Status()
	resp := &identityv1.GetStatusResponse{
		Service:            &statusv1.ServiceStatus{Version: s.Version, StartTime: timestamppb.New(s.Started)},
		NodeName:           s.Node,
		StoreConnected:     st.Connected,
		StoreError:         st.StoreError,
		ClusterIdentities:  uint32(st.Known),
		HeldIdentities:     uint32(st.Held),
		PendingStoreWrites: uint32(st.PendingWrites),
		StoreRevision:      toStoreRevision(s.Hub.Origin()),
	}
	problem := func(reason statusv1.ProblemReason, text string) {
		resp.Service.Problems = append(resp.Service.Problems, &statusv1.Problem{Reason: reason, Text: text})
	}
	const store, service = statusv1.ProblemReason_PROBLEM_REASON_STORE, statusv1.ProblemReason_PROBLEM_REASON_SERVICE
	if st.StoreError != "" {
		text := "etcd refuses something: " + st.StoreError
		if !st.Connected {
			text = "etcd does not answer: " + st.StoreError
		}
		problem(store, text)
	}
	if s.Credentials != nil {
		if err := s.Credentials(); err != nil {
			resp.Service.Problems = append(resp.Service.Problems, &statusv1.Problem{
				Reason: statusv1.ProblemReason_PROBLEM_REASON_STORE,
				Text:   "the credentials for sluice-store are not renewed: " + err.Error(),
			})
		}
	}
	if st.Denied != nil {
		problem(store, st.Denied.Error())
	}
	if st.Unsaved != nil {
		problem(statusv1.ProblemReason_PROBLEM_REASON_STORAGE, st.Unsaved.Error())
	}
	cluster := s.Cluster.Registry.Status()
	resp.Cluster = toClusterStatus(cluster)
	if s.Cluster.Confirming != nil {
		if err := s.Cluster.Confirming(); err != nil {
			resp.Cluster.ConfirmationError = err.Error()
			problem(store, "released addresses are only reused after their full quarantine: "+err.Error())
		}
	}
	if s.Cluster.Roles != nil && cluster.Nodes > 0 { // without other nodes, a wrong role does no harm
		if err := s.Cluster.Roles(); err != nil {
			problem(store, err.Error())
		}
	}
	for _, text := range rangeProblems(cluster) {
		problem(service, text)
	}
	if s.Pods != nil {
		for _, err := range []error{s.Pods.Problem(), s.Relabeler.Problem()} {
			if err != nil {
				problem(service, "Kubernetes: "+err.Error())
			}
		}
	}
	for _, k := range st.TopKeys {
		resp.TopLabelKeys = append(resp.TopLabelKeys, &identityv1.LabelKeyCount{Key: k.Key, DistinctValues: uint32(k.Values)})
	}
	return resp, nil
}

func fromWorkload(req *identityv1.ResolveEndpointRequest) (allocator.Workload, error) {
	w := allocator.Workload{Manager: req.GetManager(), Network: req.GetNetwork(), Pod: wire.PodOf(req.GetPod())}
	for i, text := range req.GetAddresses() {
		a, err := wire.AddressOf(text)
		if err != nil {
			return w, invalid(fmt.Sprintf("addresses[%d]", i), err)
		}
		w.Addresses = append(w.Addresses, a.String())
	}
	return w, nil
}

func endpoint(o *workloadv1.Owner) allocator.Holder {
	return allocator.EndpointHolder(o.GetContainerId(), o.GetInterfaceName())
}

func (s *Server) toEndpoint(e allocator.Endpoint) *identityv1.EndpointIdentity {
	owner, _ := e.Holder.Owner()
	return &identityv1.EndpointIdentity{
		Owner: wire.Owner(owner), Identity: toIdentity(e.Identity), NamedPorts: namedPorts(e.Identity.Labels),
		Pod: wire.Pod(e.Workload.Pod), Confirm: e.Former != 0, FromPod: s.fromPod(e.Workload.Pod),
	}
}

// namedPorts parses the named ports of an identity from the label that NamedPortsLabel wrote.
func namedPorts(labels label.Canonical) []*workloadv1.NamedPort {
	ports, err := workload.NamedPortsOf(labels.Set())
	if err != nil {
		return nil
	}
	return wire.NamedPorts(ports)
}

func toIdentity(id identity.Identity) *identityv1.Identity {
	return &identityv1.Identity{
		Number: uint32(id.Number), Scope: toScope(id.Number.Scope()), Labels: wire.Labels(id.Labels.All()),
	}
}

func toStoreRevision(at watch.Origin) *identityv1.StoreRevision {
	if at == (watch.Origin{}) {
		return nil
	}
	return &identityv1.StoreRevision{ClusterId: at.Store, Revision: at.Revision}
}

func toScope(s identity.Scope) identityv1.Scope {
	switch s {
	case identity.ScopeReserved:
		return identityv1.Scope_SCOPE_RESERVED
	case identity.ScopeCluster:
		return identityv1.Scope_SCOPE_CLUSTER
	case identity.ScopeNodeLocal:
		return identityv1.Scope_SCOPE_NODE_LOCAL
	}
	return identityv1.Scope_SCOPE_UNSPECIFIED
}

// GetLabelFilter implements the service.
func (s *Server) GetLabelFilter(
	context.Context, *identityv1.GetLabelFilterRequest,
) (*identityv1.GetLabelFilterResponse, error) {
	rules := func(f labels.Filter) (out []*identityv1.LabelFilterRule) {
		for _, r := range f.Rules() {
			out = append(out, &identityv1.LabelFilterRule{Rule: r.Text, Counts: r.Counts})
		}
		return out
	}
	return &identityv1.GetLabelFilterResponse{Rules: rules(s.Filter), NodeRules: rules(s.NodeFilter)}, nil
}
