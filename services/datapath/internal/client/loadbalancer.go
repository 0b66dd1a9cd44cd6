// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"fmt"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/model/frontend"
	loadbalancerv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	"github.com/sluice-net/sluice/proto/wire/frontendwire"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendstream"
)

// LoadBalancer implements frontendstream.Service.
type LoadBalancer struct {
	Health
	client loadbalancerv1.LoadBalancerServiceClient
}

// NewLoadBalancer returns a client that uses cc, a connection to loadbalancer's socket.
func NewLoadBalancer(cc grpc.ClientConnInterface) *LoadBalancer {
	return &LoadBalancer{Health: Health{Name: "loadbalancer"}, client: loadbalancerv1.NewLoadBalancerServiceClient(cc)}
}

// Ping reports whether the service answers.
func (l *LoadBalancer) Ping(ctx context.Context) error {
	_, err := l.client.GetStatus(ctx, &loadbalancerv1.GetStatusRequest{})
	return l.translate(err)
}

// Subscribe implements frontendstream.Service.
func (l *LoadBalancer) Subscribe(ctx context.Context, s frontendstream.Subscription) (frontendstream.Stream, error) {
	stream, err := l.client.WatchFrontends(ctx)
	if err != nil {
		return nil, l.translate(err)
	}
	st := &frontendStream{stream: stream, health: &l.Health}
	err = st.send(&loadbalancerv1.WatchFrontendsRequest{Message: &loadbalancerv1.WatchFrontendsRequest_Subscribe{
		Subscribe: &loadbalancerv1.Subscribe{
			Name: s.Name, Role: loadbalancerv1.SubscriberRole_SUBSCRIBER_ROLE_ENFORCES,
			Incarnation: []byte(s.Incarnation), Seq: s.Seq, Capacity: frontendwire.Capacity(s.Capacity),
		},
	}})
	if err != nil {
		return nil, err
	}
	return st, nil
}

// frontendStream implements frontendstream.Stream.
type frontendStream struct {
	stream grpc.BidiStreamingClient[loadbalancerv1.WatchFrontendsRequest, loadbalancerv1.WatchFrontendsResponse]
	health *Health
}

// send reports only that sending failed. The reason why the stream ended is returned by Recv.
func (s *frontendStream) send(m *loadbalancerv1.WatchFrontendsRequest) error {
	if err := s.stream.Send(m); err != nil {
		return fmt.Errorf("frontends: send: %w", err)
	}
	return nil
}

// Recv implements frontendstream.Stream.
func (s *frontendStream) Recv() ([]frontend.Step, error) {
	m, err := s.stream.Recv()
	if err != nil {
		if terr := s.health.translate(err); terr != nil {
			err = terr
		}
		return nil, fmt.Errorf("frontends: %w", err)
	}
	s.health.note(nil)
	steps, err := frontendwire.StepsOf(m.GetSteps())
	if err != nil {
		return nil, fmt.Errorf("frontends: %w", err)
	}
	return steps, nil
}

// Ack implements frontendstream.Stream.
func (s *frontendStream) Ack(enforced, ended uint64) error {
	return s.send(&loadbalancerv1.WatchFrontendsRequest{Message: &loadbalancerv1.WatchFrontendsRequest_Ack{
		Ack: &loadbalancerv1.Ack{Enforced: enforced, Ended: ended},
	}})
}

// Refuse implements frontendstream.Stream.
func (s *frontendStream) Refuse(k frontend.Key, reason string) error {
	return s.send(&loadbalancerv1.WatchFrontendsRequest{Message: &loadbalancerv1.WatchFrontendsRequest_Refused{
		Refused: frontendwire.Refusal(k, clip(reason)),
	}})
}
