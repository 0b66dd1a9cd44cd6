// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
	"github.com/sluice-net/sluice/services/hubble/internal/api/observer"
	"github.com/sluice-net/sluice/services/hubble/internal/history"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/filter"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/mask"
)

// answer is one call of GetFlows.
type answer struct {
	reading

	view   hubbleflow.View
	filter *filter.Filter
	mask   mask.Mask
	stream grpc.ServerStreamingServer[observer.GetFlowsResponse]
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
		if last, err = a.stored(stream.Context(), 1); err != nil {
			return err
		}
	}
	if err := a.sendLost(); err != nil || !r.GetFollow() {
		return err
	}
	return a.follow(stream.Context(), last)
}

// answer checks a request, and prepares the call.
func (s *Server) answer(
	view hubbleflow.View, r *observer.GetFlowsRequest, stream grpc.ServerStreamingServer[observer.GetFlowsResponse],
) (*answer, error) {
	if r.GetFirst() && r.GetFollow() {
		return nil, invalid("first", errFirstAndFollow)
	}
	a := &answer{view: view, stream: stream, reading: reading{
		Server: s, number: r.GetNumber(), newest: r.GetNumber() > 0 && !r.GetFirst() && r.GetSince() == nil,
		following: r.GetFollow(), corrupt: make(map[uint64]bool),
	}}
	a.pick, a.sendLoss = a.passes, a.sendLostFlows
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
	// Indices contain names of all tenants. If they were used for the client of one tenant, it could find out by the
	// time of an answer whether a name of another tenant exists.
	if view.All() {
		a.skip = a.filter.Excludes
	} else {
		// Apart from the tenant's own parts, only history.Others and history.Unknown may have records of this tenant.
		parts := append(view.Parts(), history.Others, history.Unknown)
		a.concerns = func(part string) bool { return slices.Contains(parts, part) }
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

// decode returns the flow of a record; nil if the record contains another event.
func (s *Server) decode(r history.Record) (*flow.Flow, error) {
	f, err := s.o.Flow(r.Data)
	if err != nil {
		return nil, fmt.Errorf("record %d of the history: %w", r.Number, err)
	}
	return f, nil
}

// passes returns a function that sends the flow of a record; nil if the request does not select the flow.
func (a *answer) passes(r history.Record) (send func() error, err error) {
	f, err := a.flow(r)
	if err != nil || f == nil || !a.filter.Match(f) {
		return nil, err
	}
	return func() error { return a.send(f) }, nil
}

// flow returns the part of a record's flow that the client may see; nil if it may see nothing. Filters and field
// masks apply only to this part.
func (a *answer) flow(r history.Record) (*flow.Flow, error) {
	f, err := a.decode(r)
	if err != nil || f == nil {
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

func (a *answer) sendLostFlows(l *flow.LostEvent) error {
	if !a.view.All() { // it is unknown how many of the lost flows belong to the tenant
		l.NumEventsLost = 0
	}
	return a.stream.Send(&observer.GetFlowsResponse{
		NodeName: a.o.Node(), Time: timestamppb.New(a.o.Now()),
		ResponseTypes: &observer.GetFlowsResponse_LostEvents{LostEvents: l},
	})
}
