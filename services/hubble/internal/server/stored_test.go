// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/log"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
	"github.com/sluice-net/sluice/services/hubble/internal/api/observer"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/record"
)

// noMetrics counts nothing.
type noMetrics struct{}

func (noMetrics) Count(string, *flow.Flow)               {}
func (noMetrics) CountLost(flow.LostEventSource, uint64) {}

// randomEnd returns a pod of one of several namespaces, or an external address.
func randomEnd(r *rand.Rand) *datapathv1.FlowEnd {
	n := r.IntN(40)
	if n >= 36 {
		return &datapathv1.FlowEnd{
			Address: fmt.Sprintf("192.0.2.%d", n), Port: 443, Identity: 2,
			Labels: []*workloadv1.Label{{Source: "reserved", Key: "world"}},
		}
	}
	namespace := fmt.Sprint("team-", n%6)
	e := &datapathv1.FlowEnd{
		Address: fmt.Sprintf("10.244.0.%d", n), Port: uint32(8000 + n), Identity: uint32(17_000 + n),
		Labels: []*workloadv1.Label{{Source: "k8s", Key: "io.kubernetes.pod.namespace", Value: namespace}},
	}
	if n%2 == 0 { // a pod of this node
		e.EndpointIndex = uint32(n + 1)
		e.Pod = &workloadv1.PodReference{Namespace: namespace, Name: fmt.Sprint("pod-", n)}
	}
	return e
}

// randomEvent returns an event with the given time. One of ten is a drop by a policy.
func randomEvent(r *rand.Rand, number int, at time.Time) *datapathv1.Flow {
	f := &datapathv1.Flow{
		Time: timestamppb.New(at), Uuid: fmt.Sprint("event-", number), NodeName: "node-1", Ethertype: 0x0800,
		Type: datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT, Verdict: datapathv1.Verdict_VERDICT_FORWARDED,
		Direction: netv1.Direction_DIRECTION_EGRESS, Protocol: netv1.Protocol_PROTOCOL_TCP, TcpFlags: 2,
		Source: randomEnd(r), Destination: randomEnd(r),
	}
	side := &datapathv1.SideVerdict{
		Verdict: f.Verdict, DecidedBy: netv1.DecidedBy_DECIDED_BY_RULE, Rule: uint32(1 + r.IntN(50)),
		Revision:    uint64(1 + r.IntN(1000)),
		RuleSources: []string{fmt.Sprintf("NetworkPolicy team-%d/p-%d spec.ingress[%d]", r.IntN(6), r.IntN(20), r.IntN(3))},
	}
	if number%10 == 0 {
		f.Type, f.Verdict = datapathv1.FlowType_FLOW_TYPE_DROP, datapathv1.Verdict_VERDICT_DROPPED
		f.Reason, side.Verdict = datapathv1.Reason_REASON_POLICY_DENIED, f.Verdict
	}
	if r.IntN(2) == 0 {
		f.Egress = side
	} else {
		f.Direction, f.Ingress = netv1.Direction_DIRECTION_INGRESS, side
	}
	return f
}

// TestRandomEventsAreFoundAgain: 10,000 random events of several hours are returned unchanged. Filters and times
// select the same events as a comparison of all events. 1,000 events are drops, with reason, policy and revision.
func TestRandomEventsAreFoundAgain(t *testing.T) {
	const count = 3_000
	b := newBench(t, 8<<20)
	r := rand.New(rand.NewPCG(40, uint64(time.Now().UnixNano()))) //nolint:gosec // a test
	convert := hubbleflow.Converter{Version: "1"}
	b.flow, b.describe = record.Flow(convert), record.Describe
	sink := record.New(record.Options{
		History: b.h, Metrics: noMetrics{}, Now: time.Now, Log: log.Discard(),
	})
	var events []*datapathv1.Flow
	drops := 0
	for i := range count {
		f := randomEvent(r, i, start.Add(time.Duration(i)*time.Second+time.Duration(r.IntN(2000))*time.Millisecond))
		if f.GetVerdict() == datapathv1.Verdict_VERDICT_DROPPED {
			drops++
		}
		events = append(events, f)
		sink.Flow(f)
	}
	if err := b.h.Close(); err != nil {
		t.Fatal(err)
	}
	b.open(8 << 20)
	s, err := b.ask(&observer.GetFlowsRequest{}, 0)
	if err != nil || len(s.got) != count || drops != count/10 {
		t.Fatalf("%d flows of %d, %d drops, %v", len(s.got), count, drops, err)
	}
	for i, m := range s.got {
		want := convert.Flow(events[i])
		if !equal(m.GetFlow(), want) {
			t.Fatalf("event %d is answered as %v, want %v", i, m.GetFlow(), want)
		}
		if side := max(len(want.GetEgressDeniedBy()), len(want.GetIngressDeniedBy())); want.GetVerdict() ==
			flow.Verdict_DROPPED && (want.GetDropReasonDesc() != flow.DropReason_POLICY_DENY || side != 1 ||
			append(want.GetEgressDeniedBy(), want.GetIngressDeniedBy()...)[0].GetRevision() == 0) {
			t.Fatalf("drop %d has no reason, policy or revision: %v", i, want)
		}
	}
	for range 100 {
		q, selects := randomQuestion(r)
		var want []string
		for _, f := range events {
			if selects(f) {
				want = append(want, f.GetUuid())
			}
		}
		if n := int(q.GetNumber()); n > 0 && len(want) > n {
			if q.GetFirst() || q.GetSince() != nil {
				want = want[:n]
			} else {
				want = want[len(want)-n:]
			}
		}
		s, err := b.ask(q, 0)
		if got := s.texts(); err != nil || !slices.Equal(got, want) {
			t.Errorf("%v: %d flows, want %d, %v", q, len(got), len(want), err)
		}
	}
}

// equal compares flows. The bytes of equal extensions may differ in the order of their keys.
func equal(a, b *flow.Flow) bool {
	var of [2]structpb.Struct
	for i, f := range []*flow.Flow{a, b} {
		if f.GetExtensions().UnmarshalTo(&of[i]) != nil {
			return false
		}
	}
	a, b = proto.CloneOf(a), proto.CloneOf(b)
	a.Extensions, b.Extensions = nil, nil
	return proto.Equal(a, b) && proto.Equal(&of[0], &of[1])
}

// randomQuestion returns a request, and a function that reports whether the request selects an event.
func randomQuestion(r *rand.Rand) (*observer.GetFlowsRequest, func(*datapathv1.Flow) bool) {
	q, x := &observer.GetFlowsRequest{}, &flow.FlowFilter{}
	var all []func(*datapathv1.Flow) bool
	if r.IntN(2) == 0 {
		since := start.Add(time.Duration(r.IntN(10_000)) * time.Second)
		q.Since = timestamppb.New(since)
		all = append(all, func(f *datapathv1.Flow) bool { return !f.GetTime().AsTime().Before(since) })
	}
	if r.IntN(2) == 0 {
		until := start.Add(time.Duration(r.IntN(10_000)) * time.Second)
		q.Until = timestamppb.New(until)
		all = append(all, func(f *datapathv1.Flow) bool { return !f.GetTime().AsTime().After(until) })
	}
	if r.IntN(2) == 0 {
		x.Verdict = []flow.Verdict{flow.Verdict_DROPPED}
		all = append(all, func(f *datapathv1.Flow) bool { return f.GetVerdict() == datapathv1.Verdict_VERDICT_DROPPED })
	}
	if r.IntN(2) == 0 {
		name := fmt.Sprint("pod-", 2*r.IntN(18))
		x.SourcePod = []string{"/" + name}
		all = append(all, func(f *datapathv1.Flow) bool {
			return strings.HasPrefix(f.GetSource().GetPod().GetName(), name)
		})
	}
	if r.IntN(2) == 0 {
		port := uint32(8000 + r.IntN(36))
		x.DestinationPort = []string{fmt.Sprint(port)}
		all = append(all, func(f *datapathv1.Flow) bool { return f.GetDestination().GetPort() == port })
	}
	if !proto.Equal(x, &flow.FlowFilter{}) {
		q.Whitelist = []*flow.FlowFilter{x}
	}
	if r.IntN(2) == 0 {
		q.Number, q.First = uint64(1+r.IntN(20)), r.IntN(2) == 0
	}
	return q, func(f *datapathv1.Flow) bool {
		for _, selects := range all {
			if !selects(f) {
				return false
			}
		}
		return true
	}
}

// TestClockThatJumpsHidesNoFlow: the clock jumps in either direction. Flows are returned in the order of their
// arrival, and are selected by the time that they contain.
func TestClockThatJumpsHidesNoFlow(t *testing.T) {
	b := newBench(t, 64<<20)
	// The clock is an hour behind from the third flow on, and a day ahead for the sixth flow.
	times := []int{4000, 4001, 400, 401, 402, 86_800, 403, 404}
	for _, second := range times {
		b.now = start.Add(time.Duration(second) * time.Second)
		b.add(second, 0)
	}
	for _, reopened := range []bool{false, true} {
		if reopened {
			if err := b.h.Close(); err != nil {
				t.Fatal(err)
			}
			b.open(64 << 20)
		}
		for _, c := range []struct {
			name string
			r    *observer.GetFlowsRequest
			want string
		}{
			{"all", &observer.GetFlowsRequest{}, "4000 4001 400 401 402 86800 403 404"},
			{"the last two", &observer.GetFlowsRequest{Number: 2}, "403 404"},
			{"the first two", &observer.GetFlowsRequest{Number: 2, First: true}, "4000 4001"},
			{"since", &observer.GetFlowsRequest{Since: at(403)}, "4000 4001 86800 403 404"},
			{"until", &observer.GetFlowsRequest{Until: at(402)}, "400 401 402"},
			{"between", &observer.GetFlowsRequest{Since: at(401), Until: at(4000)}, "4000 401 402 403 404"},
			{"the last two until", &observer.GetFlowsRequest{Until: at(4001), Number: 2}, "403 404"},
		} {
			s, err := b.ask(c.r, 0)
			if got := strings.Join(s.texts(), " "); err != nil || got != c.want {
				t.Errorf("%s, reopened %t: %q, %v; want %q", c.name, reopened, got, err, c.want)
			}
		}
		followed, err := b.ask(&observer.GetFlowsRequest{Follow: true, Since: at(0)}, len(times))
		if got := strings.Join(followed.texts(), " "); got != "4000 4001 400 401 402 86800 403 404" {
			t.Errorf("followed, reopened %t: %q, %v", reopened, got, err)
		}
	}
}
