// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"bytes"
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
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/filter"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/mask"
)

// lossInterval is the shortest time between two messages about losses while flows are followed.
const lossInterval = time.Second

// Bounds of one turn of a call with the history. Between two turns other calls have theirs, and the call sends what it
// found: a client that does not read delays no other client.
const (
	turnBytes = 256 << 10
	turnTime  = 100 * time.Millisecond
)

// answer is one call of GetFlows.
type answer struct {
	*Server
	request      *observer.GetFlowsRequest
	view         hubbleflow.View
	filter       *filter.Filter
	mask         mask.Mask
	since, until time.Time
	stream       grpc.ServerStreamingServer[observer.GetFlowsResponse]

	found   uint64          // stored flows that the request selects
	corrupt map[uint64]bool // corrupt files that are reported
	lost    *flow.LostEvent // not sent yet; nil if there is none
	toldT   time.Time       // when the last loss was sent
}

// GetFlows implements the API.
func (s *Server) GetFlows(
	r *observer.GetFlowsRequest, stream grpc.ServerStreamingServer[observer.GetFlowsResponse],
) error {
	view, err := s.view(stream.Context())
	if err != nil {
		return err
	}
	a, err := s.answer(view, r, stream)
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
	view hubbleflow.View, r *observer.GetFlowsRequest, stream grpc.ServerStreamingServer[observer.GetFlowsResponse],
) (*answer, error) {
	if r.GetFirst() && r.GetFollow() {
		return nil, invalid("first", errFirstAndFollow)
	}
	a := &answer{Server: s, view: view, request: r, stream: stream, corrupt: make(map[uint64]bool)}
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
	if last = a.o.History.Last(); last == 0 {
		return 0, nil
	}
	// A question that reaches back beyond what is left is answered with the time from which on the answer is complete.
	if !a.since.IsZero() {
		if until := a.o.History.Incomplete(a.since); !until.IsZero() {
			a.missing(0, a.since, until)
		}
	}
	next := uint64(1)
	if a.newest() {
		if next, err = a.find(ctx, last); err != nil {
			return 0, err
		}
	}
	for next <= last {
		var batch []message
		if next, batch, err = a.collect(ctx, next, last); err != nil {
			return 0, err
		}
		for _, m := range batch {
			if err := a.sendStored(m); err != nil {
				return 0, err
			}
		}
	}
	return last, nil
}

// newest reports whether the request asks for a number of latest flows.
func (a *answer) newest() bool {
	return a.request.GetNumber() > 0 && !a.request.GetFirst() && a.request.GetSince() == nil
}

// query selects the records from first to last.
func (a *answer) query(first, last uint64) history.Query {
	q := history.Query{First: first, Last: last, From: a.since, To: a.until}
	// Indices have names of all tenants. A tenant's reader could find out by the time of an answer whether one exists.
	if a.view.All() {
		q.Skip = a.filter.Excludes
	}
	return q
}

// turn waits for a turn with the history. The caller ends it with done, and asks over whether it has lasted too long.
func (a *answer) turn(ctx context.Context) (over func() bool, done func(), err error) {
	select {
	case a.scans <- struct{}{}:
		began := time.Now()
		return func() bool { return time.Since(began) > turnTime }, func() { <-a.scans }, nil
	case <-ctx.Done():
		return nil, nil, status.FromContextError(ctx.Err()).Err()
	}
}

// find returns the number of the record with which the requested number of latest flows begins.
func (a *answer) find(ctx context.Context, last uint64) (first uint64, err error) {
	first, found := last+1, uint64(0)
	for next := last; next > 0 && found < a.request.GetNumber(); {
		if next, err = a.findSome(ctx, next, &first, &found); err != nil {
			return 0, err
		}
	}
	return first, nil
}

// findSome looks at the records up to last during one turn, and returns the number of the last record that it did not
// look at.
func (a *answer) findSome(ctx context.Context, last uint64, first, found *uint64) (next uint64, err error) {
	over, done, err := a.turn(ctx)
	if err != nil {
		return 0, err
	}
	defer done()
	for r := range a.o.History.Backward(ctx, a.query(0, last)) {
		if _, passes, err := a.passes(r); err == nil && passes {
			*first = r.Number
			*found++
		}
		if *found == a.request.GetNumber() || over() {
			return r.Number - 1, nil
		}
	}
	return 0, contextError(ctx)
}

// message is a stored record to send, or a loss.
type message struct {
	record history.Record
	lost   *flow.LostEvent
}

// collect returns the messages for the records from first to last, and the number of the first record that it did not
// look at. It ends with its turn.
func (a *answer) collect(ctx context.Context, first, last uint64) (next uint64, batch []message, err error) {
	over, done, err := a.turn(ctx)
	if err != nil {
		return 0, nil, err
	}
	defer done()
	q := a.query(first, last)
	q.Corrupt = func(file uint64, records int, from, to time.Time) {
		if !a.corrupt[file] {
			a.corrupt[file] = true
			a.missing(uint64(records), from, to)
		}
	}
	size, enough := 0, a.request.GetNumber()
	if a.newest() || a.request.GetFollow() {
		enough = 0
	}
	for r := range a.o.History.Forward(ctx, q) {
		if enough > 0 && a.found >= enough {
			return last + 1, batch, nil
		}
		_, ok, err := a.passes(r)
		switch {
		case err != nil:
			a.missing(1, r.Time, r.Time)
		case r.Loss:
			a.addLoss(r)
		case ok:
			if a.lost != nil && !a.request.GetFollow() { // at the position where flows are missing
				batch = append(batch, message{lost: a.lost})
				a.lost = nil
			}
			a.found++
			r.Data = bytes.Clone(r.Data) // a part of a file, which would stay in memory
			batch = append(batch, message{record: r})
			size += len(r.Data)
		}
		if size >= turnBytes || over() {
			return r.Number + 1, batch, nil
		}
	}
	return last + 1, batch, contextError(ctx)
}

func contextError(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return status.FromContextError(err).Err()
	}
	return nil
}

// sendStored sends a message of the history.
func (a *answer) sendStored(m message) error {
	if m.lost != nil {
		return a.sendLoss(m.lost)
	}
	f, err := a.flow(m.record)
	if err != nil || f == nil {
		return err
	}
	return a.send(f)
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
		r, missed, err := a.next(bounded, last)
		switch {
		case errors.Is(err, errQuiet):
			if err := a.sendLost(); err != nil {
				return err
			}
			continue
		case err != nil && ctx.Err() == nil: // until has passed
			return a.sendLost()
		case err != nil:
			return status.FromContextError(err).Err()
		}
		if missed > 0 {
			a.missing(missed, r.Time, r.Time)
		}
		last = r.Number
		f, ok, err := a.passes(r)
		switch {
		case err != nil:
			a.missing(1, r.Time, r.Time)
		case r.Loss:
			a.addLoss(r)
		case ok:
			if err := a.send(f); err != nil {
				return err
			}
		}
		if a.lost != nil && a.o.Now().Sub(a.toldT) >= lossInterval {
			if err := a.sendLost(); err != nil {
				return err
			}
		}
	}
}

// errQuiet is returned if no record arrives before a loss is due.
var errQuiet = errors.New("a loss is due")

// next waits for the next record. A loss that was not sent yet is sent even if no further record arrives.
func (a *answer) next(ctx context.Context, last uint64) (r history.Record, missed uint64, err error) {
	if a.lost == nil {
		return a.o.History.Next(ctx, last)
	}
	due, cancel := context.WithTimeoutCause(ctx, lossInterval-a.o.Now().Sub(a.toldT), errQuiet)
	defer cancel()
	r, missed, err = a.o.History.Next(due, last)
	if err != nil && errors.Is(context.Cause(due), errQuiet) {
		err = errQuiet
	}
	return r, missed, err
}

// decode returns the flow of a record.
func decode(r history.Record) (*flow.Flow, error) {
	f := &flow.Flow{}
	if err := proto.Unmarshal(r.Data, f); err != nil {
		return nil, fmt.Errorf("record %d of the history: %w", r.Number, err)
	}
	return f, nil
}

// passes returns the flow of a record, and whether the request selects it.
func (a *answer) passes(r history.Record) (*flow.Flow, bool, error) {
	if r.Loss || !a.since.IsZero() && r.Time.Before(a.since) || !a.until.IsZero() && r.Time.After(a.until) {
		return nil, false, nil
	}
	f, err := a.flow(r)
	if err != nil || f == nil {
		return nil, false, err
	}
	return f, a.filter.Match(f), nil
}

// flow returns what the client may see of the flow of a record; nil if that is nothing. Filters and masks get nothing
// else.
func (a *answer) flow(r history.Record) (*flow.Flow, error) {
	f, err := decode(r)
	if err != nil {
		return nil, err
	}
	return a.view.Flow(f), nil
}

// send sends a flow.
func (a *answer) send(f *flow.Flow) error {
	node, at := f.GetNodeName(), f.GetTime()
	return a.stream.Send(&observer.GetFlowsResponse{
		NodeName: node, Time: at, ResponseTypes: &observer.GetFlowsResponse_Flow{Flow: a.mask.Apply(f)},
	})
}

// missing reports that flows of a time are missing; count is 0 if their number is not known.
func (a *answer) missing(count uint64, from, to time.Time) {
	a.loss(&flow.LostEvent{
		Source: flow.LostEventSource_HUBBLE_RING_BUFFER, NumEventsLost: count,
		First: timestamppb.New(from), Last: timestamppb.New(to),
	})
}

// addLoss reports the loss of a record, unless it is earlier than the request.
func (a *answer) addLoss(r history.Record) {
	l := &flow.LostEvent{}
	if err := proto.Unmarshal(r.Data, l); err != nil {
		a.missing(1, r.Time, r.Time)
		return
	}
	if a.since.IsZero() || !l.GetLast().AsTime().Before(a.since) {
		a.loss(l)
	}
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
	a.lost = nil
	return a.sendLoss(l)
}

func (a *answer) sendLoss(l *flow.LostEvent) error {
	a.toldT = a.o.Now()
	if !a.view.All() { // how many of the lost flows are of the tenant is not known
		l.NumEventsLost = 0
	}
	return a.stream.Send(&observer.GetFlowsResponse{
		NodeName: a.o.Node(), Time: timestamppb.New(a.o.Now()),
		ResponseTypes: &observer.GetFlowsResponse_LostEvents{LostEvents: l},
	})
}
