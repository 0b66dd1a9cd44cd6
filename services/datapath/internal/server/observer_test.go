// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"buf.build/go/protovalidate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/model/flow"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/observe"
)

func TestObserveRefusesWhatNoEventHas(t *testing.T) {
	for want, r := range map[string]*datapathv1.ObserveRequest{
		"prefixes[0]":             {Prefixes: []string{"10.0.0.1"}},
		"source.prefixes[0]":      {Source: &datapathv1.FlowEndCriteria{Prefixes: []string{"x"}}},
		"excluded[0].prefixes[0]": {Excluded: []*datapathv1.FlowCriteria{{Prefixes: []string{"x"}}}},
		"excluded[1]: has no criterion": {Excluded: []*datapathv1.FlowCriteria{
			{Ports: []uint32{1}}, {Source: &datapathv1.FlowEndCriteria{}},
		}},
	} {
		_, err := filterOf(r)
		st := status.Convert(statusOf(err))
		if st.Code() != codes.InvalidArgument || !strings.Contains(st.Message(), want) {
			t.Errorf("%s: %v", want, st)
		}
	}
}

func TestObserveFilterHasEveryCriterion(t *testing.T) {
	f, err := filterOf(&datapathv1.ObserveRequest{
		Owners:     []*workloadv1.Owner{{ContainerId: "a", InterfaceName: "eth0"}},
		Identities: []uint32{300}, Prefixes: []string{"10.0.0.0/8"},
		Reasons:   []datapathv1.Reason{datapathv1.Reason_REASON_NO_ROUTE},
		Direction: netv1.Direction_DIRECTION_INGRESS, Protocols: []netv1.Protocol{netv1.Protocol_PROTOCOL_TCP}, Ports: []uint32{80},
		Services: []*datapathv1.ServiceName{{Namespace: "shop", Name: "web"}},
		Verdicts: []datapathv1.Verdict{datapathv1.Verdict_VERDICT_AUDITED}, Types: []datapathv1.FlowType{datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT},
		Selectors: []*datapathv1.LabelSelector{{Requirements: []*datapathv1.LabelRequirement{
			{Source: "k8s", Key: "app", Operator: datapathv1.LabelOperator_LABEL_OPERATOR_IN, Values: []string{"web", "db"}},
			{Key: "tier", Operator: datapathv1.LabelOperator_LABEL_OPERATOR_EXISTS},
			{Key: "canary", Operator: datapathv1.LabelOperator_LABEL_OPERATOR_NOT_EXISTS},
			{Key: "tier", Operator: datapathv1.LabelOperator_LABEL_OPERATOR_NOT_IN, Values: []string{"back"}},
		}}},
		Pods:   []*datapathv1.PodName{{Namespace: "shop", Name: "web-0"}},
		Source: &datapathv1.FlowEndCriteria{Identities: []uint32{301}, Ports: []uint32{81}},
		Destination: &datapathv1.FlowEndCriteria{
			Prefixes: []string{"10.1.0.0/16"},
			Pods:     []*datapathv1.PodName{{Namespace: "a", Name: "b"}},
		},
		Excluded: []*datapathv1.FlowCriteria{
			{Ports: []uint32{82}},
			{Verdicts: []datapathv1.Verdict{datapathv1.Verdict_VERDICT_FORWARDED}},
		},
		Until: timestamppb.New(time.Unix(9, 0)),
	})
	if err != nil {
		t.Fatal(err)
	}
	if !f.Pods[flow.Pod{Namespace: "shop", Name: "web-0"}] || !f.Source.Identities[301] || !f.Source.Ports[81] ||
		f.Destination.Prefixes[0] != netip.MustParsePrefix("10.1.0.0/16") ||
		!f.Destination.Pods[flow.Pod{Namespace: "a", Name: "b"}] || len(f.Excluded) != 2 || !f.Excluded[0].Ports[82] ||
		!f.Excluded[1].Verdicts[flow.Forwarded] || !f.Until.Equal(time.Unix(9, 0)) {
		t.Errorf("%+v", f)
	}
	if !f.Owners[workload.Owner{ContainerID: "a", Interface: "eth0"}] || !f.Identities[300] ||
		f.Prefixes[0] != netip.MustParsePrefix("10.0.0.0/8") ||
		!f.Reasons[uint32(event.NoRoute)] ||
		f.Egress == nil || *f.Egress || !f.Protocols[6] || !f.Ports[80] || !f.Verdicts[flow.Audited] || !f.Types[flow.PolicyVerdict] ||
		!f.Services["shop/web"] ||
		!reflect.DeepEqual(f.Selectors, []flow.Selector{{
			{Source: "k8s", Key: "app", Values: map[string]bool{"web": true, "db": true}},
			{Key: "tier"},
			{Key: "canary", Not: true},
			{Key: "tier", Values: map[string]bool{"back": true}, Not: true},
		}}) {
		t.Errorf("%+v", f)
	}
}

// TestRulesOfTheProtoFileBoundObserveAndExplain tests the validation rules of the proto file, on which the server
// relies.
func TestRulesOfTheProtoFileBoundObserveAndExplain(t *testing.T) {
	validator, err := protovalidate.New()
	if err != nil {
		t.Fatal(err)
	}
	selector := func(r ...*datapathv1.LabelRequirement) *datapathv1.ObserveRequest {
		return &datapathv1.ObserveRequest{Selectors: []*datapathv1.LabelSelector{{Requirements: r}}}
	}
	const (
		exists = datapathv1.LabelOperator_LABEL_OPERATOR_EXISTS
		notIn  = datapathv1.LabelOperator_LABEL_OPERATOR_NOT_IN
	)
	app := &datapathv1.LabelRequirement{Key: "app", Operator: exists}
	four := "10.0.0.1"
	web := []*datapathv1.ServiceName{{Namespace: "shop", Name: "web"}}
	pod := []*datapathv1.PodName{{Namespace: "shop", Name: "web-0"}}
	for name, m := range map[string]proto.Message{
		"a requirement":        selector(app),
		"the empty value":      selector(&datapathv1.LabelRequirement{Key: "app", Operator: notIn, Values: []string{""}}),
		"as much as is taken":  selector(slices.Repeat([]*datapathv1.LabelRequirement{app}, 16)...),
		"a service":            &datapathv1.ObserveRequest{Services: web},
		"a verdict and a type": &datapathv1.ObserveRequest{Verdicts: []datapathv1.Verdict{1}, Types: []datapathv1.FlowType{1}},
		"an end": &datapathv1.ObserveRequest{Source: &datapathv1.FlowEndCriteria{
			Ports: []uint32{65535},
			Pods:  pod,
		}},
		"what is left out": &datapathv1.ObserveRequest{Excluded: []*datapathv1.FlowCriteria{{Pods: pod}}},
		"the latest":       &datapathv1.ObserveRequest{Last: 4096},
		"an event":         &datapathv1.ObserveRequest{AfterUuid: "01000000-0000-8f00-8000-000000000009"},
		"a connection": &datapathv1.ExplainRequest{
			SourceAddress: four, DestinationAddress: four, Protocol: 255,
			SourcePort: 65535, DestinationPort: 65535,
		},
	} {
		if err := validator.Validate(m); err != nil {
			t.Errorf("%s is refused: %v", name, err)
		}
	}
	for name, m := range map[string]proto.Message{
		"no requirement":  selector(),
		"no prefix":       &datapathv1.ObserveRequest{Prefixes: []string{"x"}},
		"17 requirements": selector(slices.Repeat([]*datapathv1.LabelRequirement{app}, 17)...),
		"65 selectors":    &datapathv1.ObserveRequest{Selectors: slices.Repeat(selector(app).GetSelectors(), 65)},
		"no key":          selector(&datapathv1.LabelRequirement{Operator: exists}),
		"a key too long":  selector(&datapathv1.LabelRequirement{Key: strings.Repeat("k", 349), Operator: exists}),
		"a source too long": selector(&datapathv1.LabelRequirement{
			Source: strings.Repeat("s", 64), Key: "app", Operator: exists,
		}),
		"no namespace":         &datapathv1.ObserveRequest{Services: []*datapathv1.ServiceName{{Name: "web"}}},
		"no name":              &datapathv1.ObserveRequest{Services: []*datapathv1.ServiceName{{Namespace: "shop"}}},
		"65 services":          &datapathv1.ObserveRequest{Services: slices.Repeat(web, 65)},
		"65 exclusions":        &datapathv1.ObserveRequest{Excluded: make([]*datapathv1.FlowCriteria, 65)},
		"a pod without a name": &datapathv1.ObserveRequest{Pods: []*datapathv1.PodName{{Namespace: "shop"}}},
		"a prefix of an end": &datapathv1.ObserveRequest{
			Destination: &datapathv1.FlowEndCriteria{Prefixes: []string{"10.0.0.1"}},
		},
		"65 ports of an end":      &datapathv1.ObserveRequest{Source: &datapathv1.FlowEndCriteria{Ports: make([]uint32, 65)}},
		"more than remembered":    &datapathv1.ObserveRequest{Last: 4097},
		"what is no UUID":         &datapathv1.ObserveRequest{AfterUuid: "x"},
		"no operator":             selector(&datapathv1.LabelRequirement{Key: "app"}),
		"an unknown operator":     selector(&datapathv1.LabelRequirement{Key: "app", Operator: 5, Values: []string{"web"}}),
		"NOT_IN without values":   selector(&datapathv1.LabelRequirement{Key: "app", Operator: notIn}),
		"EXISTS with a value":     selector(&datapathv1.LabelRequirement{Key: "app", Operator: exists, Values: []string{"web"}}),
		"65 values":               selector(&datapathv1.LabelRequirement{Key: "app", Operator: notIn, Values: slices.Repeat([]string{"web"}, 65)}),
		"a value too long":        selector(&datapathv1.LabelRequirement{Key: "app", Operator: notIn, Values: []string{strings.Repeat("v", 4097)}}),
		"verdict 0":               &datapathv1.ObserveRequest{Verdicts: []datapathv1.Verdict{0}},
		"an unknown verdict":      &datapathv1.ObserveRequest{Verdicts: []datapathv1.Verdict{1, 77}},
		"reason 0":                &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{0}},
		"an unknown reason":       &datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{15}},
		"an unknown type":         &datapathv1.ObserveRequest{Types: []datapathv1.FlowType{9}},
		"an address of 2 numbers": &datapathv1.ExplainRequest{SourceAddress: "1.2", DestinationAddress: four, Protocol: 6},
		"an address with a zone":  &datapathv1.ExplainRequest{SourceAddress: "fe80::1%eth0", DestinationAddress: four, Protocol: 6},
		"no destination":          &datapathv1.ExplainRequest{SourceAddress: four, Protocol: 6},
		"destination port 65536":  &datapathv1.ExplainRequest{SourceAddress: four, DestinationAddress: four, Protocol: 6, DestinationPort: 1 << 16},
		"source port 2^31":        &datapathv1.ExplainRequest{SourceAddress: four, DestinationAddress: four, Protocol: 6, SourcePort: 1 << 31},
		"no protocol":             &datapathv1.ExplainRequest{SourceAddress: four, DestinationAddress: four},
		"protocol 256":            &datapathv1.ExplainRequest{SourceAddress: four, DestinationAddress: four, Protocol: 256},
		"a prefix with host bits": &datapathv1.ObserveRequest{Prefixes: []string{"10.0.0.1/24"}},
		"an address as a prefix":  &datapathv1.ObserveRequest{Prefixes: []string{"10.0.0.1"}},
	} {
		if err := validator.Validate(m); err == nil {
			t.Errorf("%s is taken", name)
		}
	}
}

// rules knows one revision and names rules by number.
type rules struct{}

func (rules) Revision(slot uint16, epoch uint32) (uint64, bool) { return 42, slot == 1 && epoch == 21 }

func (rules) RuleSources(slot uint16, epoch uint32, egress bool, rule uint16) []string {
	return []string{fmt.Sprintf("slot %d epoch %d egress %v rule %d", slot, epoch, egress, rule)}
}

func (rules) Proxy(_ uint16, _ uint32, _ bool, rule uint16) uint16 { return rule % 5 }

func labelled() *observe.Labels {
	return &observe.Labels{Local: func(id uint32) ([]label.Label, bool) {
		if id != 300 {
			return nil, false
		}
		return []label.Label{{Source: "k8s", Key: "app", Value: "web"}, {Source: "reserved", Key: "x"}}, true
	}}
}

func TestFlowTellsWhatBothSidesSaid(t *testing.T) {
	s := &Server{rules: rules{}, labelsFrom: labelled(), facts: Facts{NodeName: "node-1"}}
	now := time.Unix(1000, 0)
	got := s.observed(t.Context(), flow.Event{
		Type: flow.PolicyVerdict, Time: now, Reason: uint32(event.PolicyDenied), Egress: true,
		Verdict: flow.Dropped,
		From: flow.End{
			Slot: 1, Owner: workload.Owner{ContainerID: "a", Interface: "eth0"},
			Pod: workload.PodReference{Namespace: "shop", Name: "web-0", UID: "u"},
		},
		To:       flow.End{Slot: 2}, // removed meanwhile
		Protocol: 6, TCPFlags: 2, Reply: true, Ifindex: 7, ID: [16]byte{0: 1, 6: 0x8f, 8: 0x80, 15: 9},
		Source: netip.MustParseAddrPort("10.0.0.1:1000"), Destination: netip.MustParseAddrPort("10.0.0.2:80"),
		SourceIdentity: 300, DestinationIdentity: 400, Length: 60, EtherType: 0x0800,
		Sender:   flow.Side{By: uint8(event.ByRule), Verdict: flow.Forwarded, Rule: 7, Table: 16, Epoch: 21, Slot: 1},
		Receiver: flow.Side{By: uint8(event.ByDefault), Verdict: flow.Dropped, Table: 17, Epoch: 22, Slot: 2},
		Original: netip.MustParseAddrPort("10.96.0.1:8000"), Service: "shop/web:http",
	}).GetFlow()
	want := &datapathv1.Flow{
		Type: datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT, Time: timestamppb.New(now),
		Reason:    datapathv1.Reason_REASON_POLICY_DENIED,
		Direction: netv1.Direction_DIRECTION_EGRESS, Verdict: datapathv1.Verdict_VERDICT_DROPPED,
		Uuid: "01000000-0000-8f00-8000-000000000009", NodeName: "node-1", InterfaceIndex: 7,
		Source: &datapathv1.FlowEnd{
			Address: "10.0.0.1", Port: 1000, Identity: 300, EndpointIndex: 1,
			Owner:  &workloadv1.Owner{ContainerId: "a", InterfaceName: "eth0"},
			Pod:    &workloadv1.PodReference{Namespace: "shop", Name: "web-0", Uid: "u"},
			Labels: []*workloadv1.Label{{Source: "k8s", Key: "app", Value: "web"}, {Source: "reserved", Key: "x"}},
		},
		Destination: &datapathv1.FlowEnd{Address: "10.0.0.2", Port: 80, Identity: 400, EndpointIndex: 2},
		Protocol:    6, TcpFlags: 2, Reply: true, Length: 60, Ethertype: 0x0800, SourceMac: "00:00:00:00:00:00",
		OriginalDestinationAddress: "10.96.0.1", OriginalDestinationPort: 8000, Service: "shop/web:http",
		Egress: &datapathv1.SideVerdict{
			Verdict: datapathv1.Verdict_VERDICT_FORWARDED, Rule: 7, Table: 16, Epoch: 21, Revision: 42,
			DecidedBy:   netv1.DecidedBy_DECIDED_BY_RULE,
			RuleSources: []string{"slot 1 epoch 21 egress true rule 7"}, Proxy: netv1.Proxy_PROXY_HTTP,
		},
		Ingress: &datapathv1.SideVerdict{Verdict: datapathv1.Verdict_VERDICT_DROPPED, Table: 17, Epoch: 22, DecidedBy: netv1.DecidedBy_DECIDED_BY_DEFAULT},
	}
	if !proto.Equal(got, want) {
		t.Errorf("flow\n got %v\nwant %v", got, want)
	}
	// Names that were resolved when the event was read are kept, even if the numbers have another meaning now.
	side := s.side(flow.Side{
		By: uint8(event.ByRule), Rule: 7, Epoch: 20, Slot: 1, Revision: 41, Sources: []string{"NetworkPolicy shop/old"},
		Proxy: 1,
	}, true)
	if side.GetRevision() != 41 || !slices.Equal(side.GetRuleSources(), []string{"NetworkPolicy shop/old"}) ||
		side.GetProxy() != netv1.Proxy_PROXY_DNS {
		t.Errorf("side %v", side)
	}
	// a side that was not evaluated has no verdict
	f := s.observed(t.Context(), flow.Event{Type: flow.Drop, Verdict: flow.Dropped}).GetFlow()
	if f.GetEgress() != nil || f.GetIngress() != nil || f.GetSource().GetLabels() != nil || f.GetIcmp() != nil ||
		f.GetOriginalDestinationAddress() != "" {
		t.Errorf("without sides: %v", f)
	}
	f = s.observed(t.Context(), flow.Event{
		Type: flow.Drop, Protocol: 58, Source: netip.MustParseAddrPort("[fd00::1]:5"),
		Destination: netip.MustParseAddrPort("[fd00::2]:32769"),
	}).GetFlow()
	if f.GetIcmp().GetType() != 128 || f.GetIcmp().GetCode() != 1 || f.GetSource().GetPort() != 0 ||
		f.GetDestination().GetPort() != 0 {
		t.Errorf("ICMPv6: %v", f)
	}
}

func TestRepairIsAMessageOfItsOwn(t *testing.T) {
	got := (&Server{}).observed(t.Context(), flow.Event{
		Type: flow.Repair, Time: time.Unix(5, 0), SourceIdentity: 300,
		From: flow.End{Slot: 3, Owner: workload.Owner{ContainerID: "a", Interface: "eth0"}},
		Repair: flow.RepairDetails{
			Subject: "filter", Device: "sl1", Want: "sluice_from_pod", Have: "nothing", Err: "no capacity",
		},
	}).GetRepair()
	want := &datapathv1.AttachmentRepair{
		Uuid: "00000000-0000-0000-0000-000000000000", Time: timestamppb.New(time.Unix(5, 0)), EndpointIndex: 3, Identity: 300,
		Slot:  3, //nolint:staticcheck // as callers of the earlier name see it
		Owner: &workloadv1.Owner{ContainerId: "a", InterfaceName: "eth0"},
		Difference: &datapathv1.Difference{
			Subject: "filter", Key: "sl1", Want: "sluice_from_pod", Have: "nothing",
			Target: &datapathv1.DifferenceTarget{Kind: datapathv1.TargetKind_TARGET_KIND_PROGRAM},
		}, Error: "no capacity",
	}
	if !proto.Equal(got, want) {
		t.Errorf("repair\n got %v\nwant %v", got, want)
	}
}

// TestEventsNameTheNodeAsIdentityDoes tests that events use the name by which other nodes know this node.
func TestEventsNameTheNodeAsIdentityDoes(t *testing.T) {
	name := ""
	s := &Server{rules: rules{}, labelsFrom: labelled(), facts: Facts{NodeName: "host"}, named: func() string { return name }}
	for _, want := range []string{"host", "node-1"} { // the configured name until identity has answered
		if got := s.observed(t.Context(), flow.Event{}).GetFlow().GetNodeName(); got != want {
			t.Errorf("a flow has %q, want %q", got, want)
		}
		if got := s.observed(t.Context(), flow.Event{Type: flow.Repair}).GetRepair().GetNodeName(); got != want {
			t.Errorf("a repair has %q, want %q", got, want)
		}
		name = "node-1"
	}
}
