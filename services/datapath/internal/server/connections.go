// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/conntrackview"
)

// Tracked are the connections that the kernel tracks.
type Tracked interface {
	// ListConnections calls visit once for each connection that matches the filter. The argument of visit is only valid
	// during the call.
	ListConnections(ctx context.Context, f conntrack.Filter, visit func(*conntrackview.Connection) error) error
	// FlushConnections removes the connections that match the filter. With validateOnly it only counts them.
	FlushConnections(ctx context.Context, f conntrack.Filter, validateOnly bool) (conntrack.Flushed, error)
}

// ListConnections implements the API.
func (s *Server) ListConnections(
	r *datapathv1.ListConnectionsRequest, stream grpc.ServerStreamingServer[datapathv1.ListConnectionsResponse],
) error {
	f, err := s.connectionFilter(r.GetFilter())
	if err != nil {
		return statusOf(err)
	}
	var last *datapathv1.ListConnectionsResponse // sent only when it is known whether another one follows
	var sent error                               // an error of the stream already has a status
	count, limit := uint64(0), uint64(r.GetLimit())
	err = s.tracked.ListConnections(stream.Context(), f, func(c *conntrackview.Connection) error {
		if count++; limit != 0 && count > limit {
			last.OmittedConnectionCount++
			return nil
		}
		if last != nil {
			sent = stream.Send(last)
		}
		last = &datapathv1.ListConnectionsResponse{Connection: s.trackedConnection(c)}
		return sent
	})
	if err == nil && last != nil {
		sent = stream.Send(last)
	}
	return cmp.Or(sent, statusOf(err))
}

// FlushConnections implements the API.
func (s *Server) FlushConnections(
	ctx context.Context, r *datapathv1.FlushConnectionsRequest,
) (*datapathv1.FlushConnectionsResponse, error) {
	switch empty := isEmpty(r.GetFilter()); {
	case empty && !r.GetAll():
		return nil, statusOf(&endpoint.FieldError{
			Field: "filter", Reason: "has no criterion, which means every connection; set all if that is meant",
		})
	case !empty && r.GetAll():
		return nil, statusOf(&endpoint.FieldError{Field: "all", Reason: "is set, and filter has criteria"})
	}
	f, err := s.connectionFilter(r.GetFilter())
	if err != nil {
		return nil, statusOf(err)
	}
	done, err := s.tracked.FlushConnections(ctx, f, r.GetValidateOnly())
	if err != nil {
		return nil, statusOf(fmt.Errorf("flush failed after %d connections: %w", done.Removed, err))
	}
	return &datapathv1.FlushConnectionsResponse{
		FlushedCount: uint64(done.Removed), TerminatedCount: uint64(done.Terminated),
		UnrememberedCount: uint64(done.Unremembered), BusyCount: uint64(done.Busy),
	}, nil
}

func isEmpty(f *datapathv1.ConnectionFilter) bool {
	return len(f.GetOwners())+len(f.GetPrefixes())+len(f.GetPorts())+len(f.GetProtocols())+len(f.GetStates()) == 0 &&
		f.GetFamily() == datapathv1.AddressFamily_ADDRESS_FAMILY_UNSPECIFIED
}

// connectionFilter converts a filter. A criterion that cannot match anything is an error, because ignoring it would
// make the filter match too much.
func (s *Server) connectionFilter(p *datapathv1.ConnectionFilter) (f conntrack.Filter, err error) {
	for i, o := range p.GetOwners() {
		e, err := s.endpoints.Report.Get(wire.OwnerOf(o))
		if err == nil && e.Slot == 0 {
			err = fmt.Errorf("%s: %w that is published", e.Spec.Owner, endpoint.ErrNotFound)
		}
		if err != nil {
			return f, fmt.Errorf("filter.owners[%d]: %w", i, err)
		}
		f.Locals = append(f.Locals, conntrack.Local{Slot: e.Slot, Addrs: e.Spec.Addrs})
	}
	for i, text := range p.GetPrefixes() {
		prefix, err := netip.ParsePrefix(text)
		if err != nil || prefix.Addr().Is4In6() {
			return f, &endpoint.FieldError{
				Field: fmt.Sprintf("filter.prefixes[%d]", i), Reason: "is not an IPv4 or IPv6 prefix",
			}
		}
		f.Prefixes = append(f.Prefixes, prefix.Masked())
	}
	for i, n := range p.GetPorts() {
		if n > 65535 {
			return f, &endpoint.FieldError{Field: fmt.Sprintf("filter.ports[%d]", i), Reason: "is above 65535"}
		}
		f.Ports = append(f.Ports, uint16(n))
	}
	for i, n := range p.GetProtocols() {
		if n < 0 || n > 255 {
			return f, &endpoint.FieldError{Field: fmt.Sprintf("filter.protocols[%d]", i), Reason: "is not 0 to 255"}
		}
		f.Protocols = append(f.Protocols, uint8(n))
	}
	for _, state := range p.GetStates() {
		f.States = append(f.States, stateWord(state))
	}
	switch p.GetFamily() {
	case datapathv1.AddressFamily_ADDRESS_FAMILY_IPV4:
		f.Without[1] = true
	case datapathv1.AddressFamily_ADDRESS_FAMILY_IPV6:
		f.Without[0] = true
	}
	return f, nil
}

// statePrefix is the prefix of the names of states.
const statePrefix = "CONNECTION_STATE_"

func stateWord(s datapathv1.ConnectionState) string {
	return strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(s.String(), statePrefix), "_", "-"))
}

func connectionStates(words []string) []datapathv1.ConnectionState {
	var all []datapathv1.ConnectionState
	for _, word := range words {
		name := statePrefix + strings.ToUpper(strings.ReplaceAll(word, "-", "_"))
		all = append(all, datapathv1.ConnectionState(datapathv1.ConnectionState_value[name]))
	}
	return all
}

// connectionOf converts an entry, without the verdict on its next packet.
func connectionOf(c *conntrack.Connection) *datapathv1.Connection {
	return &datapathv1.Connection{
		InitiatorAddress: wire.Address(c.Initiator.Addr()), InitiatorPort: uint32(c.Initiator.Port()),
		ResponderAddress: wire.Address(c.Responder.Addr()), ResponderPort: uint32(c.Responder.Port()),
		Protocol: netv1.Protocol(c.Protocol), States: connectionStates(c.FlagNames()),
		LastSeenTime: timestamppb.New(c.Time()),
		EgressRule:   uint32(c.EgressRule), IngressRule: uint32(c.IngressRule), InTransit: c.Transit,
	}
}

func (s *Server) trackedConnection(c *conntrackview.Connection) *datapathv1.TrackedConnection {
	p := &datapathv1.TrackedConnection{
		Connection: connectionOf(c.Connection),
		Initiator:  s.connectionEnd(c.From, c.Initiator.Addr()), Responder: s.connectionEnd(c.To, c.Responder.Addr()),
		NodeName: s.nodeText(c.Value.Node), EarlierLayout: c.Earlier != nil,
	}
	p.Connection.Current = c.Current
	if c.Source.IsValid() {
		p.Connection.SourceAddress, p.Connection.SourcePort = wire.Address(c.Source.Addr()), uint32(c.Source.Port())
	}
	if c.Asked.IsValid() {
		p.AskedAddress, p.AskedPort, p.Service = wire.Address(c.Asked.Addr()), uint32(c.Asked.Port()), c.Service
	}
	return p
}

func (s *Server) connectionEnd(end conntrack.End, addr netip.Addr) *datapathv1.ConnectionEnd {
	p := &datapathv1.ConnectionEnd{Identity: uint32(end.Identity), LocalNode: end.Slot == endpointmap.HostID}
	if end.Slot == endpointmap.HostID || end.Slot > endpointmap.MaxEndpoints {
		return p
	}
	p.EndpointIndex = uint32(end.Slot)
	// another endpoint may have the endpoint ID by now
	if e, ok := s.endpoints.Report.HolderOf(addr); ok && e.Slot == end.Slot {
		p.Owner, p.Pod = wire.Owner(e.Spec.Owner), wire.Pod(e.Spec.Pod)
	}
	return p
}
