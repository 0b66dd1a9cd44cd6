// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package filter

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
)

// denied returns a flow that has every field which flows of Sluice can have.
func denied() *flow.Flow {
	return &flow.Flow{
		Uuid: "u1", NodeName: "node-1", Verdict: flow.Verdict_DROPPED, DropReasonDesc: flow.DropReason_POLICY_DENIED,
		IP: &flow.IP{Source: "10.244.0.4", Destination: "10.244.1.2", IpVersion: flow.IPVersion_IPv4},
		L4: &flow.Layer4{Protocol: &flow.Layer4_TCP{TCP: &flow.TCP{
			SourcePort: 40000, DestinationPort: 8080, Flags: &flow.TCPFlags{SYN: true, ACK: true},
		}}},
		Source: &flow.Endpoint{
			ID: 3, Identity: 19362, Namespace: "shop", PodName: "client-1", Labels: []string{"k8s:app=client", "cni:tier=front"},
		},
		Destination: &flow.Endpoint{Identity: 23883, Namespace: "default", PodName: "db-0", Labels: []string{"k8s:app=db"}},
		EventType:   &flow.CiliumEventType{Type: 1, SubType: 133}, TrafficDirection: flow.TrafficDirection_INGRESS,
		Interface: &flow.NetworkInterface{Index: 7}, IsReply: wrapperspb.Bool(false),
		DestinationService: &flow.Service{Namespace: "default", Name: "db"},
	}
}

// list is a list of filters.
type list = []*flow.FlowFilter

// cases contains, for each field, filters that match denied() and filters that do not match it.
var cases = map[string]struct{ match, differ []*flow.FlowFilter }{
	"uuid": {
		list{{Uuid: []string{"u0", "u1"}}}, list{{Uuid: []string{"u2"}}},
	},
	"source_ip": {
		list{{SourceIp: []string{"10.244.0.4"}}, {SourceIp: []string{"fd00::/8", "10.244.0.0/24"}}},
		list{{SourceIp: []string{"10.244.0.5"}}, {SourceIp: []string{"10.244.1.0/24"}}},
	},
	"destination_ip": {
		list{{DestinationIp: []string{"10.244.1.2"}}}, list{{DestinationIp: []string{"10.244.0.4"}}},
	},
	"source_ip_xlated": {nil, list{{SourceIpXlated: []string{"10.244.0.4"}}}},
	"source_pod": {
		list{{SourcePod: []string{"shop/client"}}, {SourcePod: []string{"shop/"}}, {SourcePod: []string{"/cl"}}},
		list{{SourcePod: []string{"client"}}, {SourcePod: []string{"data/"}}, {SourcePod: []string{"shop/server"}}},
	},
	"destination_pod": {
		list{{DestinationPod: []string{"db"}}}, list{{DestinationPod: []string{"shop/db"}}},
	},
	"source_fqdn":      {nil, list{{SourceFqdn: []string{"*.example.com"}}}},
	"destination_fqdn": {nil, list{{DestinationFqdn: []string{"*"}}}},
	"source_label": {
		list{
			{SourceLabel: []string{"app=client"}},
			{SourceLabel: []string{"k8s:app in (server, client), cni:tier"}},
			{SourceLabel: []string{"!k8s:tier"}},
			{SourceLabel: []string{"app!=server"}},
			{SourceLabel: []string{"any:app==client"}},
			{SourceLabel: []string{"tier notin (back)"}},
		},
		list{
			{SourceLabel: []string{"app=server"}},
			{SourceLabel: []string{"cni:app"}},
			{SourceLabel: []string{"!app"}},
			{SourceLabel: []string{"app notin (client)"}},
			{SourceLabel: []string{"app, missing"}},
		},
	},
	"destination_label": {
		list{{DestinationLabel: []string{"app=db"}}}, list{{DestinationLabel: []string{"app=client"}}},
	},
	"node_labels":    {nil, list{{NodeLabels: []string{"zone=a"}}}},
	"source_service": {nil, list{{SourceService: []string{"default/db"}}}},
	"destination_service": {
		list{{DestinationService: []string{"default/db"}}}, list{{DestinationService: []string{"shop/db"}}},
	},
	"source_workload":          {nil, list{{SourceWorkload: []*flow.Workload{{Kind: "Deployment"}}}}},
	"destination_workload":     {nil, list{{DestinationWorkload: []*flow.Workload{{Name: "db"}}}}},
	"source_cluster_name":      {nil, list{{SourceClusterName: []string{"east"}}}},
	"destination_cluster_name": {nil, list{{DestinationClusterName: []string{"east"}}}},
	"traffic_direction": {
		list{{TrafficDirection: []flow.TrafficDirection{flow.TrafficDirection_INGRESS}}},
		list{{TrafficDirection: []flow.TrafficDirection{flow.TrafficDirection_EGRESS}}},
	},
	"verdict": {
		list{{Verdict: []flow.Verdict{flow.Verdict_FORWARDED, flow.Verdict_DROPPED}}},
		list{{Verdict: []flow.Verdict{flow.Verdict_AUDIT}}},
	},
	"drop_reason_desc": {
		list{{DropReasonDesc: []flow.DropReason{flow.DropReason_POLICY_DENIED}}},
		list{{DropReasonDesc: []flow.DropReason{flow.DropReason_POLICY_DENY}}},
	},
	"interface": {
		list{{Interface: []*flow.NetworkInterface{{Index: 7}}}},
		list{{Interface: []*flow.NetworkInterface{{Index: 8}, {Name: "eth0"}}}},
	},
	"event_type": {
		list{
			{EventType: []*flow.EventTypeFilter{{Type: 1}}},
			{EventType: []*flow.EventTypeFilter{{MatchSubType: true, SubType: 133}}},
		},
		list{
			{EventType: []*flow.EventTypeFilter{{Type: 5}}}, {EventType: []*flow.EventTypeFilter{{Type: 1, MatchSubType: true}}},
		},
	},
	"http_status_code": {nil, list{{HttpStatusCode: []string{"5+"}}}},
	"protocol": {
		list{{Protocol: []string{"udp", "TCP"}}},
		list{{Protocol: []string{"icmp"}}, {Protocol: []string{"http"}}},
	},
	"source_port": {
		list{{SourcePort: []string{"40000"}}}, list{{SourcePort: []string{"8080"}}},
	},
	"destination_port": {
		list{{DestinationPort: []string{"8080"}}}, list{{DestinationPort: []string{"40000"}}},
	},
	"reply": {
		list{{Reply: []bool{false}}}, list{{Reply: []bool{true}}},
	},
	"dns_query": {nil, list{{DnsQuery: []string{".*"}}}},
	"source_identity": {
		list{{SourceIdentity: []uint32{19362}}}, list{{SourceIdentity: []uint32{23883}}},
	},
	"destination_identity": {
		list{{DestinationIdentity: []uint32{23883}}}, list{{DestinationIdentity: []uint32{19362}}},
	},
	"http_method": {nil, list{{HttpMethod: []string{"GET"}}}},
	"http_path":   {nil, list{{HttpPath: []string{"/"}}}},
	"http_url":    {nil, list{{HttpUrl: []string{".*"}}}},
	"http_header": {nil, list{{HttpHeader: []*flow.HTTPHeader{{Key: "a"}}}}},
	"tcp_flags": {
		list{{TcpFlags: []*flow.TCPFlags{{SYN: true}}}, {TcpFlags: []*flow.TCPFlags{{RST: true}, {ACK: true}}}},
		list{{TcpFlags: []*flow.TCPFlags{{SYN: true, FIN: true}}}},
	},
	"node_name": {
		list{{NodeName: []string{"node-*"}}, {NodeName: []string{"default/"}}, {NodeName: []string{"default/node-1"}}},
		list{{NodeName: []string{"node"}}, {NodeName: []string{"east/node-1"}}},
	},
	"ip_version": {
		list{{IpVersion: []flow.IPVersion{flow.IPVersion_IPv4}}},
		list{{IpVersion: []flow.IPVersion{flow.IPVersion_IPv6}}},
	},
	"trace_id":    {nil, list{{TraceId: []string{"1"}}}},
	"ip_trace_id": {nil, list{{IpTraceId: []uint64{1}}}},
	"encrypted": {
		list{{Encrypted: []bool{false}}}, list{{Encrypted: []bool{true}}},
	},
}

func build(t *testing.T, allow, deny []*flow.FlowFilter) *Filter {
	t.Helper()
	f, err := New(allow, deny)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestEveryFieldSelects: every field of a filter has an effect. A filter with an ignored field would let too many
// flows pass.
func TestEveryFieldSelects(t *testing.T) {
	fields := (&flow.FlowFilter{}).ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		name := string(fields.Get(i).Name())
		c, ok := cases[name]
		if !ok && name != "experimental" {
			t.Errorf("no case for the field %s", name)
		}
		for _, x := range c.match {
			if !build(t, list{x}, nil).Match(denied()) {
				t.Errorf("%v does not match", x)
			}
			if build(t, nil, list{x}).Match(denied()) {
				t.Errorf("denied %v: the flow passes", x)
			}
		}
		for _, x := range c.differ {
			if build(t, list{x}, nil).Match(denied()) {
				t.Errorf("%v matches", x)
			}
		}
	}
}

// TestListsAreAlternativesAndFieldsAreConditions: as in Hubble, one filter of a list must match, and all fields of a
// filter must match.
func TestListsAreAlternativesAndFieldsAreConditions(t *testing.T) {
	yes := &flow.FlowFilter{SourcePort: []string{"40000"}}
	no := &flow.FlowFilter{SourcePort: []string{"1"}}
	both := &flow.FlowFilter{SourcePort: []string{"40000"}, DestinationPort: []string{"1"}}
	for _, c := range []struct {
		allow, deny []*flow.FlowFilter
		want        bool
	}{
		{nil, nil, true},
		{list{no, yes}, nil, true},
		{list{both}, nil, false},
		{list{yes}, list{yes}, false},
		{nil, list{both, no}, true},
		{list{{}}, nil, true},
	} {
		if got := build(t, c.allow, c.deny).Match(denied()); got != c.want {
			t.Errorf("allow %v, deny %v: %t, want %t", c.allow, c.deny, got, c.want)
		}
	}
}

// TestInvalidValuesAreRefusedWithTheField: invalid values, too many values and values that are too long are refused.
// The error names the field.
func TestInvalidValuesAreRefusedWithTheField(t *testing.T) {
	for field, x := range map[string]*flow.FlowFilter{
		"source_ip":                   {SourceIp: []string{"10.244.0"}},
		"destination_ip":              {DestinationIp: []string{"10.244.0.0/33"}},
		"source_pod":                  {SourcePod: []string{""}},
		"source_port":                 {SourcePort: []string{"65536"}},
		"protocol":                    {Protocol: []string{"ospf"}},
		"source_label":                {SourceLabel: []string{"app in server"}},
		"destination_label":           {DestinationLabel: []string{"app in (a"}},
		"node_name":                   {NodeName: []string{"a/b/c"}},
		"source_fqdn":                 {SourceFqdn: []string{""}},
		"dns_query":                   {DnsQuery: []string{"("}},
		"http_status_code":            {HttpStatusCode: []string{"600"}},
		"source_cluster_name":         {SourceClusterName: []string{""}},
		"uuid":                        {Uuid: slices.Repeat([]string{"u"}, maxValues+1)},
		"http_url":                    {HttpUrl: []string{strings.Repeat("a", maxPattern+1)}},
		"experimental.cel_expression": {Experimental: &flow.FlowFilter_Experimental{CelExpression: []string{"true"}}},
	} {
		_, err := New(nil, list{{}, x})
		var e *Error
		if !errors.As(err, &e) || e.Field != "blacklist[1]."+field {
			t.Errorf("%s: %v", field, err)
		}
		if errors.Is(err, ErrUnsupported) != strings.HasPrefix(field, "experimental") {
			t.Errorf("%s: %v", field, err)
		}
	}
	if _, err := New(slices.Repeat(list{{}}, maxFilters+1), nil); err == nil {
		t.Errorf("%d filters were accepted", maxFilters+1)
	}
	// Each field is within its limits.
	for what, x := range map[string]*flow.FlowFilter{
		"many values":   {Uuid: slices.Repeat([]string{"u"}, maxValues)},
		"long values":   {NodeName: slices.Repeat([]string{strings.Repeat("*", maxPattern)}, 10)},
		"many messages": {TcpFlags: slices.Repeat([]*flow.TCPFlags{{SYN: true}}, maxValues)},
	} {
		if _, err := New(list{x}, nil); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if _, err := New(slices.Repeat(list{x}, 5), nil); err == nil || !strings.Contains(err.Error(), "whitelist") {
			t.Errorf("%s, five times: %v", what, err)
		}
	}
	// This expression would compile to more than 100 MiB.
	long := list{{HttpUrl: []string{"(" + strings.Repeat("a", maxPattern-10) + "){1000}"}}}
	if before := testing.AllocsPerRun(1, func() { _, _ = New(long, nil) }); before > 10_000 {
		t.Errorf("a regular expression took %v allocations", before)
	}
}
