// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package flowwire

import (
	"net/netip"

	"github.com/sluice-net/sluice/model/flow"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/proto/wire"
)

var (
	verdicts = map[datapathv1.Verdict]flow.Verdict{
		datapathv1.Verdict_VERDICT_FORWARDED: flow.Forwarded, datapathv1.Verdict_VERDICT_DROPPED: flow.Dropped,
		datapathv1.Verdict_VERDICT_AUDITED: flow.Audited, datapathv1.Verdict_VERDICT_REDIRECTED: flow.Redirected,
	}
	types = map[datapathv1.FlowType]flow.Type{
		datapathv1.FlowType_FLOW_TYPE_DROP: flow.Drop, datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT: flow.PolicyVerdict,
		datapathv1.FlowType_FLOW_TYPE_CONNECTION_CLOSED: flow.Closed, datapathv1.FlowType_FLOW_TYPE_DNS: flow.DNS,
	}
)

// Verdict converts a verdict.
func Verdict(v flow.Verdict) datapathv1.Verdict {
	for p, o := range verdicts {
		if o == v {
			return p
		}
	}
	return datapathv1.Verdict_VERDICT_UNSPECIFIED
}

// Type converts the type of an event. A repair has none.
func Type(t flow.Type) datapathv1.FlowType {
	for p, o := range types {
		if o == t {
			return p
		}
	}
	return datapathv1.FlowType_FLOW_TYPE_UNSPECIFIED
}

// EventOf converts an event to what filters look at: the fields that no criterion asks for are not set.
func EventOf(m *datapathv1.ObserveResponse) flow.Event {
	if r := m.GetRepair(); r != nil {
		return flow.Event{
			Type: flow.Repair, Time: r.GetTime().AsTime(), SourceIdentity: r.GetIdentity(),
			From: endOf(r.GetOwner(), r.GetPod(), r.GetEndpointIndex()),
		}
	}
	f := m.GetFlow()
	e := flow.Event{
		Type: types[f.GetType()], Time: f.GetTime().AsTime(), Reason: uint32(f.GetReason()),
		Egress: f.GetDirection() == netv1.Direction_DIRECTION_EGRESS, Verdict: verdicts[f.GetVerdict()],
		Service: f.GetService(), Protocol: uint8(f.GetProtocol()), TCPFlags: uint8(f.GetTcpFlags()),
		SourceIdentity: f.GetSource().GetIdentity(), DestinationIdentity: f.GetDestination().GetIdentity(),
		Reply:       f.GetReply(),
		From:        endOf(f.GetSource().GetOwner(), f.GetSource().GetPod(), f.GetSource().GetEndpointIndex()),
		To:          endOf(f.GetDestination().GetOwner(), f.GetDestination().GetPod(), f.GetDestination().GetEndpointIndex()),
		Source:      addressOf(f.GetSource().GetAddress(), f.GetSource().GetPort()),
		Destination: addressOf(f.GetDestination().GetAddress(), f.GetDestination().GetPort()),
		Original:    addressOf(f.GetOriginalDestinationAddress(), f.GetOriginalDestinationPort()),
	}
	return e
}

func endOf(owner *workloadv1.Owner, pod *workloadv1.PodReference, index uint32) flow.End {
	e := flow.End{Slot: uint16(index)}
	if owner != nil {
		e.Owner = wire.OwnerOf(owner)
	}
	if pod != nil {
		e.Pod = wire.PodOf(pod)
	}
	return e
}

// addressOf returns an address and port; invalid without an address.
func addressOf(text string, port uint32) netip.AddrPort {
	a, err := netip.ParseAddr(text)
	if err != nil {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(a, uint16(port))
}
