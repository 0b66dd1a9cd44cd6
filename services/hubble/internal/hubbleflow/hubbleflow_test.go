// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hubbleflow

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/sluice-net/sluice/model/shares"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
)

// k8s returns Kubernetes labels for pairs of keys and values.
func k8s(pairs ...string) (labels []*workloadv1.Label) {
	for i := 0; i < len(pairs); i += 2 {
		labels = append(labels, &workloadv1.Label{Source: "k8s", Key: pairs[i], Value: pairs[i+1]})
	}
	return labels
}

// denied returns a packet that the policy of the receiver denied.
func denied() *datapathv1.Flow {
	return &datapathv1.Flow{
		Time: timestamppb.New(time.Unix(1_800_000_000, 5)), Uuid: "01234567-89ab-8def-8000-000000000001", NodeName: "node-1",
		Type: datapathv1.FlowType_FLOW_TYPE_DROP, Verdict: datapathv1.Verdict_VERDICT_DROPPED,
		Reason: datapathv1.Reason_REASON_POLICY_DENIED, Direction: netv1.Direction_DIRECTION_INGRESS,
		Protocol: netv1.Protocol_PROTOCOL_TCP, TcpFlags: 0x02, Ethertype: 0x0800, SourceMac: "02:00:00:00:00:01",
		InterfaceIndex: 7,
		Source: &datapathv1.FlowEnd{
			Address: "10.244.0.4", Port: 40000, Identity: 19362, EndpointIndex: 3,
			Labels: k8s("io.kubernetes.pod.namespace", "shop", "app", "client"),
			Pod:    &workloadv1.PodReference{Namespace: "shop", Name: "client-1", Uid: "u1"},
		},
		Destination: &datapathv1.FlowEnd{
			Address: "10.244.0.2", Port: 8080, Identity: 23883, NodeName: "node-2",
			Labels: k8s("io.kubernetes.pod.namespace", "data", "app", "db"),
		},
		Ingress: &datapathv1.SideVerdict{
			Verdict: datapathv1.Verdict_VERDICT_DROPPED, DecidedBy: netv1.DecidedBy_DECIDED_BY_RULE, Rule: 2, Revision: 12,
			RuleSources: []string{
				"CiliumNetworkPolicy data/db spec.ingressDeny[0]", "CiliumNetworkPolicy data/db spec.ingressDeny[1]",
				"AdminNetworkPolicy all spec.ingress[0]",
			},
		},
		OriginalDestinationAddress: "10.96.0.9", OriginalDestinationPort: 80, Service: "data/db:http",
	}
}

func TestFlowHasWhatTheEventHas(t *testing.T) {
	got := Converter{Version: "1.2.3"}.Flow(denied())
	var extensions structpb.Struct
	if err := got.GetExtensions().UnmarshalTo(&extensions); err != nil {
		t.Fatal(err)
	}
	want := &flow.Flow{
		Time: timestamppb.New(time.Unix(1_800_000_000, 5)), Uuid: "01234567-89ab-8def-8000-000000000001", NodeName: "node-1",
		Emitter: &flow.Emitter{Name: "Sluice", Version: "1.2.3"}, Type: flow.FlowType_L3_L4, Verdict: flow.Verdict_DROPPED,
		DropReason: 181, DropReasonDesc: flow.DropReason_POLICY_DENY, //nolint:staticcheck // earlier clients read it
		Ethernet: &flow.Ethernet{Source: "02:00:00:00:00:01"},
		IP:       &flow.IP{Source: "10.244.0.4", Destination: "10.244.0.2", IpVersion: flow.IPVersion_IPv4},
		L4: &flow.Layer4{Protocol: &flow.Layer4_TCP{TCP: &flow.TCP{
			SourcePort: 40000, DestinationPort: 8080, Flags: &flow.TCPFlags{SYN: true},
		}}},
		Source: &flow.Endpoint{
			ID: 3, Identity: 19362, Namespace: "shop", PodName: "client-1",
			Labels: []string{"k8s:app=client", "k8s:io.kubernetes.pod.namespace=shop"},
		},
		Destination: &flow.Endpoint{
			Identity: 23883, Namespace: "data", Labels: []string{"k8s:app=db", "k8s:io.kubernetes.pod.namespace=data"},
		},
		Interface: &flow.NetworkInterface{Index: 7}, TrafficDirection: flow.TrafficDirection_INGRESS,
		IsReply: wrapperspb.Bool(false), EventType: &flow.CiliumEventType{Type: TypeDrop, SubType: 181},
		DestinationService: &flow.Service{Namespace: "data", Name: "db"},
		IngressDeniedBy: []*flow.Policy{
			{Kind: "CiliumNetworkPolicy", Namespace: "data", Name: "db", Revision: 12},
			{Kind: "AdminNetworkPolicy", Name: "all", Revision: 12},
		},
		Summary: "TCP Flags: SYN", Extensions: got.GetExtensions(), //nolint:staticcheck // the CLI prints it
	}
	if !proto.Equal(got, want) {
		t.Errorf("got  %s\nwant %s", prototext.Format(got), prototext.Format(want))
	}
	fields := extensions.AsMap()
	if fields["reason"] != "policy-denied" || fields["originalDestination"] != "10.96.0.9" ||
		fields["originalDestinationPort"] != 80.0 || fields["service"] != "data/db:http" ||
		fields["destinationNode"] != "node-2" || len(fields["ingressRules"].([]any)) != 3 {
		t.Errorf("the extensions are %v", fields)
	}
}

// TestEveryReasonOfADropHasOneOfHubble: each drop reason of Sluice has one of Hubble, because the CLI prints a drop
// without a reason as "Success".
func TestEveryReasonOfADropHasOneOfHubble(t *testing.T) {
	for number, name := range datapathv1.Reason_name {
		reason := datapathv1.Reason(number)
		if dropped := number >= int32(datapathv1.Reason_REASON_NOT_IP); !dropped {
			if _, ok := dropReasons[reason]; ok {
				t.Errorf("%s is not the reason of a drop", name)
			}
			continue
		}
		f := denied()
		f.Reason, f.Ingress = reason, nil
		got := Converter{}.Flow(f)
		if got.GetDropReasonDesc() == flow.DropReason_DROP_REASON_UNKNOWN {
			t.Errorf("%s has no reason of Hubble", name)
		}
		if got.GetEventType().GetSubType() != int32(got.GetDropReasonDesc()) {
			t.Errorf("%s: the subtype is %d, the reason %d", name, got.GetEventType().GetSubType(), got.GetDropReasonDesc())
		}
	}
	for verdict := range datapathv1.Verdict_name {
		v := datapathv1.Verdict(verdict)
		if (verdicts[v] == flow.Verdict_VERDICT_UNKNOWN) != (v == datapathv1.Verdict_VERDICT_UNSPECIFIED) {
			t.Errorf("%s is %s", v, verdicts[v])
		}
	}
}

// TestIsolationIsNoDenyRule: a drop because no rule allows the packet, and a drop because a deny rule matches, have
// different reasons. The CLI prints "Policy denied" for the former, and "Policy denied by denylist" for the latter.
func TestIsolationIsNoDenyRule(t *testing.T) {
	f := denied()
	f.Ingress.RuleSources = []string{"NetworkPolicy data/db isolation", "NetworkPolicy data/all isolation"}
	if got := (Converter{}).Flow(f).GetDropReasonDesc(); got != flow.DropReason_POLICY_DENIED {
		t.Errorf("isolated: %s", got)
	}
	f.Ingress.RuleSources = append(f.Ingress.RuleSources, "CiliumNetworkPolicy data/db spec.ingressDeny[0]")
	if got := (Converter{}).Flow(f).GetDropReasonDesc(); got != flow.DropReason_POLICY_DENY {
		t.Errorf("isolated, and denied by a rule: %s", got)
	}
}

// TestDirectionOfADropIsUnknownUntilItsConnectionIsLookedUp: a packet that is dropped before its connection is looked
// up has no direction. The CLI prints it with "<>".
func TestDirectionOfADropIsUnknownUntilItsConnectionIsLookedUp(t *testing.T) {
	f := denied()
	f.Ingress = nil
	if got := (Converter{}).Flow(f); got.GetIsReply() != nil {
		t.Errorf("a drop without a verdict of a policy is a reply: %v", got.GetIsReply())
	}
	f.Verdict, f.Type = datapathv1.Verdict_VERDICT_FORWARDED, datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT
	if got := (Converter{}).Flow(f); got.GetIsReply() == nil || got.GetEventType().GetType() != TypePolicyVerdict {
		t.Errorf("a forwarded packet: %s", prototext.Format(got))
	}
	f.Reply, f.Type = true, datapathv1.FlowType_FLOW_TYPE_CONNECTION_CLOSED
	got := Converter{}.Flow(f)
	if !got.GetIsReply().GetValue() || got.GetSourceService().GetName() != "db" || got.GetDestinationService() != nil ||
		got.GetTraceObservationPoint() != flow.TraceObservationPoint_TO_ENDPOINT ||
		got.GetEventType().GetType() != TypeTrace {
		t.Errorf("the end of a connection: %s", prototext.Format(got))
	}
}

func TestSummaryNamesTheProtocol(t *testing.T) {
	for _, c := range []struct {
		f    *datapathv1.Flow
		want string
	}{
		{&datapathv1.Flow{Protocol: netv1.Protocol_PROTOCOL_TCP, TcpFlags: 0x12}, "TCP Flags: SYN, ACK"},
		{&datapathv1.Flow{Protocol: netv1.Protocol_PROTOCOL_UDP}, "UDP"},
		{&datapathv1.Flow{Protocol: netv1.Protocol_PROTOCOL_SCTP}, "SCTP"},
		{
			&datapathv1.Flow{Protocol: netv1.Protocol_PROTOCOL_ICMP, Icmp: &datapathv1.IcmpHeader{Type: 8}},
			"ICMPv4 EchoRequest",
		},
		{
			&datapathv1.Flow{Protocol: netv1.Protocol_PROTOCOL_ICMP, Icmp: &datapathv1.IcmpHeader{Type: 3, Code: 3}},
			"ICMPv4 DestinationUnreachable(Port)",
		},
		{
			&datapathv1.Flow{Protocol: netv1.Protocol_PROTOCOL_ICMPV6, Icmp: &datapathv1.IcmpHeader{Type: 135}},
			"ICMPv6 NeighborSolicitation",
		},
		{&datapathv1.Flow{Ethertype: 0x88cc}, "EtherType 0x88cc"},
		{&datapathv1.Flow{Ethertype: 0x0800, Protocol: 47}, "IP protocol 47"},
	} {
		if got := summary(c.f); got != c.want {
			t.Errorf("%v: %q, want %q", c.f, got, c.want)
		}
	}
}

// TestPartsAreTenantsOfTheBeginner: a flow belongs to the part of the tenant whose pod opened the connection.
func TestPartsAreTenantsOfTheBeginner(t *testing.T) {
	p := Parts{Settings: shares.Settings{}}
	tenant := k8s("io.kubernetes.pod.namespace", "shop", "io.cilium.k8s.namespace.labels.sluice.io/tenant", "acme")
	outside := &datapathv1.FlowEnd{Labels: []*workloadv1.Label{{Source: "reserved", Key: "world"}}}
	shop := &datapathv1.FlowEnd{Labels: k8s("io.kubernetes.pod.namespace", "shop")}
	acme := &datapathv1.FlowEnd{Labels: tenant}
	for _, c := range []struct {
		from, to *datapathv1.FlowEnd
		reply    bool
		want     string
	}{
		{shop, acme, false, "namespace shop"},
		{shop, acme, true, "tenant acme"},
		{acme, outside, false, "tenant acme"},
		{outside, acme, false, "from outside to tenant acme"},
		{acme, outside, true, "from outside to tenant acme"},
		{&datapathv1.FlowEnd{Labels: k8s("io.kubernetes.pod.namespace", "kube-system")}, shop, false, "system"},
		{&datapathv1.FlowEnd{EndpointIndex: 4}, shop, false, "system"},
		{outside, outside, false, "from outside to system"},
	} {
		if got := p.Of(&datapathv1.Flow{Source: c.from, Destination: c.to, Reply: c.reply}); got != c.want {
			t.Errorf("from %v to %v, reply %t: %q, want %q", c.from, c.to, c.reply, got, c.want)
		}
	}
}

// TestDNSMessageIsOfLayer7: a DNS message becomes a layer 7 flow as in Hubble, with the process that has evaluated
// the message.
func TestDNSMessageIsOfLayer7(t *testing.T) {
	f := denied()
	f.Type, f.Reason, f.Ingress = datapathv1.FlowType_FLOW_TYPE_DNS, 0, nil
	f.Protocol, f.TcpFlags, f.Direction = netv1.Protocol_PROTOCOL_UDP, 0, netv1.Direction_DIRECTION_EGRESS
	f.Dns = &datapathv1.DNSMessage{Name: "api.example.com.", QueryType: 28, ResponseCode: 5}
	got := Converter{}.Flow(f)
	want := &flow.Layer7{Type: flow.L7FlowType_REQUEST, Record: &flow.Layer7_Dns{Dns: &flow.DNS{
		Query: "api.example.com.", Qtypes: []string{"AAAA"}, Rcode: 5, ObservationSource: "sluice-dns",
	}}}
	if got.GetType() != flow.FlowType_L7 || got.GetEventType().GetType() != TypeAccessLog ||
		!proto.Equal(got.GetL7(), want) ||
		got.GetVerdict() != flow.Verdict_DROPPED || got.GetDropReasonDesc() != 0 || got.GetIsReply().GetValue() ||
		got.GetIsReply() == nil || got.GetSummary() != "DNS Query api.example.com. AAAA" { //nolint:staticcheck // printed
		t.Errorf("a refused query: %s", prototext.Format(got))
	}
	f.Verdict, f.Reply = datapathv1.Verdict_VERDICT_FORWARDED, true
	f.Source, f.Destination = f.GetDestination(), f.GetSource()
	f.Dns = &datapathv1.DNSMessage{
		Response: true, Name: "api.example.com.", QueryType: 1, Addresses: []string{"192.0.2.1", "192.0.2.2"},
		CnameTargets: []string{"cdn.example."}, TtlSeconds: 30,
	}
	got = Converter{}.Flow(f)
	dns := got.GetL7().GetDns()
	const summary = `DNS Answer "192.0.2.1,192.0.2.2" TTL: 30 CNAMEs: "cdn.example." (sluice-dns api.example.com. A)`
	if got.GetL7().GetType() != flow.L7FlowType_RESPONSE || len(dns.GetIps()) != 2 ||
		dns.GetCnames()[0] != "cdn.example." ||
		dns.GetTtl() != 30 || !got.GetIsReply().GetValue() || got.GetSummary() != summary { //nolint:staticcheck // printed
		t.Errorf("an answer: %s", prototext.Format(got))
	}
	// The client's tenant sees the DNS name, and the server's tenant does not.
	parts := Parts{Settings: shares.Settings{}}
	for namespace, sees := range map[string]bool{"shop": true, "data": false} {
		view := parts.Only(parts.Settings.TenantOf(namespace, ""))
		shown := view.Flow(got)
		text := prototext.Format(shown)
		if shown == nil || (shown.GetL7() != nil) != sees || strings.Contains(text, "api.example.com") != sees {
			t.Errorf("namespace %s sees %s", namespace, text)
		}
	}
	f.Protocol = netv1.Protocol_PROTOCOL_TCP
	if got := (Converter{}).Flow(f).GetL4().GetTCP(); got.GetSourcePort() != f.GetSource().GetPort() {
		t.Errorf("a message over TCP has the ports %v", got)
	}
	f.Dns = &datapathv1.DNSMessage{QueryType: 1, Redacted: true}
	if text := (Converter{}).Flow(f).GetSummary(); text != "DNS Query (redacted) A" { //nolint:staticcheck // printed
		t.Errorf("a redacted query: %s", text)
	}
}
