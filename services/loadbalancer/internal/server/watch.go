// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"

	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	"github.com/sluice-net/sluice/proto/wire/frontendwire"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/failure"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
)

type frontends = grpc.BidiStreamingServer[lbv1.WatchFrontendsRequest, lbv1.WatchFrontendsResponse]

// WatchFrontends implements the service.
func (s *Server) WatchFrontends(conn frontends) error {
	ctx, cancel := context.WithCancel(conn.Context())
	defer cancel()
	first, err := conn.Recv()
	if err != nil {
		return err
	}
	sub := first.GetSubscribe()
	if sub == nil {
		return statusOf(&failure.FieldError{Field: "message", Err: errors.New("the first message is not subscribe")})
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
	session, err := s.Owner.Subscribe(ctx, want)
	if err != nil {
		return statusOf(err)
	}
	defer session.Close()

	// Both end right after this has returned, which is what ends a Send to a client
	// that does not read, and a Recv from one that does not write.
	received, sent := make(chan error, 1), make(chan error, 1)
	go func() { received <- receive(ctx, conn, session) }()
	go func() { sent <- s.send(ctx, conn, session) }()
	select {
	case err := <-received:
		return err
	case err := <-sent:
		return err
	case <-session.Ended():
		return statusOf(session.Err())
	case <-ctx.Done():
		return statusOf(ctx.Err())
	}
}

// send passes steps on.
func (s *Server) send(ctx context.Context, conn frontends, session *owner.Session) error {
	run, name := s.Owner.Incarnation(), s.Owner.StateName()
	incarnation, state := string(run[:]), string(name[:])
	for {
		steps, err := session.Next(ctx)
		if err != nil {
			return statusOf(err)
		}
		out := &lbv1.WatchFrontendsResponse{Steps: make([]*lbv1.FrontendStep, 0, len(steps))}
		for _, x := range steps {
			if x.Barrier != nil {
				x.Barrier.Incarnation, x.Barrier.State = incarnation, state
			}
			out.Steps = append(out.Steps, frontendwire.Step(x))
		}
		if err := conn.Send(out); err != nil {
			return err
		}
	}
}

func receive(ctx context.Context, conn frontends, session *owner.Session) error {
	for {
		m, err := conn.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch x := m.GetMessage().(type) {
		case *lbv1.WatchFrontendsRequest_Ack:
			err = session.Ack(ctx, x.Ack.GetEnforced(), x.Ack.GetEnded())
		case *lbv1.WatchFrontendsRequest_Refused:
			k, reason, malformed := frontendwire.RefusalOf(x.Refused)
			if malformed != nil {
				return statusOf(&failure.FieldError{Field: "refused.key", Err: malformed})
			}
			err = session.Refuse(ctx, k, reason)
		default:
			err = &failure.FieldError{Field: "message", Err: errors.New("subscribe is only the first message")}
		}
		if err != nil {
			return statusOf(err)
		}
	}
}
