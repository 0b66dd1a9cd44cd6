// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/model/flow"
	"github.com/sluice-net/sluice/model/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/observe"
)

// ends knows the pod 10.244.0.2 of this node, and other addresses as ones of node 7.
type ends struct{}

func (ends) EndOf(a netip.Addr) (flow.End, uint32, uint16) {
	if a == netip.MustParseAddr("10.244.0.2") {
		return flow.End{Slot: 3, Owner: workload.Owner{ContainerID: "c1", Interface: "eth0"}}, 300, 0
	}
	return flow.End{}, 301, 7
}

// TestReportedMessagesAreEvents: their ends are looked up by address, so that sluice-dns cannot name the pods of a
// message.
func TestReportedMessagesAreEvents(t *testing.T) {
	s := &Server{ring: observe.NewRing(), ends: ends{}}
	message := func(response bool) *datapathv1.ReportedDNSMessage {
		return &datapathv1.ReportedDNSMessage{
			Time: timestamppb.New(time.Unix(1_800_000_000, 0)), ClientAddress: "10.244.0.2", ClientPort: 40000,
			ServerAddress: "10.244.1.9", ServerPort: 53,
			Message: &datapathv1.DNSMessage{Response: response, Name: "a.example.", QueryType: 1},
		}
	}
	refused, answer := message(false), message(true)
	refused.Dropped, refused.Message.ResponseCode = true, 5
	answer.Message.Addresses, answer.Message.TtlSeconds = []string{"192.0.2.1"}, 30
	answer.Protocol = netv1.Protocol_PROTOCOL_TCP
	future := message(false)
	future.Time = timestamppb.New(time.Now().Add(time.Hour))
	req := &datapathv1.ReportDNSMessagesRequest{
		Messages: []*datapathv1.ReportedDNSMessage{refused, answer, future}, LostCount: 9,
	}
	if _, err := s.ReportDNSMessages(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	reader := s.ring.Read(time.Time{})
	var got []flow.Event
	for {
		e, _, ok, err := reader.Next(t.Context(), false)
		if err != nil || !ok {
			break
		}
		got = append(got, e)
	}
	if len(got) != 4 || got[0].DNSLost != 9 || got[0].Type != 0 || got[3].Time.After(time.Now()) {
		t.Fatalf("events %+v", got)
	}
	q, a := s.observed(t.Context(), got[1]).GetFlow(), s.observed(t.Context(), got[2]).GetFlow()
	if q.GetType() != datapathv1.FlowType_FLOW_TYPE_DNS || q.GetVerdict() != datapathv1.Verdict_VERDICT_DROPPED ||
		q.GetReply() || q.GetSource().GetOwner().GetContainerId() != "c1" || q.GetSource().GetPort() != 40000 ||
		q.GetDestination().GetIdentity() != 301 || q.GetDestination().GetNodeName() != "#7" ||
		q.GetDns().GetResponseCode() != 5 || q.GetSourceMac() != "" || q.GetUuid() == "" || q.GetProtocol() != 17 {
		t.Errorf("the query: %v", q)
	}
	if !a.GetReply() || a.GetProtocol() != netv1.Protocol_PROTOCOL_TCP || a.GetDestination().GetIdentity() != 300 || a.GetSource().GetAddress() != "10.244.1.9" ||
		a.GetDns().GetAddresses()[0] != "192.0.2.1" || a.GetVerdict() != datapathv1.Verdict_VERDICT_FORWARDED {
		t.Errorf("the answer: %v", a)
	}
	for _, bad := range []func(m *datapathv1.ReportedDNSMessage){
		func(m *datapathv1.ReportedDNSMessage) { m.ClientAddress = "x" },
		func(m *datapathv1.ReportedDNSMessage) { m.ServerPort = 1 << 16 },
		func(m *datapathv1.ReportedDNSMessage) { m.Message.Addresses = []string{"x"} },
	} {
		m := message(true)
		bad(m)
		before := s.ring.Next()
		_, err := s.ReportDNSMessages(t.Context(), &datapathv1.ReportDNSMessagesRequest{
			Messages: []*datapathv1.ReportedDNSMessage{message(false), m},
		})
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "messages[1]") ||
			s.ring.Next() != before {
			t.Errorf("a wrong message: %v, %d events were added", err, s.ring.Next()-before)
		}
	}
}

// TestLostMessagesAreReportedToThoseWhoWantThem: DNS messages that were lost are reported like events that the kernel
// lost.
func TestLostMessagesAreReportedToThoseWhoWantThem(t *testing.T) {
	ring := observe.NewRing()
	ring.Add(flow.Event{Type: flow.DNS, Length: 1, Message: &flow.Message{}})
	ring.Add(flow.Event{DNSLost: 4})
	ring.Add(flow.Event{Type: flow.Drop, Reason: uint32(event.NoRoute), Length: 2})
	s := &Server{ring: ring, ends: ends{}}
	for _, c := range []struct {
		r    *datapathv1.ObserveRequest
		want []string
	}{
		{&datapathv1.ObserveRequest{}, []string{"flow 1", "LOSS_SOURCE_DNS 4", "flow 2"}},
		{
			&datapathv1.ObserveRequest{Types: []datapathv1.FlowType{datapathv1.FlowType_FLOW_TYPE_DNS}},
			[]string{"flow 1", "LOSS_SOURCE_DNS 4"},
		},
		{
			&datapathv1.ObserveRequest{Types: []datapathv1.FlowType{datapathv1.FlowType_FLOW_TYPE_DROP}}, []string{"flow 2"},
		},
		{&datapathv1.ObserveRequest{Last: 2}, []string{"flow 1", "LOSS_SOURCE_DNS 4", "flow 2"}},
	} {
		stream := &observeStream{ctx: t.Context()}
		if err := s.Observe(c.r, stream); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(stream.got, c.want) {
			t.Errorf("%v: got %v, want %v", c.r, stream.got, c.want)
		}
	}
}
