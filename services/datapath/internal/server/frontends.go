// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendstream"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
)

// Services reads the services that the kernel translates.
type Services interface {
	ListFrontends() ([]servicemap.Frontend, error)
	CountFrontends() (servicemap.Counts, error)
}

// Backends counts the connections of backends.
type Backends interface {
	// Connections returns the number of connections of each backend that has any, sorted.
	Connections(ctx context.Context) ([]conntrack.Count, error)
}

// errNotTranslated is returned if services are not translated.
var errNotTranslated = fmt.Errorf("services are not translated: %w", endpoint.ErrLoadBalancingOff)

// ListBackendConnections implements the API.
func (s *Server) ListBackendConnections(
	_ *datapathv1.ListBackendConnectionsRequest,
	stream grpc.ServerStreamingServer[datapathv1.ListBackendConnectionsResponse],
) error {
	if s.backends == nil {
		return statusOf(errNotTranslated)
	}
	counts, err := s.backends.Connections(stream.Context())
	if err != nil {
		return statusOf(err)
	}
	for _, c := range counts {
		if err := stream.Send(&datapathv1.ListBackendConnectionsResponse{Backend: &datapathv1.BackendConnections{
			Address: c.Addr().String(), Port: uint32(c.Port()), Protocol: netv1.Protocol(c.Protocol),
			ConnectionCount: uint32(c.Connections),
		}}); err != nil {
			return err
		}
	}
	return nil
}

// ListFrontends implements the API.
func (s *Server) ListFrontends(
	_ *datapathv1.ListFrontendsRequest, stream grpc.ServerStreamingServer[datapathv1.ListFrontendsResponse],
) error {
	fs, err := s.services.ListFrontends()
	if err != nil {
		return statusOf(err)
	}
	for _, f := range fs {
		if err := stream.Send(&datapathv1.ListFrontendsResponse{Frontend: protoFrontend(f)}); err != nil {
			return err
		}
	}
	return nil
}

func protoFrontend(f servicemap.Frontend) *datapathv1.KernelFrontend {
	return &datapathv1.KernelFrontend{
		Address: f.Key.Addr.String(), Port: uint32(f.Key.Port), Protocol: netv1.Protocol(f.Key.Protocol),
		NodePort: f.Key.Node, Service: f.Service, Inside: protoFront(f.Inside), Outside: protoFront(f.Outside),
		AffinitySeconds: uint32(f.Affinity / time.Second), Kind: datapathv1.FrontendKind(f.Kind),
	}
}

func protoFront(f *servicemap.Front) *datapathv1.KernelBackendList {
	if f == nil {
		return nil
	}
	l := &datapathv1.KernelBackendList{Front: f.Number, Drop: f.Drop, TableSlots: uint32(f.Slots)}
	for _, b := range f.Backends {
		l.Backends = append(
			l.Backends,
			&datapathv1.KernelBackend{Address: b.Addr().String(), Port: uint32(b.Port()), Number: b.Number},
		)
	}
	return l
}

// maxRefusedFrontends limits the number of refused frontends in a status.
const maxRefusedFrontends = 100

func frontendStream(st frontendstream.Status, n servicemap.Counts) *datapathv1.FrontendStream {
	refused := st.Refused()
	p := &datapathv1.FrontendStream{
		Complete: st.Complete, Revision: st.Revision, EndedRevision: st.Ended,
		Frontends: uint32(n.Frontends), Backends: uint32(n.Backends),
		RestingNumbers: uint32(n.Resting), EarlierFrontends: uint32(st.Earlier), RefusedCount: uint32(len(refused)),
		Refused: refused[:min(len(refused), maxRefusedFrontends)],
	}
	if st.Err != nil {
		p.Error = st.Err.Error()
	}
	return p
}

// frontendWarnings returns the warnings about services for an operator.
func frontendWarnings(st frontendstream.Status) (all []string) {
	refused := st.Refused()
	for _, r := range refused[:min(len(refused), maxRefused)] {
		all = append(all, "services: not enforced: "+r)
	}
	if n := len(refused) - maxRefused; n > 0 {
		all = append(all, fmt.Sprintf("services: not enforced: %d more", n))
	}
	if st.Earlier > 0 {
		all = append(
			all,
			fmt.Sprintf("services: %d frontends are kept although sluice-loadbalancer does not list them since it lost its state, "+
				"until all its sources are listed; see `sluice service status`", st.Earlier),
		)
	}
	if st.Unsaved != "" {
		all = append(all, "services: "+st.Unsaved)
	}
	return all
}
