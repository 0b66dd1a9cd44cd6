// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/model/flow"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/observe"
)

// observeStream records its messages, and may be slow.
type observeStream struct {
	grpc.ServerStream
	ctx  context.Context
	got  []string
	each func(n int)
}

func (s *observeStream) Context() context.Context { return s.ctx }

func (s *observeStream) SendHeader(metadata.MD) error { return nil }

func (s *observeStream) Send(r *datapathv1.ObserveResponse) error {
	switch {
	case r.GetFlow() != nil:
		s.got = append(s.got, fmt.Sprint("flow ", r.GetFlow().GetLength()))
	case r.GetLost() != nil:
		s.got = append(s.got, fmt.Sprint(r.GetLost().GetSource(), " ", r.GetLost().GetCount()))
	case r.GetRepair() != nil:
		s.got = append(s.got, "repair")
	}
	if s.each != nil {
		s.each(len(s.got))
	}
	return nil
}

// TestObserveTellsLossesInTheirPlace tests that losses are reported at their position, even if the events around them
// do not pass the filter, unless the filter excludes the reason of the lost events.
func TestObserveTellsLossesInTheirPlace(t *testing.T) {
	ring := observe.NewRing()
	add := func(n uint32, reason event.Reason, kernelLost uint32) {
		ring.Add(flow.Event{
			Type: flow.Drop, Reason: uint32(reason), Length: n, KernelLost: kernelLost, Time: time.Unix(int64(n), 0),
		})
	}
	add(1, event.NoRoute, 0)
	add(2, event.SpoofedIP, 7)
	ring.Add(flow.Event{Type: flow.Repair, Time: time.Unix(2, 0)})
	add(3, event.NoRoute, 9)
	ring.Add(flow.Event{KernelLost: 5, Time: time.Unix(4, 0)}) // the end of a flood
	s := &Server{ring: ring}
	for name, c := range map[string]struct {
		r    *datapathv1.ObserveRequest
		want []string
	}{
		"everything": {&datapathv1.ObserveRequest{}, []string{
			"flow 1", "LOSS_SOURCE_KERNEL 7", "flow 2", "repair", "LOSS_SOURCE_KERNEL 9", "flow 3", "LOSS_SOURCE_KERNEL 5",
		}},
		"one reason": {&datapathv1.ObserveRequest{Reasons: []datapathv1.Reason{datapathv1.Reason_REASON_NO_ROUTE}}, []string{
			"flow 1", "LOSS_SOURCE_KERNEL 9", "flow 3", "LOSS_SOURCE_KERNEL 5",
		}},
		"the last two": {&datapathv1.ObserveRequest{Last: 2}, []string{
			"repair", "LOSS_SOURCE_KERNEL 9", "flow 3", "LOSS_SOURCE_KERNEL 5",
		}},
		"the last two of a reason": {
			&datapathv1.ObserveRequest{Last: 2, Reasons: []datapathv1.Reason{datapathv1.Reason_REASON_NO_ROUTE}},
			[]string{"flow 1", "LOSS_SOURCE_KERNEL 9", "flow 3", "LOSS_SOURCE_KERNEL 5"},
		},
		"more than there are": {
			&datapathv1.ObserveRequest{Last: 4096, Until: timestamppb.New(time.Unix(1, 0))}, []string{
				"flow 1",
				"LOSS_SOURCE_KERNEL 21",
			},
		},
		"with an end": {
			&datapathv1.ObserveRequest{Until: timestamppb.New(time.Unix(2, 0)), Follow: true, Last: 4096},
			[]string{
				"flow 1", "LOSS_SOURCE_KERNEL 7", "flow 2", "repair", "LOSS_SOURCE_KERNEL 14",
			},
		},
		"of another run": {&datapathv1.ObserveRequest{
			AfterUuid: "01000000-0000-8f00-8000-000000000009", Types: []datapathv1.FlowType{datapathv1.FlowType_FLOW_TYPE_DROP},
		}, []string{
			"LOSS_SOURCE_RESTART 0", "flow 1", "LOSS_SOURCE_KERNEL 7", "flow 2", "LOSS_SOURCE_KERNEL 9", "flow 3",
			"LOSS_SOURCE_KERNEL 5",
		}},
	} {
		stream := &observeStream{ctx: t.Context()}
		if err := s.Observe(c.r, stream); err != nil || !slices.Equal(stream.got, c.want) {
			t.Errorf("%s: %v, %v, want %v", name, stream.got, err, c.want)
		}
	}

	// A request with the UUID of the last received event gets the events after it.
	rd := ring.Read(time.Time{})
	first, _, _, err := rd.Next(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	after := &observeStream{ctx: t.Context()}
	if err := s.Observe(&datapathv1.ObserveRequest{AfterUuid: uuid(first.ID)}, after); err != nil ||
		!slices.Equal(after.got, []string{
			"LOSS_SOURCE_KERNEL 7", "flow 2", "repair", "LOSS_SOURCE_KERNEL 9", "flow 3", "LOSS_SOURCE_KERNEL 5",
		}) {
		t.Errorf("after the first: %v, %v", after.got, err)
	}

	// a reader that is slower than the ring
	stream := &observeStream{ctx: t.Context()}
	stream.each = func(n int) {
		if n > 1 {
			return
		}
		for i := range uint32(observe.Size + 10) {
			add(1000+i, event.NoRoute, 0)
		}
	}
	if err := s.Observe(&datapathv1.ObserveRequest{}, stream); err != nil {
		t.Fatal(err)
	}
	// 14 events were overwritten: the first four, and ten of the new ones
	want := []string{"flow 1", "LOSS_SOURCE_OBSERVER 14", "flow 1010"}
	if len(stream.got) != observe.Size+2 || !slices.Equal(stream.got[:3], want) {
		t.Errorf("%d messages, the first %v, want %v", len(stream.got), stream.got[:3], want)
	}
}

// TestObserveEndsThoughEventsNeverPause tests that a caller with an end time is not held up by later events.
func TestObserveEndsThoughEventsNeverPause(t *testing.T) {
	ring := observe.NewRing()
	s := &Server{ring: ring}
	ended := make(chan error, 1)
	go func() {
		ended <- s.Observe(&datapathv1.ObserveRequest{Follow: true, Until: timestamppb.New(time.Unix(100, 0))},
			&observeStream{ctx: t.Context()})
	}()
	for n := int64(200); ; n++ {
		ring.Add(flow.Event{Type: flow.Drop, Time: time.Unix(n, 0)})
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
			return
		default:
		}
	}
}

func TestObserveFollowsUntilTheCallerGoes(t *testing.T) {
	ring := observe.NewRing()
	ring.Add(flow.Event{Type: flow.Drop, Length: 1, Time: time.Unix(1, 0)})
	s := &Server{ring: ring}
	ctx, cancel := context.WithCancel(t.Context())
	stream := &observeStream{ctx: ctx}
	stream.each = func(n int) {
		if n == 2 {
			cancel()
		}
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Observe(&datapathv1.ObserveRequest{Follow: true}, stream) }()
	var err error
	for n := uint32(2); err == nil; n++ {
		ring.Add(flow.Event{Type: flow.Drop, Length: n, Time: time.Unix(int64(n), 0)})
		select {
		case err = <-ended:
		default:
		}
	}
	if len(stream.got) < 2 || stream.got[0] == "flow 1" {
		t.Errorf("got %v, want the later events", stream.got)
	}
}
