// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"cmp"
	"context"
	"errors"
	"net/netip"

	"google.golang.org/grpc"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/explain"
)

// Explainer explains connections.
type Explainer interface {
	// Explain runs the programs; it returns explain.ErrNotLocal if neither end is an endpoint.
	Explain(t conntrack.Tuple) (explain.Explanation, error)
}

// Maps reads the kernel's maps.
type Maps interface {
	// Dump reads a map as text. It returns pin.ErrNoMap if the map does not exist.
	Dump(name string, visit func(key, value string) error) error
}

// Explain implements the API.
func (s *Server) Explain(ctx context.Context, r *datapathv1.ExplainRequest) (*datapathv1.ExplainResponse, error) {
	t, err := tupleOf(r)
	if err != nil {
		return nil, statusOf(err)
	}
	x, err := s.explainer.Explain(t)
	if err != nil {
		return nil, statusOf(err)
	}
	resp := s.explained(ctx, x)
	if x.Service != nil {
		resp.Service = s.explainedService(ctx, x.Service)
		if x.Service.Outcome != explain.NotTranslated {
			resp.Destination = nil
			resp.Verdict, resp.Reason = agreed(resp.GetService())
		}
	}
	return resp, nil
}

// explained converts the explanation of a connection to an address.
func (s *Server) explained(ctx context.Context, x explain.Explanation) *datapathv1.ExplainResponse {
	audited := x.Egress != nil && x.Egress.Audited || x.Ingress != nil && x.Ingress.Audited
	resp := &datapathv1.ExplainResponse{
		Reason: datapathv1.Reason(x.Reason),
		Source: s.explainedPeer(ctx, x.Source), Destination: s.explainedPeer(ctx, x.Destination),
		Egress: s.explainedSide(x.Egress, x.Source.Slot, true), Ingress: s.explainedSide(x.Ingress, x.Destination.Slot, false),
	}
	if x.Reason != 0 { // a program was run
		resp.Verdict = verdictOf(x.Reason, audited)
	}
	if x.Tracked {
		c, next := x.Connection, x.Next
		p := connectionOf(&c)
		p.Current = !next.Evaluated
		p.NextVerdict = verdictOf(next.Reason, next.Egress.Audited || next.Ingress.Audited)
		p.NextReason = datapathv1.Reason(next.Reason)
		resp.Connection = p
		if x.NAT.IsValid() {
			resp.Connection.SourceAddress, resp.Connection.SourcePort = wire.Address(x.NAT.Addr()), uint32(x.NAT.Port())
		}
	}
	return resp
}

// verdictOf returns the verdict for a reason; audited: a policy denies the packet in audit mode.
func verdictOf(r event.Reason, audited bool) datapathv1.Verdict {
	switch {
	case r.Dropped():
		return datapathv1.Verdict_VERDICT_DROPPED
	case audited:
		return datapathv1.Verdict_VERDICT_AUDITED
	}
	return datapathv1.Verdict_VERDICT_FORWARDED
}

func tupleOf(r *datapathv1.ExplainRequest) (conntrack.Tuple, error) {
	src, err := wire.AddressOf(r.GetSourceAddress())
	if err != nil {
		return conntrack.Tuple{}, &endpoint.FieldError{Field: "source_address", Reason: err.Error()}
	}
	dst, err := wire.AddressOf(r.GetDestinationAddress())
	if err == nil && src.Is4() != dst.Is4() {
		err = errors.New("is of another family than source_address")
	}
	if err != nil {
		return conntrack.Tuple{}, &endpoint.FieldError{Field: "destination_address", Reason: err.Error()}
	}
	return conntrack.Tuple{
		Initiator: netip.AddrPortFrom(src, uint16(r.GetSourcePort())), Responder: netip.AddrPortFrom(dst, uint16(r.GetDestinationPort())),
		Protocol: uint8(r.GetProtocol()),
	}, nil
}

func (s *Server) explainedPeer(ctx context.Context, p explain.Peer) *datapathv1.ExplainedPeer {
	e := &datapathv1.ExplainedPeer{
		Identity: uint32(p.Identity), Known: p.Word.Known, IdentityClass: uint32(p.Word.Class), Labels: s.labelsOf(ctx, uint32(p.Identity)),
	}
	if p.Entry.IsValid() {
		e.IpcachePrefix = p.Entry.String()
	}
	e.NodeName = s.nodeText(p.Node)
	if p.Slot != endpointmap.NoID && p.Slot != endpointmap.HostID {
		e.EndpointIndex = uint32(p.Slot)
		e.Slot = e.EndpointIndex //nolint:staticcheck // callers of the earlier name read it
		if spec, ok := s.endpoints.Report.SpecOfSlot(p.Slot); ok {
			e.Owner, e.Pod = wire.Owner(spec.Owner), wire.Pod(spec.Pod)
		}
	}
	return e
}

func (s *Server) explainedSide(x *explain.Side, slot endpointmap.ID, egress bool) *datapathv1.ExplainedSide {
	if x == nil {
		return nil
	}
	side := &datapathv1.ExplainedSide{
		Verdict:       s.side(x.Observed(slot), egress),
		IdentityClass: uint32(x.Place.IdentityClass), IdentityRow: x.Place.IdentityRow,
		AddressClass: uint32(x.Place.AddressClass),
	}
	if x.Place.AddressPrefix.IsValid() {
		side.AddressPrefix = x.Place.AddressPrefix.String()
	}
	return side
}

func (s *Server) explainedService(ctx context.Context, svc *explain.Service) *datapathv1.ExplainedService {
	p := &datapathv1.ExplainedService{
		Service: svc.Service, Address: wire.Address(svc.Key.Addr), Port: uint32(svc.Key.Port),
		Kind: datapathv1.FrontendKind(svc.Kind), Outside: svc.Outside,
		Outcome: datapathv1.ServiceOutcome(svc.Outcome), BackendCount: uint32(svc.Count),
	}
	for _, b := range svc.Backends {
		x := s.explained(ctx, b.Explanation)
		if b.Path == explain.OwnNamespace {
			x.Verdict = datapathv1.Verdict_VERDICT_FORWARDED
		}
		shown := &datapathv1.ExplainedBackend{
			Address: wire.Address(b.Addr()), Port: uint32(b.Port()), Path: datapathv1.BackendPath(b.Path),
			Verdict: x.GetVerdict(), Reason: x.GetReason(), Peer: x.GetDestination(),
			Egress: x.GetEgress(), Ingress: x.GetIngress(), Connection: x.GetConnection(),
		}
		if b.Source.IsValid() {
			shown.SourceAddress = wire.Address(b.Source)
		}
		p.Backends = append(p.Backends, shown)
	}
	return p
}

// agreed returns the verdict and reason that all backends of a service have in common; unspecified if they differ.
func agreed(s *datapathv1.ExplainedService) (datapathv1.Verdict, datapathv1.Reason) {
	if s.GetOutcome() != datapathv1.ServiceOutcome_SERVICE_OUTCOME_TRANSLATED {
		return datapathv1.Verdict_VERDICT_DROPPED, datapathv1.Reason_REASON_UNSPECIFIED
	}
	first := s.GetBackends()[0]
	verdict, reason := first.GetVerdict(), first.GetReason()
	for _, b := range s.GetBackends()[1:] {
		if b.GetVerdict() != verdict {
			return datapathv1.Verdict_VERDICT_UNSPECIFIED, datapathv1.Reason_REASON_UNSPECIFIED
		}
		if b.GetReason() != reason {
			reason = datapathv1.Reason_REASON_UNSPECIFIED
		}
	}
	return verdict, reason
}

// DumpMap implements the API.
func (s *Server) DumpMap(r *datapathv1.DumpMapRequest, stream grpc.ServerStreamingServer[datapathv1.DumpMapResponse]) error {
	var last *datapathv1.DumpMapResponse // sent only when it is known whether another one follows
	var sent error                       // an error of the stream already has a status
	entries, limit := uint64(0), uint64(r.GetLimit())
	err := s.maps.Dump(r.GetName(), func(key, value string) error {
		if entries++; limit != 0 && entries > limit {
			last.OmittedEntryCount++
			return stream.Context().Err()
		}
		if last != nil {
			sent = stream.Send(last)
		}
		last = &datapathv1.DumpMapResponse{Key: key, Value: value}
		return sent
	})
	if sent == nil && last != nil {
		sent = stream.Send(last)
	}
	return cmp.Or(sent, statusOf(err))
}
