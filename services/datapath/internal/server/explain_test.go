// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/model/frontend"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/dryrun"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/explain"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policymap"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
)

// fakeMaps answer what they were given.
type fakeMaps struct {
	asked   conntrack.Tuple
	answer  explain.Explanation
	entries int
	err     error
}

func (m *fakeMaps) Explain(t conntrack.Tuple) (explain.Explanation, error) {
	m.asked = t
	return m.answer, m.err
}

func (m *fakeMaps) Dump(name string, visit func(key, value string) error) error {
	for i := range m.entries {
		if err := visit(fmt.Sprint(name, i), "value"); err != nil {
			return err
		}
	}
	return m.err
}

func TestExplainTellsEveryStep(t *testing.T) {
	m := &fakeMaps{answer: explain.Explanation{
		Reason: event.PolicyDenied,
		Source: explain.Peer{Identity: 300, Word: nodetable.Identity{Class: 5, Known: true}, Slot: 1, Entry: netip.MustParsePrefix("10.0.0.1/32")},
		Destination: explain.Peer{
			Identity: 9, Slot: endpointmap.NoID,
		},
		Egress: &explain.Side{
			SideVerdict: event.SideVerdict{By: event.ByRule, Table: 16, Epoch: 21, Rule: 7, Action: event.ActionDeny},
			Place:       policymap.Place{IdentityClass: 2, IdentityRow: true, AddressClass: 3, AddressPrefix: netip.MustParsePrefix("198.51.100.0/24")},
		},
		Tracked: true, Next: dryrun.Answer{Reason: event.ForwardedOutside},
		Connection: conntrack.Connection{
			Tuple: conntrack.Tuple{Initiator: netip.MustParseAddrPort("10.0.0.1:1000"), Responder: netip.MustParseAddrPort("198.51.100.7:80"), Protocol: 6},
			Flags: conntrack.SeenReply | conntrack.PickedUp | conntrack.Established, EgressRule: 7,
		},
	}}
	s := &Server{explainer: m, rules: rules{}, labelsFrom: labelled(), endpoints: lifecycle.New(lifecycle.Config{Links: noLinks{}})}
	got, err := s.Explain(t.Context(), &datapathv1.ExplainRequest{
		SourceAddress: "10.0.0.1", DestinationAddress: "198.51.100.7", Protocol: 6, SourcePort: 1000, DestinationPort: 80,
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := m.answer.Connection.Tuple; m.asked != want {
		t.Errorf("asked about %v, want %v", m.asked, want)
	}
	got.Connection.LastSeenTime = nil // depends on the time
	want := &datapathv1.ExplainResponse{
		Verdict: datapathv1.Verdict_VERDICT_DROPPED, Reason: datapathv1.Reason_REASON_POLICY_DENIED,
		Source: &datapathv1.ExplainedPeer{
			Slot:     1, //nolint:staticcheck // as callers of the earlier name see it
			Identity: 300, Known: true, IdentityClass: 5, EndpointIndex: 1, IpcachePrefix: "10.0.0.1/32",
			Labels: []*workloadv1.Label{{Source: "k8s", Key: "app", Value: "web"}, {Source: "reserved", Key: "x"}},
		},
		Destination: &datapathv1.ExplainedPeer{Identity: 9},
		Egress: &datapathv1.ExplainedSide{
			Verdict: &datapathv1.SideVerdict{
				Verdict: datapathv1.Verdict_VERDICT_DROPPED, Rule: 7, Table: 16, Epoch: 21, Revision: 42,
				DecidedBy:   netv1.DecidedBy_DECIDED_BY_RULE,
				RuleSources: []string{"slot 1 epoch 21 egress true rule 7"}, Proxy: netv1.Proxy_PROXY_HTTP,
			},
			IdentityClass: 2, IdentityRow: true, AddressClass: 3, AddressPrefix: "198.51.100.0/24",
		},
		Connection: &datapathv1.Connection{
			InitiatorAddress: "10.0.0.1", InitiatorPort: 1000, ResponderAddress: "198.51.100.7", ResponderPort: 80, Protocol: 6,
			States: []datapathv1.ConnectionState{
				datapathv1.ConnectionState_CONNECTION_STATE_ESTABLISHED, datapathv1.ConnectionState_CONNECTION_STATE_PICKED_UP,
			},
			Current: true, EgressRule: 7, NextVerdict: datapathv1.Verdict_VERDICT_FORWARDED,
			NextReason: datapathv1.Reason_REASON_FORWARDED_OUTSIDE,
		},
	}
	if !proto.Equal(got, want) {
		t.Errorf("explanation\n got %v\nwant %v", got, want)
	}
	m.answer.Reason, m.answer.Egress.Audited = event.ForwardedOutside, true
	got, err = s.Explain(t.Context(), &datapathv1.ExplainRequest{SourceAddress: "10.0.0.1", DestinationAddress: "198.51.100.7"})
	if err != nil || got.GetVerdict() != datapathv1.Verdict_VERDICT_AUDITED || got.GetEgress().GetVerdict().GetVerdict() != datapathv1.Verdict_VERDICT_AUDITED {
		t.Errorf("in audit mode: %v, %v", got, err)
	}
}

// serviceExplanation returns the explanation of a service with backends.
func serviceExplanation(outcome explain.Outcome, backends ...explain.Backend) explain.Explanation {
	return explain.Explanation{
		Source: explain.Peer{Identity: 300, Slot: 1}, Destination: explain.Peer{Slot: endpointmap.NoID},
		Service: &explain.Service{
			Frontend: servicemap.Frontend{
				Key:  frontend.Key{Addr: netip.IPv4Unspecified(), Port: 30080, Protocol: frontend.TCP, Node: true},
				Kind: frontend.NodePort, Service: "shop/web:http",
			},
			Outcome: outcome, Backends: backends, Count: len(backends) + 3,
		},
	}
}

// explainedBackend returns a backend whose ingress policy drops if the reason is a drop.
func explainedBackend(at string, reason event.Reason) explain.Backend {
	b := explain.Backend{
		Backend: servicemap.Backend{AddrPort: netip.MustParseAddrPort(at)}, Path: explain.Evaluated,
		Explanation: explain.Explanation{
			Reason: reason, Destination: explain.Peer{Identity: 9, Slot: endpointmap.NoID},
		},
	}
	if reason.Dropped() {
		b.Explanation.Ingress = &explain.Side{
			SideVerdict: event.SideVerdict{By: event.ByRule, Table: 16, Epoch: 21, Rule: 7, Action: event.ActionDeny},
		}
	}
	return b
}

func TestExplainTellsWhatBecomesOfEachBackend(t *testing.T) {
	self := explainedBackend("10.0.0.1:8080", 0)
	self.Path = explain.OwnNamespace
	m := &fakeMaps{answer: serviceExplanation(explain.Translated, self,
		explainedBackend("10.0.0.2:8080", event.PolicyDenied))}
	s := &Server{explainer: m, rules: rules{}, endpoints: lifecycle.New(lifecycle.Config{Links: noLinks{}})}
	r := &datapathv1.ExplainRequest{
		SourceAddress: "10.0.0.1", DestinationAddress: "192.0.2.1", Protocol: 6, DestinationPort: 30080,
	}
	got, err := s.Explain(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	want := &datapathv1.ExplainResponse{
		Source: &datapathv1.ExplainedPeer{
			Slot:     1, //nolint:staticcheck // as callers of the earlier name see it
			Identity: 300, EndpointIndex: 1,
		},
		Service: &datapathv1.ExplainedService{
			Service: "shop/web:http", Address: "0.0.0.0", Port: 30080,
			Kind:    datapathv1.FrontendKind_FRONTEND_KIND_NODE_PORT,
			Outcome: datapathv1.ServiceOutcome_SERVICE_OUTCOME_TRANSLATED, BackendCount: 5,
			Backends: []*datapathv1.ExplainedBackend{{
				Address: "10.0.0.1", Port: 8080, Path: datapathv1.BackendPath_BACKEND_PATH_OWN_NAMESPACE,
				Verdict: datapathv1.Verdict_VERDICT_FORWARDED, Peer: &datapathv1.ExplainedPeer{Identity: 9},
			}, {
				Address: "10.0.0.2", Port: 8080, Path: datapathv1.BackendPath_BACKEND_PATH_EVALUATED,
				Verdict: datapathv1.Verdict_VERDICT_DROPPED, Reason: datapathv1.Reason_REASON_POLICY_DENIED,
				Peer: &datapathv1.ExplainedPeer{Identity: 9},
				Ingress: &datapathv1.ExplainedSide{Verdict: &datapathv1.SideVerdict{
					Verdict: datapathv1.Verdict_VERDICT_DROPPED, Rule: 7, Table: 16, Epoch: 21,
					DecidedBy:   netv1.DecidedBy_DECIDED_BY_RULE,
					RuleSources: []string{"slot 65535 epoch 21 egress false rule 7"}, Proxy: netv1.Proxy_PROXY_HTTP,
				}},
			}},
		},
	}
	if !proto.Equal(got, want) {
		t.Errorf("explanation\n got %v\nwant %v", got, want)
	}
}

func TestExplainTellsOfBackendsInTransit(t *testing.T) {
	b := explainedBackend("10.244.1.3:8080", event.ForwardedToStack)
	b.Path, b.Source = explain.InTransit, netip.MustParseAddr("10.244.0.1")
	b.Explanation.Tracked, b.Explanation.Next = true, dryrun.Answer{Reason: event.ForwardedToStack}
	b.Explanation.Connection.Tuple = conntrack.Tuple{
		Initiator: netip.MustParseAddrPort("203.0.113.7:4000"), Responder: b.AddrPort, Protocol: 6, Transit: true,
	}
	b.Explanation.NAT = netip.MustParseAddrPort("10.244.0.1:24711")
	x := serviceExplanation(explain.Translated, b)
	x.Service.Outside = true
	s := &Server{explainer: &fakeMaps{answer: x}, endpoints: lifecycle.New(lifecycle.Config{Links: noLinks{}})}
	got, err := s.Explain(t.Context(), &datapathv1.ExplainRequest{
		SourceAddress: "203.0.113.7", DestinationAddress: "192.0.2.1",
	})
	if err != nil || !got.GetService().GetOutside() || got.GetVerdict() != datapathv1.Verdict_VERDICT_FORWARDED ||
		got.GetReason() != datapathv1.Reason_REASON_FORWARDED_TO_STACK {
		t.Fatalf("%v, %v", got, err)
	}
	at := got.GetService().GetBackends()[0]
	if c := at.GetConnection(); at.GetPath() != datapathv1.BackendPath_BACKEND_PATH_IN_TRANSIT ||
		at.GetSourceAddress() != "10.244.0.1" || !c.GetInTransit() || !c.GetCurrent() ||
		c.GetSourceAddress() != "10.244.0.1" || c.GetSourcePort() != 24711 {
		t.Errorf("the backend: %v", at)
	}
}

func TestExplainOfAServiceSaysWhatAllBackendsAgreeOn(t *testing.T) {
	unlocal := explainedBackend("10.0.0.5:80", 0)
	unlocal.Path = explain.NotLocal
	forwarded := explainedBackend("10.0.0.2:80", event.ForwardedToPod)
	direct := serviceExplanation(explain.NotTranslated)
	direct.Reason = event.ForwardedOutside
	for name, c := range map[string]struct {
		x       explain.Explanation
		verdict datapathv1.Verdict
		reason  datapathv1.Reason
	}{
		"one": {
			serviceExplanation(explain.Translated, forwarded),
			datapathv1.Verdict_VERDICT_FORWARDED, datapathv1.Reason_REASON_FORWARDED_TO_POD,
		},
		"two ways of being forwarded": {
			serviceExplanation(explain.Translated, forwarded, explainedBackend("10.0.0.3:80", event.ForwardedOutside)),
			datapathv1.Verdict_VERDICT_FORWARDED, 0,
		},
		"one is not evaluated": {serviceExplanation(explain.Translated, forwarded, unlocal), 0, 0},
		"none is evaluated":    {serviceExplanation(explain.Translated, unlocal), 0, 0},
		"no backend":           {serviceExplanation(explain.NoBackend), datapathv1.Verdict_VERDICT_DROPPED, 0},
		"source ranges":        {serviceExplanation(explain.SourceRanges), datapathv1.Verdict_VERDICT_DROPPED, 0},
		"not translated": {
			direct, datapathv1.Verdict_VERDICT_FORWARDED, datapathv1.Reason_REASON_FORWARDED_OUTSIDE,
		},
		"neither": {serviceExplanation(explain.NotTranslated), 0, 0},
	} {
		s := &Server{explainer: &fakeMaps{answer: c.x}, endpoints: lifecycle.New(lifecycle.Config{Links: noLinks{}})}
		r := &datapathv1.ExplainRequest{SourceAddress: "10.0.0.1", DestinationAddress: "10.0.0.9"}
		got, err := s.Explain(t.Context(), r)
		if err != nil || got.GetVerdict() != c.verdict || got.GetReason() != c.reason {
			t.Errorf("%s: %v %v, %v, want %v %v", name, got.GetVerdict(), got.GetReason(), err, c.verdict, c.reason)
		}
		if has := got.GetDestination() != nil; has != (c.x.Service.Outcome == explain.NotTranslated) {
			t.Errorf("%s: destination %v", name, got.GetDestination())
		}
	}
}

func TestExplainNamesTheBadField(t *testing.T) {
	s := &Server{explainer: &fakeMaps{}}
	const four, six, mapped = "10.0.0.1", "fd00::1", "::ffff:1.2.3.4"
	for want, r := range map[string]*datapathv1.ExplainRequest{
		"destination_address: is of another":                       {SourceAddress: four, DestinationAddress: six},
		`source_address: "::ffff:1.2.3.4" is an IPv4 address`:      {SourceAddress: mapped, DestinationAddress: six},
		`destination_address: "::ffff:1.2.3.4" is an IPv4 address`: {SourceAddress: six, DestinationAddress: mapped},
	} {
		_, err := s.Explain(t.Context(), r)
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	s.explainer = &fakeMaps{err: explain.ErrNotLocal}
	if _, err := s.Explain(t.Context(), &datapathv1.ExplainRequest{SourceAddress: four, DestinationAddress: four}); status.Code(err) != codes.NotFound {
		t.Errorf("neither is local: %v", err)
	}
}

// dumpStream accepts some entries and then fails.
type dumpStream struct {
	grpc.ServerStream
	got     []string
	omitted []uint64
	most    int
}

func (s *dumpStream) Context() context.Context { return context.Background() }

func (s *dumpStream) Send(r *datapathv1.DumpMapResponse) error {
	if len(s.got) == s.most {
		return status.Error(codes.Canceled, "the client disconnected")
	}
	s.got, s.omitted = append(s.got, r.GetKey()), append(s.omitted, r.GetOmittedEntryCount())
	return nil
}

func TestDumpMapEndsWithItsLimitItsClientOrItsMap(t *testing.T) {
	s := &Server{maps: &fakeMaps{entries: 10}}
	for _, c := range []struct {
		limit   uint32
		most    int
		want    int
		omitted uint64
		code    codes.Code
	}{
		{0, 100, 10, 0, codes.OK},
		{3, 100, 3, 7, codes.OK},
		{9, 100, 9, 1, codes.OK},
		{10, 100, 10, 0, codes.OK},
		{1<<32 - 1, 100, 10, 0, codes.OK},
		{0, 2, 2, 0, codes.Canceled},
		{5, 4, 4, 0, codes.Canceled},
	} {
		stream := &dumpStream{most: c.most}
		err := s.DumpMap(&datapathv1.DumpMapRequest{Name: "sl_ep", Limit: c.limit}, stream)
		if status.Code(err) != c.code || len(stream.got) != c.want {
			t.Errorf("limit %d: %d entries, %v, want %d, %v", c.limit, len(stream.got), err, c.want, c.code)
		}
		want := make([]uint64, c.want)
		want[c.want-1] = c.omitted
		if !slices.Equal(stream.omitted, want) {
			t.Errorf("limit %d: the entries say %d are left out, want %d", c.limit, stream.omitted, want)
		}
	}
	cut := &dumpStream{most: 100}
	s.maps = &fakeMaps{entries: 2, err: errors.New("the map was closed")}
	err := s.DumpMap(&datapathv1.DumpMapRequest{Name: "sl_ep"}, cut)
	if status.Code(err) != codes.Internal || len(cut.got) != 2 {
		t.Errorf("a map that fails after 2 entries: %d entries, %v", len(cut.got), err)
	}
	s.maps = &fakeMaps{}
	if err := s.DumpMap(&datapathv1.DumpMapRequest{Name: "sl_ep", Limit: 1}, &dumpStream{}); err != nil {
		t.Errorf("an empty map: %v", err)
	}
	s.maps = &fakeMaps{err: fmt.Errorf("x: %w; there are sl_ct4", pin.ErrNoMap)}
	if err := s.DumpMap(&datapathv1.DumpMapRequest{Name: "x"}, &dumpStream{}); status.Code(err) != codes.NotFound || !strings.Contains(err.Error(), "sl_ct4") {
		t.Errorf("no such map: %v", err)
	}
	s.maps = &fakeMaps{err: errors.New("broken")}
	if err := s.DumpMap(&datapathv1.DumpMapRequest{Name: "x"}, &dumpStream{}); status.Code(err) != codes.Internal {
		t.Errorf("another error: %v", err)
	}
}
