// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"fmt"
	"math"
	"net/netip"
	"time"

	"github.com/sluice-net/sluice/model/flow"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Ends looks up who has an address.
type Ends interface {
	// EndOf returns the endpoint of this node with an address, the identity of the address, and the node ID of the
	// other node that has it; zero: none.
	EndOf(a netip.Addr) (end flow.End, identity uint32, node uint16)
}

// ReportDNSMessages implements the API.
func (s *Server) ReportDNSMessages(
	_ context.Context, r *datapathv1.ReportDNSMessagesRequest,
) (*datapathv1.ReportDNSMessagesResponse, error) {
	events := make([]flow.Event, 0, len(r.GetMessages()))
	for i, m := range r.GetMessages() {
		e, err := s.reported(m)
		if err != nil {
			return nil, statusOf(&endpoint.FieldError{Field: fmt.Sprintf("messages[%d]", i), Reason: err.Error()})
		}
		events = append(events, e)
	}
	if lost := r.GetLostCount(); lost > 0 {
		s.ring.Add(flow.Event{Time: time.Now(), DNSLost: lost})
	}
	for _, e := range events {
		s.ring.Add(e)
	}
	return &datapathv1.ReportDNSMessagesResponse{}, nil
}

// reported returns the event of a message. Its ends are looked up by their addresses, because sluice-dns does not know
// them, and its endpoint IDs may be outdated.
func (s *Server) reported(r *datapathv1.ReportedDNSMessage) (flow.Event, error) {
	client, err := addressAndPort(r.GetClientAddress(), r.GetClientPort())
	if err != nil {
		return flow.Event{}, fmt.Errorf("client: %w", err)
	}
	server, err := addressAndPort(r.GetServerAddress(), r.GetServerPort())
	if err != nil {
		return flow.Event{}, fmt.Errorf("server: %w", err)
	}
	m := r.GetMessage()
	e := flow.Event{
		Type: flow.DNS, Time: r.GetTime().AsTime(), Verdict: flow.Forwarded, Reply: m.GetResponse(),
		Source: client, Destination: server, Protocol: protocolOf(r), EtherType: 0x0800,
		Message: &flow.Message{
			Response: m.GetResponse(), Name: m.GetName(), QueryType: uint16(m.GetQueryType()), //nolint:gosec // validated
			Code: uint16(m.GetResponseCode()), Chain: m.GetCnameTargets(), TTL: m.GetTtlSeconds(), //nolint:gosec // validated
			Redacted: m.GetRedacted(),
		},
	}
	if now := time.Now(); e.Time.After(now) {
		e.Time = now
	}
	if client.Addr().Is6() {
		e.EtherType = 0x86dd
	}
	if r.GetDropped() {
		e.Verdict = flow.Dropped
	}
	for _, text := range m.GetAddresses() {
		a, err := wire.AddressOf(text)
		if err != nil {
			return e, fmt.Errorf("addresses: %w", err)
		}
		e.Message.Addresses = append(e.Message.Addresses, a)
	}
	// The client is the endpoint at whose device the packet was seen.
	e.Egress = !m.GetResponse()
	if m.GetResponse() {
		e.Source, e.Destination = server, client
	}
	var from, to uint16
	e.From, e.SourceIdentity, from = s.ends.EndOf(e.Source.Addr())
	e.To, e.DestinationIdentity, to = s.ends.EndOf(e.Destination.Addr())
	e.Node = max(from, to)
	return e, nil
}

// protocolOf returns the protocol of the connection.
func protocolOf(r *datapathv1.ReportedDNSMessage) uint8 {
	if r.GetProtocol() == netv1.Protocol_PROTOCOL_TCP {
		return uint8(netv1.Protocol_PROTOCOL_TCP)
	}
	return uint8(netv1.Protocol_PROTOCOL_UDP)
}

func addressAndPort(text string, port uint32) (netip.AddrPort, error) {
	a, err := wire.AddressOf(text)
	if err != nil {
		return netip.AddrPort{}, err
	}
	if port > math.MaxUint16 {
		return netip.AddrPort{}, fmt.Errorf("%d is not a port", port)
	}
	return netip.AddrPortFrom(a.Unmap(), uint16(port)), nil
}

// protoMessage converts a DNS message; nil without one.
func protoMessage(m *flow.Message) *datapathv1.DNSMessage {
	if m == nil {
		return nil
	}
	return &datapathv1.DNSMessage{
		Response: m.Response, Name: m.Name, QueryType: uint32(m.QueryType), ResponseCode: uint32(m.Code),
		Addresses: wire.Addresses(m.Addresses), CnameTargets: m.Chain, TtlSeconds: m.TTL, Redacted: m.Redacted,
	}
}
