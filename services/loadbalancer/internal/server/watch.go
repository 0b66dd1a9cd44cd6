// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"

	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	words "github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/failure"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
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
		want.Capacity = &owner.Capacity{
			Frontends: int(c.GetFrontends()), Backends: int(c.GetBackends()), Members: int(c.GetMembers()),
			BackendsPerList: int(c.GetBackendsPerList()),
		}
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
	incarnation, state := s.Owner.Incarnation(), s.Owner.StateName()
	for {
		steps, err := session.Next(ctx)
		if err != nil {
			return statusOf(err)
		}
		out := &lbv1.WatchFrontendsResponse{Steps: make([]*lbv1.FrontendStep, 0, len(steps))}
		for _, x := range steps {
			step := &lbv1.FrontendStep{}
			switch {
			case x.Barrier != nil:
				step.Step = &lbv1.FrontendStep_Barrier{Barrier: &lbv1.Barrier{
					Incarnation: incarnation[:], Seq: x.Barrier.Seq, Revision: x.Barrier.Revision,
					SnapshotComplete: x.Barrier.SnapshotComplete,
					State:            state[:], SourcesComplete: x.Barrier.SourcesComplete,
				}}
			case x.Upsert != nil:
				step.Step = &lbv1.FrontendStep_Upsert{Upsert: toFrontend(x.Upsert)}
			default:
				step.Step = &lbv1.FrontendStep_Remove{Remove: toFrontendKey(x.Key)}
			}
			out.Steps = append(out.Steps, step)
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
			var k frontend.Key
			if k, err = fromFrontendKey(x.Refused.GetKey()); err == nil {
				err = session.Refuse(ctx, k, x.Refused.GetReason())
			}
		default:
			err = &failure.FieldError{Field: "message", Err: errors.New("subscribe is only the first message")}
		}
		if err != nil {
			return statusOf(err)
		}
	}
}

func toFrontendKey(k frontend.Key) *lbv1.FrontendKey {
	out := &lbv1.FrontendKey{Address: words.Address(k.Addr), Port: uint32(k.Port), Protocol: netv1.Protocol(k.Protocol)}
	switch {
	case k.Addr.IsValid():
	case k.IPv6:
		out.Family = lbv1.IPFamily_IP_FAMILY_IPV6
	default:
		out.Family = lbv1.IPFamily_IP_FAMILY_IPV4
	}
	return out
}

func fromFrontendKey(k *lbv1.FrontendKey) (frontend.Key, error) {
	out := frontend.Key{
		Port: uint16(k.GetPort()), Protocol: service.Protocol(k.GetProtocol()),
		IPv6: k.GetFamily() == lbv1.IPFamily_IP_FAMILY_IPV6,
	}
	if k.GetAddress() == "" {
		return out, nil
	}
	a, err := words.AddressOf(k.GetAddress())
	if err != nil {
		return out, &failure.FieldError{Field: "refused.key.address", Err: err}
	}
	out.Addr, out.IPv6 = a, a.Is6()
	return out, nil
}

var kinds = map[frontend.Kind]lbv1.FrontendKind{
	frontend.ClusterIP:    lbv1.FrontendKind_FRONTEND_KIND_CLUSTER_IP,
	frontend.NodePort:     lbv1.FrontendKind_FRONTEND_KIND_NODE_PORT,
	frontend.ExternalIP:   lbv1.FrontendKind_FRONTEND_KIND_EXTERNAL_IP,
	frontend.LoadBalancer: lbv1.FrontendKind_FRONTEND_KIND_LOAD_BALANCER,
}

func toFrontend(f *frontend.Frontend) *lbv1.Frontend {
	out := &lbv1.Frontend{
		Key: toFrontendKey(f.Key), Kind: kinds[f.Kind], Namespace: f.Service.Namespace, Name: f.Service.Name,
		PortName: f.PortName,
		Inside:   toList(f.Inside), Outside: toList(f.Outside), AffinitySeconds: f.AffinitySeconds,
		ExceedsShare: f.ExceedsShare,
	}
	for _, p := range f.SourceRanges {
		out.SourceRanges = append(out.SourceRanges, p.String())
	}
	return out
}

func toList(l *frontend.List) *lbv1.BackendList {
	if l == nil {
		return nil
	}
	out := &lbv1.BackendList{
		WhenEmpty: lbv1.EmptyAction_EMPTY_ACTION_REJECT,
		Backends:  toBackends(l.Backends), Draining: toBackends(l.Draining), Algorithm: toAlgorithm(l.Table),
	}
	if l.WhenEmpty == frontend.Drop {
		out.WhenEmpty = lbv1.EmptyAction_EMPTY_ACTION_DROP
	}
	return out
}

func toAlgorithm(table bool) lbv1.Algorithm {
	if table {
		return lbv1.Algorithm_ALGORITHM_TABLE
	}
	return lbv1.Algorithm_ALGORITHM_UNSPECIFIED
}

func toBackends(bs []frontend.Backend) []*lbv1.Backend {
	out := make([]*lbv1.Backend, len(bs))
	for i, b := range bs {
		out[i] = &lbv1.Backend{Address: b.Addr().String(), Port: uint32(b.Port()), Terminating: b.Terminating}
	}
	return out
}
