// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/model/flow"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/proto/wire/flowwire"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/observe"
)

// Observe implements the API.
func (s *Server) Observe(r *datapathv1.ObserveRequest, stream grpc.ServerStreamingServer[datapathv1.ObserveResponse]) error {
	filter, err := filterOf(r)
	if err != nil {
		return statusOf(err)
	}
	s.findBackends(&filter.Criteria)
	for i := range filter.Excluded {
		s.findBackends(&filter.Excluded[i])
	}
	reader, known, err := s.readerOf(r)
	if err != nil {
		return statusOf(err)
	}
	// A caller that reconnects sees at once that the stream is open, even without events.
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	if !known {
		if err := stream.Send(lost(datapathv1.LossSource_LOSS_SOURCE_RESTART, 0)); err != nil {
			return err
		}
	}
	o := observing{Server: s, filter: filter, reader: reader, stream: stream}
	if last := int(r.GetLast()); last > 0 {
		if err := o.remembered(last); err != nil {
			return statusOf(err)
		}
		if !r.GetFollow() {
			return nil
		}
	}
	ctx := stream.Context()
	if r.GetFollow() && !filter.Until.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, filter.Until)
		defer cancel()
	}
	for {
		n, ok, err := o.next(ctx, r.GetFollow())
		switch {
		case err != nil && stream.Context().Err() == nil && ctx.Err() != nil:
			return nil // only events up to now were requested
		case err != nil:
			return statusOf(err)
		case ctx.Err() != nil && n.event.Time.After(filter.Until):
			return nil // do not follow events that never pause
		}
		if err := o.send(n); err != nil {
			return err
		}
		if !ok {
			return nil
		}
	}
}

// filterOf returns the filter of a request.
func filterOf(r *datapathv1.ObserveRequest) (flow.Filter, error) {
	f, err := flowwire.FilterOf(r)
	if field := (*flowwire.FieldError)(nil); errors.As(err, &field) {
		err = &endpoint.FieldError{Field: field.Field, Reason: field.Reason}
	}
	return f, err
}

// readerOf returns a reader at the position of the request. known is false if the last event of the caller does not
// belong to this process.
func (s *Server) readerOf(r *datapathv1.ObserveRequest) (reader *observe.Reader, known bool, err error) {
	switch {
	case r.GetAfterUuid() != "":
		id, err := hex.DecodeString(strings.ReplaceAll(r.GetAfterUuid(), "-", ""))
		if err != nil || len(id) != 16 {
			return nil, false, &endpoint.FieldError{Field: "after_uuid", Reason: "is not a UUID"}
		}
		reader, known = s.ring.After([16]byte(id))
		return reader, known, nil
	case r.GetSince() != nil:
		return s.ring.Read(r.GetSince().AsTime()), true, nil
	case r.GetFollow() && r.GetLast() == 0:
		return s.ring.Tail(), true, nil
	default:
		return s.ring.Read(time.Time{}), true, nil
	}
}

// observing is one call of Observe.
type observing struct {
	*Server

	filter flow.Filter
	reader *observe.Reader
	stream grpc.ServerStreamingServer[datapathv1.ObserveResponse]
}

// noted is an event with the losses right before it.
type noted struct {
	event                 flow.Event
	passes                bool
	missed, lost, lostDNS uint64
}

// next returns the next event or loss. ok is false if there is neither and wait is not set.
func (o *observing) next(ctx context.Context, wait bool) (n noted, ok bool, err error) {
	// The reader only checks the context while it waits, and a reader slower than the events never waits.
	if err := o.stream.Context().Err(); err != nil {
		return n, false, err
	}
	n.event, n.missed, ok, err = o.reader.Next(ctx, wait)
	if err != nil || !ok {
		return n, ok, err
	}
	if o.filter.MayHaveLost(n.event) {
		n.lost = uint64(n.event.KernelLost)
	}
	if o.filter.MayHaveLostDNS(n.event) {
		n.lostDNS = n.event.DNSLost
	}
	// An event without a type only reports a loss.
	n.passes = n.event.Type != 0 && o.filter.Match(n.event,
		func(id uint32) ([]label.Label, bool) { return o.labels(o.stream.Context(), id) })
	return n, true, nil
}

// send sends an event that passes, after the losses before it.
func (o *observing) send(n noted) error {
	if n.missed > 0 {
		if err := o.stream.Send(lost(datapathv1.LossSource_LOSS_SOURCE_OBSERVER, n.missed)); err != nil {
			return err
		}
	}
	if n.lost > 0 {
		if err := o.stream.Send(lost(datapathv1.LossSource_LOSS_SOURCE_KERNEL, n.lost)); err != nil {
			return err
		}
	}
	if n.lostDNS > 0 {
		if err := o.stream.Send(lost(datapathv1.LossSource_LOSS_SOURCE_DNS, n.lostDNS)); err != nil {
			return err
		}
	}
	if !n.passes {
		return nil
	}
	return o.stream.Send(o.observed(o.stream.Context(), n.event))
}

// remembered sends the last most events in the ring that pass, with the losses between and after them.
func (o *observing) remembered(most int) error {
	var kept []noted
	missed, lost, lostDNS, end := uint64(0), uint64(0), uint64(0), o.ring.Next()
	for o.reader.Before(end) {
		n, ok, err := o.next(o.stream.Context(), false)
		if err != nil {
			return err
		}
		missed, lost, lostDNS = missed+n.missed, lost+n.lost, lostDNS+n.lostDNS
		if !ok || !n.passes {
			continue
		}
		n.missed, n.lost, n.lostDNS = missed, lost, lostDNS
		missed, lost, lostDNS = 0, 0, 0
		if kept = append(kept, n); len(kept) > most {
			kept = kept[1:]
		}
	}
	for i, n := range kept {
		if i == 0 {
			n.missed, n.lost, n.lostDNS = 0, 0, 0 // a loss before the first sent event
		}
		if err := o.send(n); err != nil {
			return err
		}
	}
	return o.send(noted{missed: missed, lost: lost, lostDNS: lostDNS})
}

func lost(source datapathv1.LossSource, count uint64) *datapathv1.ObserveResponse {
	return &datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Lost{
		Lost: &datapathv1.LostEvents{Source: source, Count: count},
	}}
}

// Rules maps the numbers of rules and epochs to policies. A replaced epoch may already be forgotten.
type Rules = event.Policies

// labels returns the labels of an identity, if they are known.
func (s *Server) labels(ctx context.Context, identity uint32) ([]label.Label, bool) {
	if s.labelsFrom == nil {
		return nil, false
	}
	return s.labelsFrom.Of(ctx, identity)
}

func (s *Server) labelsOf(ctx context.Context, identity uint32) []*workloadv1.Label {
	labels, _ := s.labels(ctx, identity)
	return wire.Labels(labels)
}

// nodeName returns the name of this node for events. Until identity has answered, it is the configured name.
func (s *Server) nodeName() string {
	if s.named != nil {
		return cmp.Or(s.named(), s.facts.NodeName)
	}
	return s.facts.NodeName
}

func (s *Server) observed(ctx context.Context, e flow.Event) *datapathv1.ObserveResponse {
	if e.Type == flow.Repair {
		return &datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Repair{Repair: &datapathv1.AttachmentRepair{
			Time: timestamppb.New(e.Time), Uuid: uuid(e.ID), NodeName: s.nodeName(),
			EndpointIndex: uint32(e.From.Slot), Slot: uint32(e.From.Slot), //nolint:staticcheck // callers of the earlier name read it
			Identity: e.SourceIdentity, Error: e.Repair.Err, Owner: wire.Owner(e.From.Owner), Pod: wire.Pod(e.From.Pod),
			Difference: protoDifference(endpoint.Difference{
				Subject: e.Repair.Subject, Key: e.Repair.Device, Want: e.Repair.Want, Have: e.Repair.Have,
			}),
		}}}
	}
	f := &datapathv1.Flow{
		Time: timestamppb.New(e.Time), Uuid: uuid(e.ID), NodeName: s.nodeName(), Type: flowwire.Type(e.Type),
		Verdict: flowwire.Verdict(e.Verdict), Reason: datapathv1.Reason(e.Reason), Direction: direction(e.Egress),
		Reply:       e.Reply,
		Source:      s.end(ctx, e.From, e.Source, e.SourceIdentity),
		Destination: s.end(ctx, e.To, e.Destination, e.DestinationIdentity),
		Protocol:    netv1.Protocol(e.Protocol), TcpFlags: uint32(e.TCPFlags), Length: e.Length, Ethertype: uint32(e.EtherType),
		SourceMac: net.HardwareAddr(e.SourceMAC[:]).String(), InterfaceIndex: e.Ifindex,
		Egress: s.side(e.Sender, true), Ingress: s.side(e.Receiver, false),
	}
	f.Dns = protoMessage(e.Message)
	if e.Type == flow.DNS {
		f.SourceMac = ""
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
	// ICMP events have type and code in the port fields
	switch f.GetProtocol() {
	case netv1.Protocol_PROTOCOL_ICMP, netv1.Protocol_PROTOCOL_ICMPV6:
		f.Icmp = &datapathv1.IcmpHeader{Type: f.GetDestination().GetPort() >> 8, Code: f.GetDestination().GetPort() & 0xff}
		f.Source.Port, f.Destination.Port = 0, 0
	}
	return &datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Flow{Flow: f}}
}

// uuid formats an ID according to RFC 9562.
func uuid(id [16]byte) string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

// nodeText returns the name of another node, or its node ID if the name is unknown.
func (s *Server) nodeText(number uint16) string {
	if number == 0 {
		return ""
	}
	if s.nameOf != nil {
		if name := s.nameOf(number); name != "" {
			return name
		}
	}
	return fmt.Sprintf("#%d", number)
}

func (s *Server) end(ctx context.Context, e flow.End, at netip.AddrPort, identity uint32) *datapathv1.FlowEnd {
	end := &datapathv1.FlowEnd{
		Address: wire.Address(at.Addr()), Port: uint32(at.Port()), Identity: identity, Labels: s.labelsOf(ctx, identity),
		Pod: wire.Pod(e.Pod), EndpointIndex: uint32(e.Slot),
	}
	if e.Owner != (workload.Owner{}) {
		end.Owner = wire.Owner(e.Owner)
	}
	return end
}

// side converts the verdict of a side; nil if the side was not evaluated.
func (s *Server) side(o flow.Side, egress bool) *datapathv1.SideVerdict {
	if o.By == 0 {
		return nil
	}
	v := &datapathv1.SideVerdict{
		Verdict: flowwire.Verdict(o.Verdict), Rule: uint32(o.Rule), Table: uint32(o.Table), Epoch: o.Epoch,
		DecidedBy: netv1.DecidedBy(o.By), Revision: o.Revision, RuleSources: o.Sources, Proxy: netv1.Proxy(o.Proxy),
	}
	// Names that were unknown when the event was read may be known now: after a restart of the datapath, the policy
	// service sends the names of rules only once the tables were adopted.
	if s.rules == nil {
		return v
	}
	if revision, ok := s.rules.Revision(o.Slot, o.Epoch); ok && v.Revision == 0 {
		v.Revision = revision
	}
	if o.Rule != 0 && len(v.RuleSources) == 0 {
		v.RuleSources = s.rules.RuleSources(o.Slot, o.Epoch, egress, o.Rule)
		v.Proxy = netv1.Proxy(s.rules.Proxy(o.Slot, o.Epoch, egress, o.Rule))
	}
	return v
}
