// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/log"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/record"
)

// observed receives the answers of Observe. It ends the call after enough of them.
type observed struct {
	grpc.ServerStream
	ctx    context.Context
	cancel context.CancelFunc
	enough int
	got    []*datapathv1.ObserveResponse
}

func (s *observed) Context() context.Context   { return s.ctx }
func (*observed) SendHeader(metadata.MD) error { return nil }
func (s *observed) Send(m *datapathv1.ObserveResponse) error {
	s.got = append(s.got, proto.CloneOf(m))
	if s.enough > 0 && len(s.got) >= s.enough {
		s.cancel()
	}
	return nil
}

// texts returns the ID of each event, and the source and number of each loss.
func (s *observed) texts() (texts []string) {
	for _, m := range s.got {
		switch {
		case m.GetLost() != nil:
			texts = append(texts, fmt.Sprint(m.GetLost().GetSource(), " ", m.GetLost().GetCount()))
		case m.GetRepair() != nil:
			texts = append(texts, m.GetRepair().GetUuid())
		default:
			texts = append(texts, m.GetFlow().GetUuid())
		}
	}
	return texts
}

// observe requests stored events, and ends the call after enough answers.
func (b *bench) observe(r *datapathv1.ObserveRequest, enough int) (*observed, error) {
	ctx, cancel := context.WithCancel(b.t.Context())
	defer cancel()
	s := &observed{ctx: ctx, cancel: cancel, enough: enough}
	return s, stored{Server: b.Server}.Observe(r, s)
}

// recorder returns a sink for events of the datapath that writes to the history of the bench.
func (b *bench) recorder() *record.Recorder {
	b.flow, b.describe = record.Flow(hubbleflow.Converter{}), record.Describe
	return record.New(record.Options{History: b.h, Metrics: noMetrics{}, Now: time.Now, Log: log.Discard()})
}

// TestStoredEventsAreObservedAsTheDatapathSentThem: several thousand random events and a repair are returned
// unchanged. Criteria, times and positions select the same events as a comparison of all events.
func TestStoredEventsAreObservedAsTheDatapathSentThem(t *testing.T) {
	const count = 6_000 // more events than are kept in memory
	b := newBench(t, 8<<20)
	r := rand.New(rand.NewPCG(40, uint64(time.Now().UnixNano()))) //nolint:gosec // a test
	sink := b.recorder()
	var events []*datapathv1.Flow
	for i := range count {
		f := randomEvent(r, i, start.Add(time.Duration(i)*time.Second))
		events = append(events, f)
		sink.Flow(f)
	}
	repair := &datapathv1.AttachmentRepair{
		Time: timestamppb.New(start.Add(count * time.Second)), Uuid: "repair", NodeName: "node-1", Identity: 300,
		Owner: &workloadv1.Owner{ContainerId: "c1", InterfaceName: "eth0"},
		Pod:   &workloadv1.PodReference{Namespace: "team-1", Name: "pod-x"},
	}
	sink.Repair(repair)
	s, err := b.observe(&datapathv1.ObserveRequest{}, 0)
	if err != nil || len(s.got) != count+1 {
		t.Fatalf("%d events of %d, %v", len(s.got), count+1, err)
	}
	for i, m := range s.got[:count] {
		if !proto.Equal(m.GetFlow(), events[i]) {
			t.Fatalf("event %d is answered as %v, want %v", i, m, events[i])
		}
	}
	if !proto.Equal(s.got[count].GetRepair(), repair) {
		t.Errorf("the repair is answered as %v", s.got[count])
	}
	if s, err := b.ask(nil, 0); err != nil || len(s.got) != count {
		t.Errorf("Hubble's API answers %d flows, want %d, %v", len(s.got), count, err)
	}
	dropped := func(f *datapathv1.Flow) bool { return f.GetVerdict() == datapathv1.Verdict_VERDICT_DROPPED }
	isPod := func(e *datapathv1.FlowEnd) bool {
		return e.GetPod().GetNamespace() == "team-2" && e.GetPod().GetName() == "pod-8"
	}
	after := func(n int) func(f *datapathv1.Flow) bool {
		return func(f *datapathv1.Flow) bool {
			return f.GetTime().AsTime().After(start.Add(time.Duration(n) * time.Second))
		}
	}
	drop := []datapathv1.Verdict{datapathv1.Verdict_VERDICT_DROPPED}
	pods := []*datapathv1.PodName{{Namespace: "team-2", Name: "pod-8"}}
	for name, x := range map[string]struct {
		request *datapathv1.ObserveRequest
		selects func(*datapathv1.Flow) bool
		last    int
		repair  bool
	}{
		"verdict": {&datapathv1.ObserveRequest{Verdicts: drop}, dropped, 0, false},
		"pod": {
			&datapathv1.ObserveRequest{Pods: pods},
			func(f *datapathv1.Flow) bool { return isPod(f.GetSource()) || isPod(f.GetDestination()) }, 0, false,
		},
		"sender": {
			&datapathv1.ObserveRequest{Source: &datapathv1.FlowEndCriteria{Pods: pods}},
			func(f *datapathv1.Flow) bool { return isPod(f.GetSource()) }, 0, false,
		},
		"all but the drops": {
			&datapathv1.ObserveRequest{Excluded: []*datapathv1.FlowCriteria{{Verdicts: drop}}},
			func(f *datapathv1.Flow) bool { return !dropped(f) }, 0, true,
		},
		"address": {
			&datapathv1.ObserveRequest{Destination: &datapathv1.FlowEndCriteria{Prefixes: []string{"192.0.2.0/24"}}},
			func(f *datapathv1.Flow) bool { return f.GetDestination().GetPort() == 443 }, 0, false,
		},
		"label": {
			&datapathv1.ObserveRequest{Selectors: []*datapathv1.LabelSelector{{Requirements: []*datapathv1.LabelRequirement{{
				Source: "reserved", Key: "world", Operator: datapathv1.LabelOperator_LABEL_OPERATOR_EXISTS,
			}}}}},
			func(f *datapathv1.Flow) bool {
				return f.GetSource().GetIdentity() == 2 || f.GetDestination().GetIdentity() == 2
			},
			0, false,
		},
		"since": {&datapathv1.ObserveRequest{Since: at(5001)}, after(5000), 0, true},
		"until": {
			&datapathv1.ObserveRequest{Until: at(100)}, func(f *datapathv1.Flow) bool { return !after(100)(f) }, 0, false,
		},
		"the last drops": {&datapathv1.ObserveRequest{Verdicts: drop, Last: 7}, dropped, 7, false},
		"after an event": {&datapathv1.ObserveRequest{AfterUuid: "event-30", Verdicts: drop}, func(f *datapathv1.Flow) bool {
			return dropped(f) && after(30)(f)
		}, 0, false},
	} {
		var want []string
		for _, f := range events {
			if x.selects(f) {
				want = append(want, f.GetUuid())
			}
		}
		if x.repair {
			want = append(want, "repair")
		}
		if x.last > 0 {
			want = want[len(want)-x.last:]
		}
		if s, err := b.observe(x.request, 0); err != nil || !slices.Equal(s.texts(), want) {
			t.Errorf("%s: %d events, want %d, %v", name, len(s.got), len(want), err)
		}
	}
}

// TestObserveFollowsAndReportsLosses: new events follow the stored events, and losses keep their source. If the
// requested position is unknown, this is reported before all stored events.
func TestObserveFollowsAndReportsLosses(t *testing.T) {
	b := newBench(t, 4<<20)
	r := rand.New(rand.NewPCG(40, 1)) //nolint:gosec // a test
	sink := b.recorder()
	sink.Flow(randomEvent(r, 1, start))
	sink.Lost(datapathv1.LossSource_LOSS_SOURCE_KERNEL, 5)
	sink.Flow(randomEvent(r, 2, start.Add(time.Second)))
	s, err := b.observe(&datapathv1.ObserveRequest{}, 0)
	if got := s.texts(); err != nil || !slices.Equal(got, []string{"event-1", "LOSS_SOURCE_KERNEL 5", "event-2"}) {
		t.Errorf("stored: %v, %v", got, err)
	}
	s, err = b.observe(&datapathv1.ObserveRequest{AfterUuid: "another"}, 0)
	if got := s.texts(); err != nil ||
		!slices.Equal(got, []string{"LOSS_SOURCE_RESTART 0", "event-1", "LOSS_SOURCE_KERNEL 5", "event-2"}) {
		t.Errorf("after an unknown event: %v, %v", got, err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s, err = b.observe(&datapathv1.ObserveRequest{Follow: true, AfterUuid: "event-2"}, 2)
	}()
	sink.Flow(randomEvent(r, 3, start.Add(2*time.Second)))
	sink.Flow(randomEvent(r, 4, start.Add(3*time.Second)))
	<-ended
	if got := s.texts(); status.Code(err) != codes.Canceled || !slices.Equal(got, []string{"event-3", "event-4"}) {
		t.Errorf("followed: %v, %v", got, err)
	}
	_, err = b.observe(&datapathv1.ObserveRequest{Excluded: []*datapathv1.FlowCriteria{{}}}, 0)
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("an empty exclusion: %v", err)
	}
}
