// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"reflect"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
)

// CreateEndpoint implements the API.
func (s *Server) CreateEndpoint(
	ctx context.Context, r *datapathv1.CreateEndpointRequest,
) (*datapathv1.CreateEndpointResponse, error) {
	spec, err := specOf(r)
	if err != nil {
		return nil, statusOf(err)
	}
	e, err := s.endpoints.Lifecycle.Create(ctx, spec, r.GetValidateOnly())
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
	e, err := s.endpoints.Relabeller.Update(ctx, u, r.GetValidateOnly())
	if err != nil {
		return nil, statusOf(err)
	}
	return &datapathv1.UpdateEndpointResponse{Endpoint: s.endpoint(e)}, nil
}

// DeleteEndpoint implements the API.
func (s *Server) DeleteEndpoint(
	ctx context.Context, r *datapathv1.DeleteEndpointRequest,
) (*datapathv1.DeleteEndpointResponse, error) {
	how := lifecycle.Removal{UnlessInUse: r.GetUnlessInUse(), ValidateOnly: r.GetValidateOnly()}
	was, existed, err := s.endpoints.Lifecycle.Remove(ctx, wire.OwnerOf(r.GetOwner()), how)
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
func (s *Server) CheckEndpoint(
	ctx context.Context, r *datapathv1.CheckEndpointRequest,
) (*datapathv1.CheckEndpointResponse, error) {
	addrs, err := addrsOf("addresses", r.GetAddresses())
	if err != nil {
		return nil, statusOf(err)
	}
	expected := lifecycle.Expected{Netns: r.GetNetworkNamespace(), Addrs: addrs}
	diffs, err := s.endpoints.Reconciler.Check(ctx, wire.OwnerOf(r.GetOwner()), expected)
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
func (s *Server) GetEndpoint(
	_ context.Context, r *datapathv1.GetEndpointRequest,
) (*datapathv1.GetEndpointResponse, error) {
	e, err := s.endpoints.Report.Get(wire.OwnerOf(r.GetOwner()))
	if err != nil {
		return nil, statusOf(err)
	}
	return &datapathv1.GetEndpointResponse{Endpoint: s.endpoint(e)}, nil
}

// ListEndpoints implements the API.
func (s *Server) ListEndpoints(
	r *datapathv1.ListEndpointsRequest, stream grpc.ServerStreamingServer[datapathv1.ListEndpointsResponse],
) error {
	for _, e := range s.endpoints.Report.List() {
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
func (s *Server) WatchEndpoints(
	r *datapathv1.WatchEndpointsRequest, stream grpc.ServerStreamingServer[datapathv1.WatchEndpointsResponse],
) error {
	var sent withoutPolicy
	if r.GetWithoutPolicy() {
		sent = make(withoutPolicy)
	}
	send := func(e watch.Event[workload.Owner, endpoint.Endpoint]) error {
		if sent != nil && !sent.changes(&e) {
			return nil
		}
		m := &datapathv1.WatchEndpointsResponse{ResumeToken: e.Token}
		switch e.Kind {
		case watch.Upsert:
			m.Event = &datapathv1.WatchEndpointsResponse_Upsert{Upsert: s.endpoint(e.Value)}
		case watch.Delete:
			m.Event = &datapathv1.WatchEndpointsResponse_Delete{Delete: wire.Owner(e.Key)}
		case watch.Bookmark:
			bookmark := &datapathv1.Bookmark{SnapshotComplete: e.SnapshotComplete}
			m.Event = &datapathv1.WatchEndpointsResponse_Bookmark{Bookmark: bookmark}
		}
		return stream.Send(m)
	}
	return watch.Serve(stream.Context(), s.endpoints.Report.Hub(), r.GetResumeToken(), send)
}

// withoutPolicy contains the endpoints that a watch without policy has sent.
type withoutPolicy map[workload.Owner]endpoint.Endpoint

// changes removes the policy from an event, and reports whether the event changes what was sent.
func (w withoutPolicy) changes(e *watch.Event[workload.Owner, endpoint.Endpoint]) bool {
	switch e.Kind {
	case watch.Upsert:
		e.Value.Policy = endpoint.Policy{}
		if last, ok := w[e.Key]; ok && reflect.DeepEqual(last, e.Value) {
			return false
		}
		w[e.Key] = e.Value
	case watch.Delete:
		delete(w, e.Key)
	}
	return true
}

// ReclaimEndpoints implements the API.
func (s *Server) ReclaimEndpoints(
	ctx context.Context, r *datapathv1.ReclaimEndpointsRequest,
) (*datapathv1.ReclaimEndpointsResponse, error) {
	if len(r.GetValidOwners()) == 0 && !r.GetNoneValid() {
		return nil, statusOf(&endpoint.FieldError{
			Field:  "valid_owners",
			Reason: "is empty, which deletes every endpoint of the network; set none_valid if that is meant",
		})
	}
	if len(r.GetValidOwners()) > 0 && r.GetNoneValid() {
		return nil, statusOf(&endpoint.FieldError{Field: "none_valid", Reason: "is set, and valid_owners is not empty"})
	}
	var valid []workload.Owner
	for _, o := range r.GetValidOwners() {
		valid = append(valid, wire.OwnerOf(o))
	}
	in := endpoint.Scope{Manager: r.GetManager(), Network: r.GetNetwork()}
	reclaimed, err := s.endpoints.Lifecycle.Reclaim(ctx, in, valid, r.GetValidateOnly())
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
func (s *Server) AuditMaps(
	r *datapathv1.AuditMapsRequest, stream grpc.ServerStreamingServer[datapathv1.AuditMapsResponse],
) error {
	send := func(f endpoint.Finding) error {
		m := &datapathv1.AuditMapsResponse{Difference: protoDifference(f.Difference), Repaired: f.Repaired}
		if f.Err != nil {
			m.Error = f.Err.Error()
		}
		return stream.Send(m)
	}
	if err := s.endpoints.Reconciler.Audit(stream.Context(), r.GetRepair(), send); err != nil {
		return statusOf(err)
	}
	return statusOf(s.endpoints.Reconciler.AuditContainers(stream.Context(), r.GetRepair(), send))
}
