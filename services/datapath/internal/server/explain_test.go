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

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/event"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/explain"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/policymap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/replica"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/slotmap"
	"github.com/sluice-net/sluice/services/datapath/internal/policytable"
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
		Reason: event.DropPolicyDenied,
		Source: explain.Peer{Identity: 300, Word: policytable.Identity{Class: 5, Known: true}, Slot: 1, Entry: netip.MustParsePrefix("10.0.0.1/32")},
		Destination: explain.Peer{
			Identity: 9, Slot: slotmap.NoSlot,
		},
		Egress: &explain.Side{
			SideVerdict: event.SideVerdict{By: event.ByRule, Table: 16, Epoch: 21, Rule: 7, Action: event.ActionDeny},
			Place:       policymap.Place{IdentityClass: 2, IdentityRow: true, AddressClass: 3, AddressPrefix: netip.MustParsePrefix("198.51.100.0/24")},
		},
		Tracked: true, Next: replica.Answer{Reason: event.ForwardOutside},
		Connection: conntrack.Connection{
			Tuple: conntrack.Tuple{Initiator: netip.MustParseAddrPort("10.0.0.1:1000"), Responder: netip.MustParseAddrPort("198.51.100.7:80"), Protocol: 6},
			Flags: conntrack.SeenReply | conntrack.PickedUp | conntrack.Established, EgressRule: 7,
		},
	}}
	s := &Server{Explainer: m, Rules: rules{}, Labels: labelled(), Core: lifecycle.New(lifecycle.Config{Links: noLinks{}})}
	got, err := s.Explain(t.Context(), &datapathv1.ExplainRequest{
		SourceAddress: "10.0.0.1", DestinationAddress: "198.51.100.7", Protocol: 6, SourcePort: 1000, DestinationPort: 80,
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := m.answer.Connection.Tuple; m.asked != want {
		t.Errorf("asked about %v, want %v", m.asked, want)
	}
	got.Connection.LastSeenTime = nil // the clock's
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
	m.answer.Reason, m.answer.Egress.Audited = event.ForwardOutside, true
	got, err = s.Explain(t.Context(), &datapathv1.ExplainRequest{SourceAddress: "10.0.0.1", DestinationAddress: "198.51.100.7"})
	if err != nil || got.GetVerdict() != datapathv1.Verdict_VERDICT_AUDITED || got.GetEgress().GetVerdict().GetVerdict() != datapathv1.Verdict_VERDICT_AUDITED {
		t.Errorf("in audit mode: %v, %v", got, err)
	}
}

func TestExplainNamesTheBadField(t *testing.T) {
	s := &Server{Explainer: &fakeMaps{}}
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
	s.Explainer = &fakeMaps{err: explain.ErrNotLocal}
	if _, err := s.Explain(t.Context(), &datapathv1.ExplainRequest{SourceAddress: four, DestinationAddress: four}); status.Code(err) != codes.NotFound {
		t.Errorf("neither is local: %v", err)
	}
}

// dumpStream takes some entries and then goes.
type dumpStream struct {
	grpc.ServerStream
	got     []string
	omitted []uint64
	most    int
}

func (s *dumpStream) Context() context.Context { return context.Background() }

func (s *dumpStream) Send(r *datapathv1.DumpMapResponse) error {
	if len(s.got) == s.most {
		return status.Error(codes.Canceled, "the client is gone")
	}
	s.got, s.omitted = append(s.got, r.GetKey()), append(s.omitted, r.GetOmittedEntryCount())
	return nil
}

func TestDumpMapEndsWithItsLimitItsClientOrItsMap(t *testing.T) {
	s := &Server{Maps: &fakeMaps{entries: 10}}
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
	s.Maps = &fakeMaps{entries: 2, err: errors.New("the map went away")}
	err := s.DumpMap(&datapathv1.DumpMapRequest{Name: "sl_ep"}, cut)
	if status.Code(err) != codes.Internal || len(cut.got) != 2 {
		t.Errorf("a map that goes away after 2 entries: %d entries, %v", len(cut.got), err)
	}
	s.Maps = &fakeMaps{}
	if err := s.DumpMap(&datapathv1.DumpMapRequest{Name: "sl_ep", Limit: 1}, &dumpStream{}); err != nil {
		t.Errorf("an empty map: %v", err)
	}
	s.Maps = &fakeMaps{err: fmt.Errorf("x: %w; there are sl_ct4", pin.ErrNoMap)}
	if err := s.DumpMap(&datapathv1.DumpMapRequest{Name: "x"}, &dumpStream{}); status.Code(err) != codes.NotFound || !strings.Contains(err.Error(), "sl_ct4") {
		t.Errorf("no such map: %v", err)
	}
	s.Maps = &fakeMaps{err: errors.New("broken")}
	if err := s.DumpMap(&datapathv1.DumpMapRequest{Name: "x"}, &dumpStream{}); status.Code(err) != codes.Internal {
		t.Errorf("another error: %v", err)
	}
}
