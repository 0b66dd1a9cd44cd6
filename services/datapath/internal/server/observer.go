// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
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
		if !filter.Match(e) {
			continue
		}
		if err := stream.Send(&datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Flow{Flow: flow(e)}}); err != nil {
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
		Owners: map[string]bool{}, Identities: map[uint32]bool{}, Reasons: map[string]bool{},
		Protocols: map[uint8]bool{}, Ports: map[uint16]bool{},
	}
	for _, o := range r.GetOwners() {
		f.Owners[ownerOf(o).String()] = true
	}
	for _, id := range r.GetIdentities() {
		f.Identities[id] = true
	}
	for i, text := range r.GetPrefixes() {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return f, &endpoint.FieldError{Field: fmt.Sprintf("prefixes[%d]", i), Reason: err.Error()}
		}
		f.Prefixes = append(f.Prefixes, p.Masked())
	}
	for i, reason := range r.GetReasons() {
		if !slices.Contains(s.Reasons, reason) {
			return f, &endpoint.FieldError{Field: fmt.Sprintf("reasons[%d]", i), Reason: fmt.Sprintf("%q is none of %s", reason, strings.Join(s.Reasons, ", "))}
		}
		f.Reasons[reason] = true
	}
	for _, p := range r.GetProtocols() {
		f.Protocols[uint8(p)] = true
	}
	for _, p := range r.GetPorts() {
		f.Ports[uint16(p)] = true
	}
	if d := r.GetDirection(); d != datapathv1.Direction_DIRECTION_UNSPECIFIED {
		egress := d == datapathv1.Direction_DIRECTION_EGRESS
		f.Egress = &egress
	}
	return f, nil
}

func flow(e observe.Event) *datapathv1.Flow {
	f := &datapathv1.Flow{
		Time: timestamppb.New(e.Time), Verdict: datapathv1.Verdict_VERDICT_FORWARDED, Reason: e.Reason, Direction: direction(e.Egress),
		Slot: uint32(e.Slot), Protocol: uint32(e.Protocol), SourcePort: uint32(e.Source.Port()), DestinationPort: uint32(e.Destination.Port()),
		SourceIdentity: e.SourceIdentity, DestinationIdentity: e.DestinationIdentity, Length: e.Length,
		SourceMac: e.SourceMAC[:], Ethertype: uint32(e.EtherType),
	}
	if e.Dropped {
		f.Verdict = datapathv1.Verdict_VERDICT_DROPPED
	}
	if e.ContainerID != "" {
		f.Owner = &workloadv1.Owner{ContainerId: e.ContainerID, InterfaceName: e.InterfaceName}
	}
	if e.Source.IsValid() {
		f.SourceAddress = e.Source.Addr().AsSlice()
	}
	if e.Destination.IsValid() {
		f.DestinationAddress = e.Destination.Addr().AsSlice()
	}
	// ICMP carries type and code in what ports are for others
	if e.Protocol == 1 || e.Protocol == 58 {
		f.SourcePort, f.DestinationPort = uint32(e.Destination.Port()>>8), uint32(e.Destination.Port()&0xff)
	}
	return f
}
