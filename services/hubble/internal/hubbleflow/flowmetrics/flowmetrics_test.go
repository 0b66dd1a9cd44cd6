// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package flowmetrics

import (
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
)

func tcp(port uint32, flags *flow.TCPFlags) *flow.Flow {
	return &flow.Flow{
		Verdict: flow.Verdict_FORWARDED, IsReply: wrapperspb.Bool(false), TrafficDirection: flow.TrafficDirection_EGRESS,
		IP:        &flow.IP{Source: "10.0.0.1", Destination: "10.0.0.2", IpVersion: flow.IPVersion_IPv4},
		L4:        &flow.Layer4{Protocol: &flow.Layer4_TCP{TCP: &flow.TCP{DestinationPort: port, Flags: flags}}},
		EventType: &flow.CiliumEventType{Type: 5},
		Source:    &flow.Endpoint{Namespace: "shop", PodName: "client-1", Labels: []string{"k8s:app=client"}},
	}
}

// TestMetricsHaveNamesAndLabelsOfHubble: the metrics have the names and labels that dashboards for Hubble query.
func TestMetricsHaveNamesAndLabelsOfHubble(t *testing.T) {
	m := New(Options{
		Names: Names, Labels: []string{"traffic_direction", "source_namespace", "source_app"}, MaxSeries: 10_000,
	})
	m.Count("shop", tcp(80, &flow.TCPFlags{SYN: true}))
	m.Count("shop", tcp(80, &flow.TCPFlags{SYN: true, ACK: true}))
	reply := tcp(40000, &flow.TCPFlags{FIN: true})
	reply.IsReply = wrapperspb.Bool(true)
	reply.EventType = &flow.CiliumEventType{Type: 4}
	reply.TraceObservationPoint = flow.TraceObservationPoint_TO_ENDPOINT
	m.Count("shop", reply)
	dropped := tcp(81, &flow.TCPFlags{SYN: true})
	dropped.Verdict, dropped.DropReasonDesc = flow.Verdict_DROPPED, flow.DropReason_POLICY_DENIED
	dropped.EventType = &flow.CiliumEventType{Type: 1}
	m.Count("shop", dropped)
	m.Count("shop", &flow.Flow{L4: &flow.Layer4{Protocol: &flow.Layer4_ICMPv6{ICMPv6: &flow.ICMPv6{Type: 128}}}})
	m.CountLost(flow.LostEventSource_PERF_EVENT_RING_BUFFER, 7)
	const context = `source_app="client",source_namespace="shop"`
	want := `
# HELP hubble_drop_total Dropped packets that were reported, by reason.
# TYPE hubble_drop_total counter
hubble_drop_total{protocol="TCP",reason="POLICY_DENIED",` + context + `,traffic_direction="egress"} 1
# HELP hubble_icmp_total Flows of ICMP, by type.
# TYPE hubble_icmp_total counter
hubble_icmp_total{family="IPv6",source_app="",source_namespace="",traffic_direction="unknown",type="EchoRequest"} 1
# HELP hubble_lost_events_total Events that are missing, by where they were lost.
# TYPE hubble_lost_events_total counter
hubble_lost_events_total{source="perf_event_ring_buffer"} 7
# HELP hubble_port_distribution_total Forwarded flows that are no replies, by destination port.
# TYPE hubble_port_distribution_total counter
hubble_port_distribution_total{port="80",protocol="TCP",` + context + `,traffic_direction="egress"} 2
# HELP hubble_tcp_flags_total Flags of forwarded TCP flows.
# TYPE hubble_tcp_flags_total counter
hubble_tcp_flags_total{family="IPv4",flag="FIN",` + context + `,traffic_direction="egress"} 1
hubble_tcp_flags_total{family="IPv4",flag="SYN",` + context + `,traffic_direction="egress"} 1
hubble_tcp_flags_total{family="IPv4",flag="SYN-ACK",` + context + `,traffic_direction="egress"} 1
`
	if err := testutil.CollectAndCompare(m, strings.NewReader(want), "hubble_drop_total", "hubble_icmp_total",
		"hubble_lost_events_total", "hubble_port_distribution_total", "hubble_tcp_flags_total"); err != nil {
		t.Error(err)
	}
	for _, c := range [][]string{
		{"TCP", "PolicyVerdict", "", "FORWARDED", "shop", "client", "egress"},
		{"TCP", "Trace", "to-endpoint", "FORWARDED", "shop", "client", "egress"},
		{"TCP", "Drop", "", "DROPPED", "shop", "client", "egress"},
	} {
		want := 1.0
		if c[1] == "PolicyVerdict" {
			want = 2
		}
		if got := testutil.ToFloat64(m.flows.WithLabelValues(c...)); got != want {
			t.Errorf("hubble_flows_processed_total%q is %v, want %v", c, got, want)
		}
	}
}

// TestSeriesAreBounded: a scan of all ports creates only a limited number of series. Flows of existing series are
// still counted.
func TestSeriesAreBounded(t *testing.T) {
	m := New(Options{Names: []string{"port-distribution"}, MaxSeries: 200})
	const kept = 100 + 1 // the half for all tenants, and the guarantee
	for range 2 {
		for port := range uint32(200) {
			m.Count("shop", tcp(port, nil))
		}
	}
	if got := testutil.CollectAndCount(m, "hubble_port_distribution_total"); got != kept {
		t.Errorf("%d series, want %d", got, kept)
	}
	if got := testutil.ToFloat64(m.leftOut); got != 2*(200-kept) {
		t.Errorf("%v increments were left out, want %d", got, 2*(200-kept))
	}
	if got := testutil.ToFloat64(m.ports.WithLabelValues("TCP", "9")); got != 2 {
		t.Errorf("port 9 has %v flows, want 2", got)
	}
}

// TestTenantThatScansPortsLeavesSeriesToOthers: one tenant scans ports. Other tenants still get their guaranteed
// series, and all series together stay within the limit.
func TestTenantThatScansPortsLeavesSeriesToOthers(t *testing.T) {
	const most = 1280
	m := New(Options{Names: []string{"port-distribution"}, MaxSeries: most})
	for port := range uint32(2 * most) {
		m.Count("scanner", tcp(port, nil))
	}
	for tenant := range uint32(2 * maxTenants) {
		m.Count(fmt.Sprint(tenant), tcp(10_000+tenant, nil))
	}
	if got := testutil.ToFloat64(m.ports.WithLabelValues("TCP", "10000")); got != 1 {
		t.Errorf("the first tenant after the scan has %v flows, want 1", got)
	}
	for port := range uint32(2 * most) {
		for tenant := range uint32(2 * maxTenants) {
			m.Count(fmt.Sprint(tenant), tcp(20_000+port, nil))
		}
	}
	if got := testutil.CollectAndCount(m, "hubble_port_distribution_total"); got > most {
		t.Errorf("%d series, at most %d are allowed", got, most)
	}
}

func TestUnknownNamesAreRefused(t *testing.T) {
	for _, o := range []Options{
		{Names: []string{"http"}, MaxSeries: 2 * maxTenants},
		{Labels: []string{"source_workload"}, MaxSeries: 2 * maxTenants},
		{},
	} {
		if err := o.Validate(); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
	if err := (Options{Names: Names, Labels: Labels, MaxSeries: 2 * maxTenants}).Validate(); err != nil {
		t.Error(fmt.Errorf("all names: %w", err))
	}
}

// TestDNSMessagesAreFlowsOfLayer7: DNS messages are counted only as flows of layer 7. Their packets and drops are
// counted with the verdicts on their connections.
func TestDNSMessagesAreFlowsOfLayer7(t *testing.T) {
	m := New(Options{Names: Names, MaxSeries: 100})
	f := &flow.Flow{
		Verdict: flow.Verdict_DROPPED, IsReply: wrapperspb.Bool(false), EventType: &flow.CiliumEventType{Type: 129},
		L4: &flow.Layer4{Protocol: &flow.Layer4_UDP{UDP: &flow.UDP{DestinationPort: 53}}},
		L7: &flow.Layer7{Record: &flow.Layer7_Dns{Dns: &flow.DNS{Query: "a.example."}}},
	}
	m.Count("shop", f)
	f.Verdict = flow.Verdict_FORWARDED
	m.Count("shop", f)
	want := `
# HELP hubble_flows_processed_total Flows, by type and verdict.
# TYPE hubble_flows_processed_total counter
hubble_flows_processed_total{protocol="UDP",subtype="DNS",type="L7",verdict="DROPPED"} 1
hubble_flows_processed_total{protocol="UDP",subtype="DNS",type="L7",verdict="FORWARDED"} 1
`
	if err := testutil.CollectAndCompare(m, strings.NewReader(want), "hubble_flows_processed_total", "hubble_drop_total",
		"hubble_port_distribution_total"); err != nil {
		t.Error(err)
	}
}

// TestDNSMetricsCountAsHubbleDoes: refused queries have the response code "Policy denied", other queries none, and
// answers count their records. The names of Hubble's dashboards are the ones of the module github.com/cilium/cilium.
func TestDNSMetricsCountAsHubbleDoes(t *testing.T) {
	m := New(Options{Names: []string{"dns"}, Labels: []string{"source_namespace"}, MaxSeries: 10_000})
	message := func(verdict flow.Verdict, kind flow.L7FlowType, dns *flow.DNS) *flow.Flow {
		return &flow.Flow{
			Verdict: verdict, Source: &flow.Endpoint{Namespace: "shop"}, EventType: &flow.CiliumEventType{Type: 129},
			L7: &flow.Layer7{Type: kind, Record: &flow.Layer7_Dns{Dns: dns}},
		}
	}
	query := &flow.DNS{Query: "api.example.", Qtypes: []string{"A"}}
	m.Count("shop", message(flow.Verdict_FORWARDED, flow.L7FlowType_REQUEST, query))
	m.Count("shop", message(flow.Verdict_DROPPED, flow.L7FlowType_REQUEST, query))
	m.Count("shop", message(flow.Verdict_FORWARDED, flow.L7FlowType_RESPONSE, &flow.DNS{
		Query: "api.example.", Qtypes: []string{"A"}, Ips: []string{"192.0.2.1", "192.0.2.2"},
		Rrtypes: []string{"CNAME", "A"},
	}))
	m.Count("shop", message(flow.Verdict_FORWARDED, flow.L7FlowType_RESPONSE, &flow.DNS{
		Query: "api.example.", Qtypes: []string{"AAAA"}, Rcode: 3,
	}))
	m.Count("shop", tcp(53, nil)) // no message
	const from = `source_namespace="shop"`
	want := `
# HELP hubble_dns_queries_total DNS queries, by type.
# TYPE hubble_dns_queries_total counter
hubble_dns_queries_total{ips_returned="0",qtypes="A",rcode="",` + from + `} 1
hubble_dns_queries_total{ips_returned="0",qtypes="A",rcode="Policy denied",` + from + `} 1
# HELP hubble_dns_response_types_total Types of records in DNS responses.
# TYPE hubble_dns_response_types_total counter
hubble_dns_response_types_total{qtypes="A",` + from + `,type="A"} 1
hubble_dns_response_types_total{qtypes="A",` + from + `,type="CNAME"} 1
# HELP hubble_dns_responses_total DNS responses, by response code.
# TYPE hubble_dns_responses_total counter
hubble_dns_responses_total{ips_returned="0",qtypes="AAAA",rcode="Non-Existent Domain",` + from + `} 1
hubble_dns_responses_total{ips_returned="2",qtypes="A",rcode="No Error",` + from + `} 1
`
	if err := testutil.CollectAndCompare(m, strings.NewReader(want), "hubble_dns_queries_total",
		"hubble_dns_responses_total", "hubble_dns_response_types_total"); err != nil {
		t.Error(err)
	}
}
