// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"bytes"
	"cmp"
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	model "github.com/sluice-net/sluice/model/flow"
	"github.com/sluice-net/sluice/model/label"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/proto/wire/flowwire"
	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
	"github.com/sluice-net/sluice/services/hubble/internal/history"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/record"
)

// stored serves the stored events through the API of the datapath, for `sluice observe`.
type stored struct {
	datapathv1.UnimplementedObserverServiceServer
	*Server
}

// observing is one call of Observe.
type observing struct {
	reading

	filter model.Filter
	stream grpc.ServerStreamingServer[datapathv1.ObserveResponse]
}

// Observe implements the API of the datapath for stored events, with the same filters. The history does not know the
// backends of Services. So the criterion service selects only packets that were sent to the address of the Service.
func (s stored) Observe(
	r *datapathv1.ObserveRequest, stream grpc.ServerStreamingServer[datapathv1.ObserveResponse],
) error {
	filter, err := flowwire.FilterOf(r)
	if field := (*flowwire.FieldError)(nil); errors.As(err, &field) {
		return invalid(field.Field, errors.New(field.Reason))
	}
	ctx := stream.Context()
	o := &observing{filter: filter, stream: stream, reading: reading{
		Server: s.Server, number: uint64(r.GetLast()), newest: r.GetLast() > 0, following: r.GetFollow(),
		until: filter.Until, corrupt: make(map[uint64]bool),
	}}
	o.pick, o.sendLoss = o.event, o.sendLostEvents
	if r.GetSince() != nil && r.GetAfterUuid() == "" {
		o.since = r.GetSince().AsTime()
	}
	// Send the header at once, so that a client that reconnects knows that the stream is open, even if there are no
	// events.
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	first, last := uint64(1), s.o.History.Last()
	if id := r.GetAfterUuid(); id != "" {
		known, err := o.numberOf(ctx, last, id)
		if err != nil {
			return err
		}
		if first = known + 1; known == 0 {
			if err := o.sendLostEvents(&flow.LostEvent{}); err != nil {
				return err
			}
		}
	}
	if !r.GetFollow() || r.GetLast() > 0 || r.GetSince() != nil || r.GetAfterUuid() != "" {
		if last, err = o.stored(ctx, first); err != nil {
			return err
		}
	}
	if err := o.sendLost(); err != nil || !r.GetFollow() {
		return err
	}
	return o.follow(ctx, last)
}

// numberOf returns the number of the record that contains the event with an ID; 0 without such a record.
func (o *observing) numberOf(ctx context.Context, last uint64, id string) (number uint64, err error) {
	for last > 0 && number == 0 {
		if last, number, err = o.numberBefore(ctx, last, id); err != nil {
			return 0, err
		}
	}
	return number, nil
}

// numberBefore searches the records backwards, from the record last, for the event with an ID. It stops at the end of
// its turn. It returns the number of the record. If it found none, number is 0, and next is the record with which the
// next turn continues, or 0 if all records were searched.
func (o *observing) numberBefore(ctx context.Context, last uint64, id string) (next, number uint64, err error) {
	over, done, err := o.turn(ctx)
	if err != nil {
		return 0, 0, err
	}
	defer done()
	for r := range o.o.History.Backward(ctx, history.Query{Last: last}) {
		if !r.Loss && bytes.Contains(r.Data, []byte(id)) {
			m, err := record.Event(r.Data)
			if err == nil && cmp.Or(m.GetFlow().GetUuid(), m.GetRepair().GetUuid()) == id {
				return 0, r.Number, nil
			}
		}
		if over() {
			return r.Number - 1, 0, nil
		}
	}
	return 0, 0, contextError(ctx)
}

// event returns a function that sends the event of a record; nil if the request does not select the event.
func (o *observing) event(r history.Record) (send func() error, err error) {
	m, err := record.Event(r.Data)
	if err != nil {
		return nil, err
	}
	if m.GetFlow() != nil && m.GetFlow().GetTime() == nil { // the rest of a deleted event
		return nil, nil
	}
	e := flowwire.EventOf(m)
	if !o.filter.Match(e, labelsIn(m.GetFlow())) {
		return nil, nil
	}
	return func() error { return o.stream.Send(m) }, nil
}

// labelsIn returns a function that looks up the labels of identities in an event.
func labelsIn(f *datapathv1.Flow) model.LabelsOf {
	return func(identity uint32) ([]label.Label, bool) {
		for _, end := range []*datapathv1.FlowEnd{f.GetSource(), f.GetDestination()} {
			if end.GetIdentity() == identity && len(end.GetLabels()) > 0 {
				return wire.LabelsOf(end.GetLabels()), true
			}
		}
		return nil, false
	}
}

// sendLostEvents sends a loss as a message of the datapath's API.
func (o *observing) sendLostEvents(l *flow.LostEvent) error {
	lost := &datapathv1.LostEvents{Count: l.GetNumEventsLost(), FirstTime: l.GetFirst(), LastTime: l.GetLast()}
	switch l.GetSource() {
	case flow.LostEventSource_PERF_EVENT_RING_BUFFER:
		lost.Source = datapathv1.LossSource_LOSS_SOURCE_KERNEL
	case flow.LostEventSource_OBSERVER_EVENTS_QUEUE:
		lost.Source = datapathv1.LossSource_LOSS_SOURCE_OBSERVER
	default:
		lost.Source = datapathv1.LossSource_LOSS_SOURCE_HISTORY
		if l.GetSource() == flow.LostEventSource_UNKNOWN_LOST_EVENT_SOURCE && lost.GetCount() == 0 {
			lost.Source = datapathv1.LossSource_LOSS_SOURCE_RESTART
		}
	}
	return o.stream.Send(&datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Lost{Lost: lost}})
}
