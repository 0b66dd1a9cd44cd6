// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"google.golang.org/grpc"

	loadbalancerv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/frontendstream"
)

// LoadBalancer implements frontendstream.Service.
type LoadBalancer struct {
	Health
	client loadbalancerv1.LoadBalancerServiceClient
}

// NewLoadBalancer uses a connection to loadbalancer's socket.
func NewLoadBalancer(cc grpc.ClientConnInterface) *LoadBalancer {
	return &LoadBalancer{Health: Health{Name: "loadbalancer"}, client: loadbalancerv1.NewLoadBalancerServiceClient(cc)}
}

// Ping asks whether the service answers.
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
			Incarnation: []byte(s.Incarnation), Seq: s.Seq, Capacity: capacityProto(s.Capacity),
		},
	}})
	if err != nil {
		return nil, err
	}
	return st, nil
}

func capacityProto(c frontendstream.Capacity) *loadbalancerv1.Capacity {
	if c == (frontendstream.Capacity{}) {
		return nil
	}
	return &loadbalancerv1.Capacity{
		Frontends: uint32(c.Frontends), Backends: uint32(c.Backends), Members: uint32(c.Members),
		BackendsPerList: uint32(c.BackendsPerList),
	}
}

// frontendStream implements frontendstream.Stream.
type frontendStream struct {
	stream grpc.BidiStreamingClient[loadbalancerv1.WatchFrontendsRequest, loadbalancerv1.WatchFrontendsResponse]
	health *Health
}

// send reports why the stream has ended rather than that it has: Recv does.
func (s *frontendStream) send(m *loadbalancerv1.WatchFrontendsRequest) error {
	if err := s.stream.Send(m); err != nil {
		return fmt.Errorf("frontends: send: %w", err)
	}
	return nil
}

// Recv implements frontendstream.Stream.
func (s *frontendStream) Recv() ([]frontendstream.Step, error) {
	m, err := s.stream.Recv()
	if err != nil {
		if terr := s.health.translate(err); terr != nil {
			err = terr
		}
		return nil, fmt.Errorf("frontends: %w", err)
	}
	s.health.note(nil)
	steps := make([]frontendstream.Step, len(m.GetSteps()))
	for i, st := range m.GetSteps() {
		if steps[i], err = frontendStep(st); err != nil {
			return nil, fmt.Errorf("frontends: steps[%d]: %w", i, err)
		}
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
		Refused: &loadbalancerv1.Refused{Key: frontendKeyProto(k), Reason: clip(reason)},
	}})
}

func frontendKeyProto(k frontend.Key) *loadbalancerv1.FrontendKey {
	p := &loadbalancerv1.FrontendKey{Port: uint32(k.Port), Protocol: netv1.Protocol(k.Protocol)}
	switch {
	case !k.Node:
		p.Address = k.Addr.String()
	case k.Addr.Is4():
		p.Family = loadbalancerv1.IPFamily_IP_FAMILY_IPV4
	default:
		p.Family = loadbalancerv1.IPFamily_IP_FAMILY_IPV6
	}
	return p
}

// errMalformed is the service's mistake.
var errMalformed = errors.New("malformed")

// Bounds of what a barrier may say.
const (
	maxIncarnation = 16
	maxStateName   = 16
)

// frontendStep takes a step apart. A frontend whose key is known and that is not
// understood is one to refuse.
func frontendStep(st *loadbalancerv1.FrontendStep) (out frontendstream.Step, err error) {
	switch st := st.GetStep().(type) {
	case *loadbalancerv1.FrontendStep_Upsert:
		k, err := frontendKey(st.Upsert.GetKey())
		if err != nil {
			return out, fmt.Errorf("upsert: %w", err)
		}
		f, err := frontendOf(k, st.Upsert)
		if err != nil {
			out.Refuse = &frontend.Refusal{Key: k, Err: err}
			return out, nil
		}
		out.Upsert = f
	case *loadbalancerv1.FrontendStep_Remove:
		k, err := frontendKey(st.Remove)
		if err != nil {
			return out, fmt.Errorf("remove: %w", err)
		}
		out.Remove = &k
	case *loadbalancerv1.FrontendStep_Barrier:
		b := st.Barrier
		if n := len(b.GetIncarnation()); n == 0 || n > maxIncarnation {
			return out, fmt.Errorf("barrier: %w: incarnation of %d bytes", errMalformed, n)
		}
		if n := len(b.GetState()); n == 0 || n > maxStateName {
			return out, fmt.Errorf("barrier: %w: state of %d bytes", errMalformed, n)
		}
		out.Barrier = &frontendstream.Barrier{
			Incarnation: string(b.GetIncarnation()), Seq: b.GetSeq(), Revision: b.GetRevision(),
			SnapshotComplete: b.GetSnapshotComplete(), State: string(b.GetState()), SourcesComplete: b.GetSourcesComplete(),
		}
	default:
		return out, fmt.Errorf("%w: a step that this version does not know", errMalformed)
	}
	return out, nil
}

func frontendKey(p *loadbalancerv1.FrontendKey) (k frontend.Key, err error) {
	if p.GetPort() == 0 || p.GetPort() > 65535 {
		return k, fmt.Errorf("%w: port %d", errMalformed, p.GetPort())
	}
	if p.GetProtocol() < 0 || p.GetProtocol() > 255 {
		return k, fmt.Errorf("%w: protocol %d", errMalformed, p.GetProtocol())
	}
	k.Port, k.Protocol = uint16(p.GetPort()), frontend.Protocol(p.GetProtocol())
	switch {
	case p.GetAddress() != "":
		if k.Addr, err = wire.AddressOf(p.GetAddress()); err != nil {
			return k, fmt.Errorf("%w: address: %w", errMalformed, err)
		}
	case p.GetFamily() == loadbalancerv1.IPFamily_IP_FAMILY_IPV4:
		k.Node, k.Addr = true, netip.IPv4Unspecified()
	case p.GetFamily() == loadbalancerv1.IPFamily_IP_FAMILY_IPV6:
		k.Node, k.Addr = true, netip.IPv6Unspecified()
	default:
		return k, fmt.Errorf("%w: neither an address nor a family", errMalformed)
	}
	if err := k.Validate(); err != nil {
		return k, err
	}
	return k, nil
}

var frontendKinds = map[loadbalancerv1.FrontendKind]frontend.Kind{
	loadbalancerv1.FrontendKind_FRONTEND_KIND_CLUSTER_IP:    frontend.ClusterIP,
	loadbalancerv1.FrontendKind_FRONTEND_KIND_NODE_PORT:     frontend.NodePort,
	loadbalancerv1.FrontendKind_FRONTEND_KIND_EXTERNAL_IP:   frontend.ExternalIP,
	loadbalancerv1.FrontendKind_FRONTEND_KIND_LOAD_BALANCER: frontend.LoadBalancer,
}

func frontendOf(k frontend.Key, p *loadbalancerv1.Frontend) (*frontend.Frontend, error) {
	kind, ok := frontendKinds[p.GetKind()]
	if !ok {
		return nil, fmt.Errorf("%w: kind %v", errMalformed, p.GetKind())
	}
	f := &frontend.Frontend{
		Key: k, Kind: kind, Service: servicePort(p), Affinity: time.Duration(p.GetAffinitySeconds()) * time.Second,
	}
	var err error
	if f.Inside, err = backendList(p.GetInside()); err != nil {
		return nil, fmt.Errorf("inside: %w", err)
	}
	if f.Outside, err = backendList(p.GetOutside()); err != nil {
		return nil, fmt.Errorf("outside: %w", err)
	}
	for _, text := range p.GetSourceRanges() {
		r, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("%w: source range %q", errMalformed, text)
		}
		f.SourceRanges = append(f.SourceRanges, r.Masked())
	}
	return f, f.Validate()
}

// servicePort names the port of a service: "shop/web:http", "shop/web".
func servicePort(p *loadbalancerv1.Frontend) string {
	name := p.GetNamespace() + "/" + p.GetName()
	if p.GetPortName() != "" {
		name += ":" + p.GetPortName()
	}
	return name
}

func backendList(p *loadbalancerv1.BackendList) (*frontend.List, error) {
	if p == nil {
		return nil, nil
	}
	l := &frontend.List{Drop: p.GetWhenEmpty() == loadbalancerv1.EmptyAction_EMPTY_ACTION_DROP}
	switch p.GetAlgorithm() {
	case loadbalancerv1.Algorithm_ALGORITHM_UNSPECIFIED:
	case loadbalancerv1.Algorithm_ALGORITHM_TABLE:
		l.Table = true
	default:
		return nil, fmt.Errorf("%w: algorithm %v", errMalformed, p.GetAlgorithm())
	}
	if len(p.GetBackends()) > 0 {
		l.Backends = make([]frontend.Backend, len(p.GetBackends()))
	}
	for i, b := range p.GetBackends() {
		at, err := backendAt(b)
		if err != nil {
			return nil, fmt.Errorf("backends[%d]: %w", i, err)
		}
		l.Backends[i] = frontend.Backend{AddrPort: at, Terminating: b.GetTerminating()}
	}
	for i, b := range p.GetDraining() {
		at, err := backendAt(b)
		if err != nil {
			return nil, fmt.Errorf("draining[%d]: %w", i, err)
		}
		l.Draining = append(l.Draining, at)
	}
	return l, nil
}

func backendAt(b *loadbalancerv1.Backend) (netip.AddrPort, error) {
	a, err := wire.AddressOf(b.GetAddress())
	if err != nil || b.GetPort() == 0 || b.GetPort() > 65535 {
		return netip.AddrPort{}, fmt.Errorf("%w: backend %q port %d", errMalformed, b.GetAddress(), b.GetPort())
	}
	return netip.AddrPortFrom(a, uint16(b.GetPort())), nil
}
