// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
	"github.com/sluice-net/sluice/services/hubble/internal/api/observer"
	"github.com/sluice-net/sluice/services/hubble/internal/history"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/filter"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/mask"
)

// lossInterval is the shortest time between two messages about losses while flows are followed.
const lossInterval = time.Second

// answer is one call of GetFlows.
type answer struct {
	*Server
	request      *observer.GetFlowsRequest
	filter       *filter.Filter
	mask         mask.Mask
	since, until time.Time
	stream       grpc.ServerStreamingServer[observer.GetFlowsResponse]

	sent  uint64
	lost  *flow.LostEvent // not sent yet; nil if there is none
	toldT time.Time       // when the last loss was sent
}

// GetFlows implements the API.
func (s *Server) GetFlows(
	r *observer.GetFlowsRequest, stream grpc.ServerStreamingServer[observer.GetFlowsResponse],
) error {
	a, err := s.answer(r, stream)
	if err != nil {
		return err
	}
	last := s.o.History.Last()
	if !r.GetFollow() || r.GetNumber() > 0 || r.GetSince() != nil {
		if last, err = a.stored(stream.Context()); err != nil {
			return err
		}
	}
	if err := a.sendLost(); err != nil || !r.GetFollow() {
		return err
	}
	return a.follow(stream.Context(), last)
}

// answer checks a request.
func (s *Server) answer(
	r *observer.GetFlowsRequest, stream grpc.ServerStreamingServer[observer.GetFlowsResponse],
) (*answer, error) {
	if r.GetFirst() && r.GetFollow() {
		return nil, invalid("first", errFirstAndFollow)
	}
	a := &answer{Server: s, request: r, stream: stream}
	var err error
	if a.filter, err = filter.New(r.GetWhitelist(), r.GetBlacklist()); err != nil {
		if errors.Is(err, filter.ErrUnsupported) {
			return nil, status.Error(codes.Unimplemented, err.Error())
		}
		field := ""
		if e := (*filter.Error)(nil); errors.As(err, &e) {
			field, err = e.Field, e.Reason
		}
		return nil, invalid(field, err)
	}
	if a.mask, err = mask.New(r.GetFieldMask()); err != nil {
		return nil, invalid("field_mask", err)
	}
	for _, x := range []struct {
		field string
		from  *timestamppb.Timestamp
		to    *time.Time
	}{{"since", r.GetSince(), &a.since}, {"until", r.GetUntil(), &a.until}} {
		if x.from == nil {
			continue
		}
		if err := x.from.CheckValid(); err != nil {
			return nil, invalid(x.field, err)
		}
		*x.to = x.from.AsTime()
	}
	return a, nil
}

// stored sends the flows of the history, and returns the number of the last record that it considered.
func (a *answer) stored(ctx context.Context) (last uint64, err error) {
	select {
	case a.scans <- struct{}{}:
		defer func() { <-a.scans }()
	case <-ctx.Done():
		return 0, status.FromContextError(ctx.Err()).Err()
	}
	// A question that reaches back beyond what is left is answered with the time from which on the answer is complete.
	if !a.since.IsZero() {
		if until := a.o.History.Incomplete(a.since); !until.IsZero() {
			a.loss(&flow.LostEvent{
				Source: flow.LostEventSource_HUBBLE_RING_BUFFER, First: timestamppb.New(a.since), Last: timestamppb.New(until),
			})
		}
	}
	q := history.Query{
		From: a.since, To: a.until, Skip: a.filter.Excludes,
		Damaged: func(records int, from, to time.Time) {
			a.loss(&flow.LostEvent{
				Source: flow.LostEventSource_HUBBLE_RING_BUFFER, NumEventsLost: uint64(records),
				First: timestamppb.New(from), Last: timestamppb.New(to),
			})
		},
	}
	from := uint64(0)
	newest := a.request.GetNumber() > 0 && !a.request.GetFirst() && a.request.GetSince() == nil
	if newest {
		damaged := q.Damaged
		q.Damaged = nil // the second pass reports it
		if from, err = a.find(ctx, q); err != nil {
			return 0, err
		}
		q.Damaged = damaged
	}
	records, last := a.o.History.Forward(ctx, from, q)
	for r := range records {
		if a.request.GetNumber() > 0 && !newest && a.sent >= a.request.GetNumber() && !a.request.GetFollow() {
			return last, nil
		}
		if err := a.send(r); err != nil {
			return 0, err
		}
	}
	if err := ctx.Err(); err != nil {
		return 0, status.FromContextError(err).Err()
	}
	return last, nil
}

// find returns the number of the record with which the requested number of latest flows begins.
func (a *answer) find(ctx context.Context, q history.Query) (from uint64, err error) {
	found := uint64(0)
	for r := range a.o.History.Backward(ctx, q) {
		_, passes, err := a.passes(r)
		if err != nil {
			return 0, err
		}
		if !passes {
			continue
		}
		from = r.Number
		if found++; found == a.request.GetNumber() {
			break
		}
	}
	if found == 0 {
		from = a.o.History.Last() + 1
	}
	return from, nil
}

// follow sends new flows until the client ends the call, or until the requested time.
func (a *answer) follow(ctx context.Context, last uint64) error {
	bounded := ctx
	if !a.until.IsZero() {
		var cancel context.CancelFunc
		bounded, cancel = context.WithTimeout(ctx, a.until.Sub(a.o.Now()))
		defer cancel()
	}
	for {
		r, missed, err := a.o.History.Next(bounded, last)
		switch {
		case err != nil && ctx.Err() == nil: // until has passed
			return a.sendLost()
		case err != nil:
			return status.FromContextError(err).Err()
		}
		if missed > 0 {
			a.loss(&flow.LostEvent{
				Source: flow.LostEventSource_HUBBLE_RING_BUFFER, NumEventsLost: missed,
				First: timestamppb.New(r.Time), Last: timestamppb.New(r.Time),
			})
		}
		last = r.Number
		if err := a.send(r); err != nil {
			return err
		}
		if a.lost != nil && a.o.Now().Sub(a.toldT) >= lossInterval {
			if err := a.sendLost(); err != nil {
				return err
			}
		}
	}
}

// passes returns the flow of a record, and whether the request selects it.
func (a *answer) passes(r history.Record) (*flow.Flow, bool, error) {
	if r.Loss || !a.since.IsZero() && r.Time.Before(a.since) || !a.until.IsZero() && r.Time.After(a.until) {
		return nil, false, nil
	}
	f := &flow.Flow{}
	if err := proto.Unmarshal(r.Data, f); err != nil {
		return nil, false, fmt.Errorf("record %d of the history: %w", r.Number, err)
	}
	return f, a.filter.Match(f), nil
}

// send sends a record if the request selects it.
func (a *answer) send(r history.Record) error {
	if r.Loss {
		l := &flow.LostEvent{}
		if err := proto.Unmarshal(r.Data, l); err != nil {
			return fmt.Errorf("record %d of the history: %w", r.Number, err)
		}
		if a.since.IsZero() || !l.GetLast().AsTime().Before(a.since) {
			a.loss(l)
		}
		return nil
	}
	f, ok, err := a.passes(r)
	if err != nil || !ok {
		return err
	}
	if !a.request.GetFollow() { // at the position where flows are missing
		if err := a.sendLost(); err != nil {
			return err
		}
	}
	a.sent++
	node, at := f.GetNodeName(), f.GetTime()
	return a.stream.Send(&observer.GetFlowsResponse{
		NodeName: node, Time: at, ResponseTypes: &observer.GetFlowsResponse_Flow{Flow: a.mask.Apply(f)},
	})
}

// loss adds a loss to the one that is not sent yet. Clients print one line for each message, so losses are merged.
func (a *answer) loss(l *flow.LostEvent) {
	if a.lost == nil {
		a.lost = l
		return
	}
	if a.lost.GetSource() != l.GetSource() {
		a.lost.Source = flow.LostEventSource_UNKNOWN_LOST_EVENT_SOURCE
	}
	a.lost.NumEventsLost += l.GetNumEventsLost()
	if l.GetFirst().AsTime().Before(a.lost.GetFirst().AsTime()) {
		a.lost.First = l.GetFirst()
	}
	if l.GetLast().AsTime().After(a.lost.GetLast().AsTime()) {
		a.lost.Last = l.GetLast()
	}
}

// sendLost sends the losses since the last message about losses.
func (a *answer) sendLost() error {
	if a.lost == nil {
		return nil
	}
	l := a.lost
	a.lost, a.toldT = nil, a.o.Now()
	return a.stream.Send(&observer.GetFlowsResponse{
		NodeName: a.o.Node(), Time: timestamppb.New(a.o.Now()),
		ResponseTypes: &observer.GetFlowsResponse_LostEvents{LostEvents: l},
	})
}
