// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package hubbleflow converts the events of the datapath to the messages of Hubble's API. docs/hubble.md lists the
// fields and where their content comes from.
package hubbleflow

import (
	"slices"
	"strings"

	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
)

// Types of events, as Hubble numbers them. Hubble's filters and printers use these numbers.
const (
	TypeDrop          = 1
	TypeTrace         = 4
	TypePolicyVerdict = 5
	TypeAccessLog     = 129 // a message that a proxy has evaluated
)

// EtherTypes of IP.
const (
	etherIPv4 = 0x0800
	etherIPv6 = 0x86dd
)

// namespaceKey is the key of the label with a pod's namespace.
const namespaceKey = "io.kubernetes.pod.namespace"

// Converter converts events. Its fields are added to each flow, to describe this process.
type Converter struct {
	// Version is the version of the emitter, without a leading "v".
	Version string
}

// Flow converts an event of the datapath.
func (c Converter) Flow(f *datapathv1.Flow) *flow.Flow {
	out := Brief(f)
	out.Time, out.Uuid, out.NodeName, out.Type = f.GetTime(), f.GetUuid(), f.GetNodeName(), flow.FlowType_L3_L4
	if out.GetL7() != nil {
		out.Type = flow.FlowType_L7
	}
	out.Emitter = &flow.Emitter{Name: "Sluice", Version: c.Version}
	out.Summary = summary(f) //nolint:staticcheck // the hubble CLI prints it
	AddLabels(out, f)
	if f.GetSourceMac() != "" && f.GetEthertype() != 0 {
		out.Ethernet = &flow.Ethernet{Source: f.GetSourceMac()}
	}
	if f.GetInterfaceIndex() != 0 {
		out.Interface = &flow.NetworkInterface{Index: f.GetInterfaceIndex()}
	}
	if s := service(f.GetService()); s != nil {
		if f.GetReply() {
			out.SourceService = s
		} else {
			out.DestinationService = s
		}
	}
	out.EgressAllowedBy, out.EgressDeniedBy = policies(f.GetEgress())
	out.IngressAllowedBy, out.IngressDeniedBy = policies(f.GetIngress())
	out.Extensions = extensions(f)
	return out
}

// Brief converts only the fields of an event that the metrics and the index of the history need. It omits labels and
// texts that must be composed. It is called for every event, while Flow is called only for events that are read.
func Brief(f *datapathv1.Flow) *flow.Flow {
	out := &flow.Flow{
		Verdict:     verdicts[f.GetVerdict()],
		Source:      endpoint(f.GetSource()),
		Destination: endpoint(f.GetDestination()),
		IP:          ip(f),
		L4:          l4(f),
		L7:          layer7(f.GetDns()),
		EventType:   &flow.CiliumEventType{},
	}
	switch f.GetDirection() {
	case netv1.Direction_DIRECTION_EGRESS:
		out.TrafficDirection = flow.TrafficDirection_EGRESS
	case netv1.Direction_DIRECTION_INGRESS:
		out.TrafficDirection = flow.TrafficDirection_INGRESS
	}
	// The direction of a packet is unknown if the packet was dropped before its connection was looked up.
	known := f.GetReply() || f.GetEgress() != nil || f.GetIngress() != nil || f.GetDns() != nil
	if known || f.GetVerdict() != datapathv1.Verdict_VERDICT_DROPPED {
		out.IsReply = wrapperspb.Bool(f.GetReply())
		out.Reply = f.GetReply() //nolint:staticcheck // earlier clients read it
	}
	switch f.GetType() {
	case datapathv1.FlowType_FLOW_TYPE_DROP:
		out.EventType.Type = TypeDrop
	case datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT:
		out.EventType.Type = TypePolicyVerdict
	case datapathv1.FlowType_FLOW_TYPE_CONNECTION_CLOSED:
		out.EventType.Type = TypeTrace
		out.TraceObservationPoint = observationPoint(f)
		out.EventType.SubType = int32(out.TraceObservationPoint)
	}
	if f.GetDns() != nil { // a DNS message is not dropped by an eBPF program
		out.EventType.Type = TypeAccessLog
		return out
	}
	if f.GetVerdict() == datapathv1.Verdict_VERDICT_DROPPED {
		out.DropReasonDesc = dropReason(f)
		out.DropReason = uint32(out.DropReasonDesc) //nolint:staticcheck // earlier clients read it
		if f.GetType() == datapathv1.FlowType_FLOW_TYPE_DROP {
			out.EventType.SubType = int32(out.DropReasonDesc)
		}
	}
	return out
}

var verdicts = map[datapathv1.Verdict]flow.Verdict{
	datapathv1.Verdict_VERDICT_FORWARDED:  flow.Verdict_FORWARDED,
	datapathv1.Verdict_VERDICT_DROPPED:    flow.Verdict_DROPPED,
	datapathv1.Verdict_VERDICT_AUDITED:    flow.Verdict_AUDIT,
	datapathv1.Verdict_VERDICT_REDIRECTED: flow.Verdict_REDIRECTED,
}

// observationPoint returns where the packet was seen: at the device of the endpoint, either on the way to or from the
// endpoint.
func observationPoint(f *datapathv1.Flow) flow.TraceObservationPoint {
	if f.GetDirection() == netv1.Direction_DIRECTION_INGRESS {
		return flow.TraceObservationPoint_TO_ENDPOINT
	}
	return flow.TraceObservationPoint_FROM_ENDPOINT
}

func endpoint(e *datapathv1.FlowEnd) *flow.Endpoint {
	out := &flow.Endpoint{
		ID: e.GetEndpointIndex(), Identity: e.GetIdentity(),
		Namespace: e.GetPod().GetNamespace(), PodName: e.GetPod().GetName(),
	}
	if out.Namespace == "" { // for a pod of another node, the namespace is in its labels
		out.Namespace = labelOf(e.GetLabels(), namespaceKey)
	}
	return out
}

// AddLabels adds the labels of both ends of an event to a flow.
func AddLabels(to *flow.Flow, f *datapathv1.Flow) {
	to.Source.Labels, to.Destination.Labels = labels(f.GetSource()), labels(f.GetDestination())
}

// labels returns the labels of an end as texts, sorted.
func labels(e *datapathv1.FlowEnd) (texts []string) {
	for _, l := range e.GetLabels() {
		text := l.GetSource() + ":" + l.GetKey()
		if l.GetValue() != "" {
			text += "=" + l.GetValue()
		}
		texts = append(texts, text)
	}
	slices.Sort(texts)
	return texts
}

func ip(f *datapathv1.Flow) *flow.IP {
	out := &flow.IP{Source: f.GetSource().GetAddress(), Destination: f.GetDestination().GetAddress()}
	switch f.GetEthertype() {
	case etherIPv4:
		out.IpVersion = flow.IPVersion_IPv4
	case etherIPv6:
		out.IpVersion = flow.IPVersion_IPv6
	default:
		if out.Source == "" && out.Destination == "" {
			return nil
		}
		out.IpVersion = flow.IPVersion_IPv4
		if strings.Contains(out.Source+out.Destination, ":") {
			out.IpVersion = flow.IPVersion_IPv6
		}
	}
	return out
}

func l4(f *datapathv1.Flow) *flow.Layer4 {
	from, to := f.GetSource().GetPort(), f.GetDestination().GetPort()
	switch f.GetProtocol() {
	case netv1.Protocol_PROTOCOL_TCP:
		return &flow.Layer4{Protocol: &flow.Layer4_TCP{TCP: &flow.TCP{
			SourcePort: from, DestinationPort: to, Flags: tcpFlags(f.GetTcpFlags()),
		}}}
	case netv1.Protocol_PROTOCOL_UDP:
		return &flow.Layer4{Protocol: &flow.Layer4_UDP{UDP: &flow.UDP{SourcePort: from, DestinationPort: to}}}
	case netv1.Protocol_PROTOCOL_SCTP:
		return &flow.Layer4{Protocol: &flow.Layer4_SCTP{SCTP: &flow.SCTP{SourcePort: from, DestinationPort: to}}}
	case netv1.Protocol_PROTOCOL_ICMP:
		return &flow.Layer4{Protocol: &flow.Layer4_ICMPv4{ICMPv4: &flow.ICMPv4{
			Type: f.GetIcmp().GetType(), Code: f.GetIcmp().GetCode(),
		}}}
	case netv1.Protocol_PROTOCOL_ICMPV6:
		return &flow.Layer4{Protocol: &flow.Layer4_ICMPv6{ICMPv6: &flow.ICMPv6{
			Type: f.GetIcmp().GetType(), Code: f.GetIcmp().GetCode(),
		}}}
	}
	return nil
}

func tcpFlags(bits uint32) *flow.TCPFlags {
	return &flow.TCPFlags{
		FIN: bits&0x01 != 0, SYN: bits&0x02 != 0, RST: bits&0x04 != 0, PSH: bits&0x08 != 0,
		ACK: bits&0x10 != 0, URG: bits&0x20 != 0, ECE: bits&0x40 != 0, CWR: bits&0x80 != 0,
	}
}

// service parses "shop/web:http". A port name contains no colon.
func service(text string) *flow.Service {
	namespace, name, ok := strings.Cut(text, "/")
	if !ok {
		return nil
	}
	if i := strings.LastIndexByte(name, ':'); i >= 0 {
		name = name[:i]
	}
	return &flow.Service{Namespace: namespace, Name: name}
}

// policies returns the policies that allowed and the policies that denied the connection on one side. A verdict
// without a rule has no policies.
func policies(v *datapathv1.SideVerdict) (allowed, denied []*flow.Policy) {
	var found []*flow.Policy
	for _, source := range v.GetRuleSources() {
		p := policy(source)
		if p == nil || slices.ContainsFunc(found, func(q *flow.Policy) bool {
			return q.GetKind() == p.GetKind() && q.GetNamespace() == p.GetNamespace() && q.GetName() == p.GetName()
		}) {
			continue
		}
		p.Revision = v.GetRevision()
		found = append(found, p)
	}
	switch v.GetVerdict() {
	case datapathv1.Verdict_VERDICT_DROPPED, datapathv1.Verdict_VERDICT_AUDITED:
		return nil, found
	}
	return found, nil
}

// policy parses the source location of a rule, such as "NetworkPolicy shop/web spec.ingress[0]".
func policy(source string) *flow.Policy {
	fields := strings.Fields(source)
	if len(fields) < 2 {
		return nil
	}
	p := &flow.Policy{Kind: fields[0]}
	namespace, name, namespaced := strings.Cut(fields[1], "/")
	if !namespaced {
		namespace, name = "", fields[1]
	}
	p.Namespace, p.Name = namespace, name
	return p
}

// extensions returns the data of an event for which Hubble's flow has no field. It is a Struct, because the hubble
// CLI cannot print unknown message types.
func extensions(f *datapathv1.Flow) *anypb.Any {
	fields := make(map[string]*structpb.Value)
	set := func(key, value string) {
		if value != "" {
			fields[key] = structpb.NewStringValue(value)
		}
	}
	set("reason", ReasonName(f.GetReason()))
	set("originalDestination", f.GetOriginalDestinationAddress())
	if port := f.GetOriginalDestinationPort(); port != 0 {
		fields["originalDestinationPort"] = structpb.NewNumberValue(float64(port))
	}
	set("service", f.GetService())
	set("sourceNode", f.GetSource().GetNodeName())
	set("destinationNode", f.GetDestination().GetNodeName())
	for key, side := range map[string]*datapathv1.SideVerdict{
		"egressRules": f.GetEgress(), "ingressRules": f.GetIngress(),
	} {
		if sources := side.GetRuleSources(); len(sources) > 0 {
			list := &structpb.ListValue{}
			for _, s := range sources {
				list.Values = append(list.Values, structpb.NewStringValue(s))
			}
			fields[key] = structpb.NewListValue(list)
		}
	}
	if f.GetType() == datapathv1.FlowType_FLOW_TYPE_CONNECTION_CLOSED {
		fields["connectionClosed"] = structpb.NewBoolValue(true)
	}
	if len(fields) == 0 {
		return nil
	}
	out, err := anypb.New(&structpb.Struct{Fields: fields})
	if err != nil { // only if a text is not UTF-8, and gRPC would have refused such an event
		return nil
	}
	return out
}

// ReasonName returns the name of a reason in Sluice's commands and metrics, such as "policy-denied".
func ReasonName(r datapathv1.Reason) string {
	if r == datapathv1.Reason_REASON_UNSPECIFIED {
		return ""
	}
	return strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(r.String(), "REASON_"), "_", "-"))
}

// Initiator returns the end that opened the connection, and the other end.
func Initiator(f *datapathv1.Flow) (began, other *datapathv1.FlowEnd) {
	if f.GetReply() {
		return f.GetDestination(), f.GetSource()
	}
	return f.GetSource(), f.GetDestination()
}

// labelOf returns the value of the first label with a key.
func labelOf(labels []*workloadv1.Label, key string) string {
	for _, l := range labels {
		if l.GetKey() == key {
			return l.GetValue()
		}
	}
	return ""
}
