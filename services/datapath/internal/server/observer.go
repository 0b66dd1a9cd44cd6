// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/observe"
)

// Observe implements the API.
func (s *Server) Observe(r *datapathv1.ObserveRequest, stream grpc.ServerStreamingServer[datapathv1.ObserveResponse]) error {
	filter, err := s.filterOf(r)
	if err != nil {
		return statusOf(err)
	}
	var reader *observe.Reader
	switch {
	case r.GetSince() != nil:
		reader = s.Ring.Read(r.GetSince().AsTime())
	case r.GetFollow():
		reader = s.Ring.Tail()
	default:
		reader = s.Ring.Read(time.Time{})
	}
	for {
		// Next looks at the context only where it waits, and who is slower than
		// the events never does.
		if err := stream.Context().Err(); err != nil {
			return statusOf(err)
		}
		e, missed, ok, err := reader.Next(stream.Context(), r.GetFollow())
		if err != nil {
			return statusOf(err)
		}
		if missed > 0 {
			if err := stream.Send(lost(datapathv1.LossSource_LOSS_SOURCE_OBSERVER, missed)); err != nil {
				return err
			}
		}
		if !ok {
			return nil
		}
		if e.KernelLost > 0 {
			if err := stream.Send(lost(datapathv1.LossSource_LOSS_SOURCE_KERNEL, uint64(e.KernelLost))); err != nil {
				return err
			}
		}
		if e.Type == 0 {
			continue // nothing but a loss
		}
		if !filter.Match(e, func(id uint32) ([]label.Label, bool) { return s.labels(stream.Context(), id) }) {
			continue
		}
		if err := stream.Send(s.observed(stream.Context(), e)); err != nil {
			return err
		}
	}
}

func lost(source datapathv1.LossSource, count uint64) *datapathv1.ObserveResponse {
	return &datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Lost{
		Lost: &datapathv1.LostEvents{Source: source, Count: count},
	}}
}

func (s *Server) filterOf(r *datapathv1.ObserveRequest) (observe.Filter, error) {
	f := observe.Filter{
		Owners: map[workload.Owner]bool{}, Identities: map[uint32]bool{}, Reasons: map[uint32]bool{},
		Protocols: map[uint8]bool{}, Ports: map[uint16]bool{},
		Verdicts: map[observe.Verdict]bool{}, Types: map[observe.Type]bool{},
	}
	for _, o := range r.GetOwners() {
		f.Owners[wire.OwnerOf(o)] = true
	}
	for _, id := range r.GetIdentities() {
		f.Identities[id] = true
	}
	for i, text := range r.GetPrefixes() {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return f, &endpoint.FieldError{Field: fmt.Sprintf("prefixes[%d]", i), Reason: err.Error()}
		}
		f.Prefixes = append(f.Prefixes, p)
	}
	for _, reason := range r.GetReasons() {
		f.Reasons[uint32(reason)] = true
	}
	for _, p := range r.GetProtocols() {
		f.Protocols[uint8(p)] = true
	}
	for _, p := range r.GetPorts() {
		f.Ports[uint16(p)] = true
	}
	if d := r.GetDirection(); d != netv1.Direction_DIRECTION_UNSPECIFIED {
		egress := d == netv1.Direction_DIRECTION_EGRESS
		f.Egress = &egress
	}
	for _, v := range r.GetVerdicts() {
		f.Verdicts[verdicts[v]] = true
	}
	for _, t := range r.GetTypes() {
		f.Types[types[t]] = true
	}
	if len(r.GetServices()) > 0 {
		f.Services = map[string]bool{}
	}
	for _, key := range r.GetServices() {
		f.Services[key.GetNamespace()+"/"+key.GetName()] = true
	}
	for _, sel := range r.GetSelectors() {
		f.Selectors = append(f.Selectors, selectorOf(sel))
	}
	return f, nil
}

func selectorOf(sel *datapathv1.LabelSelector) observe.Selector {
	var out observe.Selector
	for _, r := range sel.GetRequirements() {
		one := observe.Requirement{Source: r.GetSource(), Key: r.GetKey()}
		switch r.GetOperator() {
		case datapathv1.LabelOperator_LABEL_OPERATOR_NOT_EXISTS, datapathv1.LabelOperator_LABEL_OPERATOR_NOT_IN:
			one.Not = true
		}
		if len(r.GetValues()) > 0 {
			one.Values = make(map[string]bool, len(r.GetValues()))
			for _, v := range r.GetValues() {
				one.Values[v] = true
			}
		}
		out = append(out, one)
	}
	return out
}

var (
	verdicts = map[datapathv1.Verdict]observe.Verdict{
		datapathv1.Verdict_VERDICT_FORWARDED: observe.Forwarded, datapathv1.Verdict_VERDICT_DROPPED: observe.Dropped,
		datapathv1.Verdict_VERDICT_AUDITED: observe.Audited, datapathv1.Verdict_VERDICT_REDIRECTED: observe.Redirected,
	}
	types = map[datapathv1.FlowType]observe.Type{
		datapathv1.FlowType_FLOW_TYPE_DROP: observe.Drop, datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT: observe.PolicyVerdict,
		datapathv1.FlowType_FLOW_TYPE_CONNECTION_CLOSED: observe.Closed,
	}
)

func protoVerdict(v observe.Verdict) datapathv1.Verdict {
	for p, o := range verdicts {
		if o == v {
			return p
		}
	}
	return datapathv1.Verdict_VERDICT_UNSPECIFIED
}

func protoType(t observe.Type) datapathv1.FlowType {
	for p, o := range types {
		if o == t {
			return p
		}
	}
	return datapathv1.FlowType_FLOW_TYPE_UNSPECIFIED
}

// Rules knows what numbers of rules and epochs mean. An epoch that
// was replaced long ago may be forgotten.
type Rules interface {
	// Revision of the policy that the epoch of a slot enforces.
	Revision(slot uint16, epoch uint32) (revision uint64, ok bool)
	// RuleSources are the places of a rule of the table that the slot had in
	// that direction in that epoch; empty if not known.
	RuleSources(slot uint16, epoch uint32, egress bool, rule uint16) []string
	// Proxy is the kind of proxy that the rule redirects to, 0 if it does not,
	// or that is not known.
	Proxy(slot uint16, epoch uint32, egress bool, rule uint16) uint16
}

// labels of an identity, if anybody knows them.
func (s *Server) labels(ctx context.Context, identity uint32) ([]label.Label, bool) {
	if s.Labels == nil {
		return nil, false
	}
	return s.Labels.Of(ctx, identity)
}

func (s *Server) labelsOf(ctx context.Context, identity uint32) []*workloadv1.Label {
	labels, _ := s.labels(ctx, identity)
	return wire.Labels(labels)
}

func (s *Server) observed(ctx context.Context, e observe.Event) *datapathv1.ObserveResponse {
	if e.Type == observe.Repair {
		return &datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Repair{Repair: &datapathv1.AttachmentRepair{
			Time: timestamppb.New(e.Time), Uuid: uuid(e.ID), NodeName: s.Facts.NodeName,
			EndpointIndex: uint32(e.From.Slot), Slot: uint32(e.From.Slot), //nolint:staticcheck // callers of the earlier name read it
			Identity: e.SourceIdentity, Error: e.Repair.Err, Owner: wire.Owner(e.From.Owner), Pod: wire.Pod(e.From.Pod),
			Difference: protoDifference(endpoint.Difference{
				Subject: e.Repair.Subject, Key: e.Repair.Device, Want: e.Repair.Want, Have: e.Repair.Have,
			}),
		}}}
	}
	f := &datapathv1.Flow{
		Time: timestamppb.New(e.Time), Uuid: uuid(e.ID), NodeName: s.Facts.NodeName, Type: protoType(e.Type),
		Verdict: protoVerdict(e.Verdict), Reason: datapathv1.Reason(e.Reason), Direction: direction(e.Egress), Reply: e.Reply,
		Source:      s.end(ctx, e.From, e.Source, e.SourceIdentity),
		Destination: s.end(ctx, e.To, e.Destination, e.DestinationIdentity),
		Protocol:    netv1.Protocol(e.Protocol), TcpFlags: uint32(e.TCPFlags), Length: e.Length, Ethertype: uint32(e.EtherType),
		SourceMac: net.HardwareAddr(e.SourceMAC[:]).String(), InterfaceIndex: e.Ifindex,
		Egress: s.side(e.Sender, true), Ingress: s.side(e.Receiver, false),
	}
	if e.Original.IsValid() {
		f.OriginalDestinationAddress = wire.Address(e.Original.Addr())
		f.OriginalDestinationPort, f.Service = uint32(e.Original.Port()), e.Service
	}
	far := f.Source
	if e.Egress {
		far = f.Destination
	}
	far.NodeName = s.nodeText(e.Node)
	// ICMP carries type and code in what ports are for others
	switch f.GetProtocol() {
	case netv1.Protocol_PROTOCOL_ICMP, netv1.Protocol_PROTOCOL_ICMPV6:
		f.Icmp = &datapathv1.IcmpHeader{Type: f.GetDestination().GetPort() >> 8, Code: f.GetDestination().GetPort() & 0xff}
		f.Source.Port, f.Destination.Port = 0, 0
	}
	return &datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Flow{Flow: f}}
}

// uuid writes an id as RFC 9562 does.
func uuid(id [16]byte) string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

// nodeText is the name of another node, or its number if the name is not known.
func (s *Server) nodeText(number uint16) string {
	if number == 0 {
		return ""
	}
	if s.NameOf != nil {
		if name := s.NameOf(number); name != "" {
			return name
		}
	}
	return fmt.Sprintf("#%d", number)
}

func (s *Server) end(ctx context.Context, e observe.End, at netip.AddrPort, identity uint32) *datapathv1.FlowEnd {
	end := &datapathv1.FlowEnd{
		Address: wire.Address(at.Addr()), Port: uint32(at.Port()), Identity: identity, Labels: s.labelsOf(ctx, identity),
		Pod: wire.Pod(e.Pod), EndpointIndex: uint32(e.Slot),
	}
	if e.Owner != (workload.Owner{}) {
		end.Owner = wire.Owner(e.Owner)
	}
	return end
}

// side adds what user space knows to what the kernel said; nil if the side was
// not asked.
func (s *Server) side(o observe.Side, egress bool) *datapathv1.SideVerdict {
	if o.By == 0 {
		return nil
	}
	v := &datapathv1.SideVerdict{
		Verdict: protoVerdict(o.Verdict), Rule: uint32(o.Rule), Table: uint32(o.Table), Epoch: o.Epoch,
		DecidedBy: netv1.DecidedBy(o.By),
	}
	if s.Rules == nil {
		return v
	}
	if revision, ok := s.Rules.Revision(o.Slot, o.Epoch); ok {
		v.Revision = revision
	}
	if o.Rule != 0 {
		v.RuleSources = s.Rules.RuleSources(o.Slot, o.Epoch, egress, o.Rule)
		v.Proxy = netv1.Proxy(s.Rules.Proxy(o.Slot, o.Epoch, egress, o.Rule))
	}
	return v
}
