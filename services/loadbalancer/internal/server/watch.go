// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/desired/answer"
	"github.com/sluice-net/sluice/kit/desired/failure"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	"github.com/sluice-net/sluice/proto/wire/frontendwire"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
)

type frontends = grpc.BidiStreamingServer[lbv1.WatchFrontendsRequest, lbv1.WatchFrontendsResponse]

// WatchFrontends implements the service.
func (s *Server) WatchFrontends(conn frontends) error {
	first, err := conn.Recv()
	if err != nil {
		return err
	}
	sub := first.GetSubscribe()
	if sub == nil {
		return statusOf(answer.ErrNoSubscribe)
	}
	want := owner.Subscription{
		Name:     sub.GetName(),
		Enforces: sub.GetRole() == lbv1.SubscriberRole_SUBSCRIBER_ROLE_ENFORCES, Seq: sub.GetSeq(),
	}
	if c := sub.GetCapacity(); c != nil {
		capacity := frontendwire.CapacityOf(c)
		want.Capacity = &capacity
	}
	if b := sub.GetIncarnation(); len(b) == len(want.Incarnation) {
		copy(want.Incarnation[:], b)
	}
	session, err := s.Owner.Subscribers().Subscribe(conn.Context(), want)
	if err != nil {
		return statusOf(err)
	}
	defer session.Close()
	run, name := s.Owner.Incarnation(), s.Owner.StateName()
	incarnation, state := string(run[:]), string(name[:])
	return answer.Serve(conn, answer.Session[lbv1.WatchFrontendsRequest, lbv1.WatchFrontendsResponse]{
		Next: func(ctx context.Context) (*lbv1.WatchFrontendsResponse, error) {
			steps, err := session.Next(ctx)
			if err != nil {
				return nil, err
			}
			out := &lbv1.WatchFrontendsResponse{Steps: make([]*lbv1.FrontendStep, 0, len(steps))}
			for _, x := range steps {
				if x.Barrier != nil {
					x.Barrier.Incarnation, x.Barrier.State = incarnation, state
				}
				out.Steps = append(out.Steps, frontendwire.Step(x))
			}
			return out, nil
		},
		Take: func(ctx context.Context, m *lbv1.WatchFrontendsRequest) error {
			return take(ctx, session, m)
		},
		Ended: session.Ended(), Err: session.Err,
	}, &answers)
}

// take handles a message of a subscriber.
func take(ctx context.Context, session *owner.Session, m *lbv1.WatchFrontendsRequest) error {
	switch x := m.GetMessage().(type) {
	case *lbv1.WatchFrontendsRequest_Ack:
		return session.Ack(ctx, x.Ack.GetEnforced(), x.Ack.GetEnded())
	case *lbv1.WatchFrontendsRequest_Refused:
		k, reason, malformed := frontendwire.RefusalOf(x.Refused)
		if malformed != nil {
			return &failure.FieldError{Field: "refused.key", Err: malformed}
		}
		return session.Refuse(ctx, k, reason)
	}
	return answer.ErrSubscribed
}
