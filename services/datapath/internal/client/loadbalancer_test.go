// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/model/frontend"
	loadbalancerv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendstream"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// scriptedLoadBalancer passes each stream to the test, which ends it.
type scriptedLoadBalancer struct {
	loadbalancerv1.UnimplementedLoadBalancerServiceServer
	streams chan *frontendScript
}

type frontendScript struct {
	grpc.BidiStreamingServer[loadbalancerv1.WatchFrontendsRequest, loadbalancerv1.WatchFrontendsResponse]
	end chan error
}

func (s *scriptedLoadBalancer) WatchFrontends(
	stream grpc.BidiStreamingServer[loadbalancerv1.WatchFrontendsRequest, loadbalancerv1.WatchFrontendsResponse],
) error {
	script := &frontendScript{stream, make(chan error, 1)}
	select {
	case s.streams <- script:
	case <-stream.Context().Done():
		return stream.Context().Err()
	}
	select {
	case err := <-script.end:
		return err
	case <-stream.Context().Done():
		return stream.Context().Err()
	}
}

// serveLoadBalancer serves at a socket until stop is called.
func serveLoadBalancer(t *testing.T, path string) (s *scriptedLoadBalancer, stop func()) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s = &scriptedLoadBalancer{streams: make(chan *frontendScript)}
	srv := grpc.NewServer()
	loadbalancerv1.RegisterLoadBalancerServiceServer(srv, s)
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(l) }()
	stop = sync.OnceFunc(func() { srv.Stop(); <-served })
	t.Cleanup(stop)
	return s, stop
}

func dialLoadBalancer(t *testing.T, path string) *LoadBalancer {
	t.Helper()
	cc, err := client.Dial(path, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cc.Close() })
	return NewLoadBalancer(cc)
}

func steps(ss ...*loadbalancerv1.FrontendStep) *loadbalancerv1.WatchFrontendsResponse {
	return &loadbalancerv1.WatchFrontendsResponse{Steps: ss}
}

func upsertStep(f *loadbalancerv1.Frontend) *loadbalancerv1.FrontendStep {
	return &loadbalancerv1.FrontendStep{Step: &loadbalancerv1.FrontendStep_Upsert{Upsert: f}}
}

func removeStep(k *loadbalancerv1.FrontendKey) *loadbalancerv1.FrontendStep {
	return &loadbalancerv1.FrontendStep{Step: &loadbalancerv1.FrontendStep_Remove{Remove: k}}
}

func barrierStep(b *loadbalancerv1.Barrier) *loadbalancerv1.FrontendStep {
	return &loadbalancerv1.FrontendStep{Step: &loadbalancerv1.FrontendStep_Barrier{Barrier: b}}
}

const (
	lbRun   = "run-0123456789ab"
	lbState = "state-0123456789"
)

func wholeBarrier(seq uint64, snapshot bool) *loadbalancerv1.FrontendStep {
	return barrierStep(&loadbalancerv1.Barrier{
		Incarnation: []byte(lbRun), Seq: seq, Revision: 40 + seq, SnapshotComplete: snapshot,
		State: []byte(lbState), SourcesComplete: true,
	})
}

func wholeFrontend() *loadbalancerv1.Frontend {
	return &loadbalancerv1.Frontend{
		Key:  &loadbalancerv1.FrontendKey{Address: "10.96.0.1", Port: 53, Protocol: netv1.Protocol_PROTOCOL_UDP},
		Kind: loadbalancerv1.FrontendKind_FRONTEND_KIND_LOAD_BALANCER, Namespace: "shop", Name: "web", PortName: "dns",
		Inside: &loadbalancerv1.BackendList{
			WhenEmpty: loadbalancerv1.EmptyAction_EMPTY_ACTION_REJECT,
			Backends: []*loadbalancerv1.Backend{
				{Address: "10.244.0.1", Port: 5353}, {Address: "10.244.0.2", Port: 5353, Terminating: true},
			},
			Algorithm: loadbalancerv1.Algorithm_ALGORITHM_TABLE,
		},
		Outside: &loadbalancerv1.BackendList{
			WhenEmpty: loadbalancerv1.EmptyAction_EMPTY_ACTION_DROP,
			Draining:  []*loadbalancerv1.Backend{{Address: "10.244.0.3", Port: 5353, Terminating: true}},
		},
		AffinitySeconds: 10800, SourceRanges: []string{"192.0.2.0/24", "2001:db8::/32"},
	}
}

func TestFrontendStreamCarriesEverythingBothWays(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lb.sock")
	s, _ := serveLoadBalancer(t, path)
	lb := dialLoadBalancer(t, path)
	stream, err := lb.Subscribe(t.Context(), frontendstream.Subscription{Name: "node", Incarnation: lbRun, Seq: 7})
	if err != nil {
		t.Fatal(err)
	}
	script := <-s.streams
	node6 := &loadbalancerv1.FrontendKey{
		Port: 30080, Protocol: netv1.Protocol_PROTOCOL_SCTP, Family: loadbalancerv1.IPFamily_IP_FAMILY_IPV6,
	}
	bad := wholeFrontend()
	bad.Inside.Backends[0].Address = "localhost"
	unsorted := wholeFrontend()
	unsorted.Inside.Backends[1].Address = "10.244.0.0"
	drains := wholeFrontend()
	drains.Outside.Draining[0].Port = 0
	if err := script.Send(steps(
		upsertStep(wholeFrontend()), removeStep(node6), upsertStep(bad), upsertStep(unsorted), upsertStep(drains),
		wholeBarrier(8, true),
	)); err != nil {
		t.Fatal(err)
	}
	got, err := stream.Recv()
	if err != nil || len(got) != 6 {
		t.Fatalf("received %+v, %v", got, err)
	}
	k := frontend.Key{Addr: netip.MustParseAddr("10.96.0.1"), Port: 53, Protocol: frontend.UDP}
	node := frontend.Key{Addr: netip.IPv6Unspecified(), Port: 30080, Protocol: frontend.SCTP, Node: true}
	want := []frontend.Step{
		{Upsert: &frontend.Frontend{
			Key: k, Kind: frontend.LoadBalancer, Service: "shop/web:dns",
			Inside: &frontend.List{Backends: []frontend.Backend{
				{AddrPort: netip.MustParseAddrPort("10.244.0.1:5353")},
				{AddrPort: netip.MustParseAddrPort("10.244.0.2:5353"), Terminating: true},
			}, Table: true},
			Outside: &frontend.List{Drop: true, Draining: []frontend.Backend{
				{AddrPort: netip.MustParseAddrPort("10.244.0.3:5353"), Terminating: true},
			}},
			Affinity:     3 * time.Hour,
			SourceRanges: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")},
		}},
		{Remove: &node},
		{Refuse: &frontend.Refusal{Key: k, Err: got[2].Refuse.Err}},
		{Refuse: &frontend.Refusal{Key: k, Err: got[3].Refuse.Err}},
		{Refuse: &frontend.Refusal{Key: k, Err: got[4].Refuse.Err}},
		{Barrier: &frontend.Barrier{
			Incarnation: lbRun, Seq: 8, Revision: 48, SnapshotComplete: true, State: lbState, SourcesComplete: true,
		}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("received\n%+v, want\n%+v", got, want)
	}
	if text := got[2].Refuse.Err.Error(); !strings.Contains(text, `inside: backends[0]: malformed: backend "localhost"`) {
		t.Errorf("refused because %q", text)
	}
	if text := got[4].Refuse.Err.Error(); !strings.Contains(text, "outside: draining[0]: malformed: backend") {
		t.Errorf("refused because %q", text)
	}
	if err := got[3].Refuse.Err; !errors.Is(err, frontend.ErrInvalid) {
		t.Errorf("refused because %v", err)
	}
	for _, err := range []error{
		stream.Refuse(node, strings.Repeat("é", 600)), stream.Ack(8, 7),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []*loadbalancerv1.WatchFrontendsRequest{
		{Message: &loadbalancerv1.WatchFrontendsRequest_Subscribe{Subscribe: &loadbalancerv1.Subscribe{
			Name: "node", Role: loadbalancerv1.SubscriberRole_SUBSCRIBER_ROLE_ENFORCES, Incarnation: []byte(lbRun), Seq: 7,
		}}},
		{Message: &loadbalancerv1.WatchFrontendsRequest_Refused{Refused: &loadbalancerv1.Refused{
			Key: node6, Reason: strings.Repeat("é", 512),
		}}},
		{Message: &loadbalancerv1.WatchFrontendsRequest_Ack{Ack: &loadbalancerv1.Ack{Enforced: 8, Ended: 7}}},
	} {
		if got, err := script.Recv(); err != nil || !proto.Equal(got, want) {
			t.Errorf("the service received %v, %v, want %v", got, err, want)
		}
	}
	script.end <- status.Error(codes.Aborted, "a newer connection has the name")
	if _, err := stream.Recv(); err == nil || !strings.Contains(err.Error(), "a newer connection has the name") {
		t.Errorf("cut: %v", err)
	}
	if lb.Err() != nil {
		t.Errorf("a service that answers counts as unhealthy: %v", lb.Err())
	}
}

// frontendKernel keeps the applied frontends.
type frontendKernel struct {
	mu   sync.Mutex
	have map[frontend.Key]*frontend.Frontend // guarded by mu
}

func (k *frontendKernel) Apply(_ context.Context, tx *frontendtx.Transaction) (frontendtx.Result, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range tx.Changes() {
		if k.have[c.Key] = c.Frontend; c.Frontend == nil {
			delete(k.have, c.Key)
		}
	}
	return frontendtx.Result{Changed: len(tx.Changes())}, nil
}

func (k *frontendKernel) Barrier(context.Context) error { return nil }

func (k *frontendKernel) Keys() (keys []frontend.Key, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for key := range k.have {
		keys = append(keys, key)
	}
	return keys, nil
}

// TestFrontendsAreFollowedOverTheEndOfTheService stops the service and starts it again with another incarnation.
func TestFrontendsAreFollowedOverTheEndOfTheService(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lb.sock")
	s, stop := serveLoadBalancer(t, path)
	k := &frontendKernel{have: map[frontend.Key]*frontend.Frontend{}}
	f := frontendstream.New(
		frontendstream.Options{Name: "node", Service: dialLoadBalancer(t, path), Kernel: k, Log: log.Discard()},
	)
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	work.Go(func() { _ = f.Run(ctx) })
	defer work.Wait()
	defer cancel()

	hears := func(script *frontendScript, want *loadbalancerv1.WatchFrontendsRequest) {
		t.Helper()
		if got, err := script.Recv(); err != nil || !proto.Equal(got, want) {
			t.Fatalf("the service received %v, %v, want %v", got, err, want)
		}
	}
	ack := func(enforced, ended uint64) *loadbalancerv1.WatchFrontendsRequest {
		return &loadbalancerv1.WatchFrontendsRequest{Message: &loadbalancerv1.WatchFrontendsRequest_Ack{
			Ack: &loadbalancerv1.Ack{Enforced: enforced, Ended: ended},
		}}
	}
	subscribe := func(run string, seq uint64) *loadbalancerv1.WatchFrontendsRequest {
		return &loadbalancerv1.WatchFrontendsRequest{Message: &loadbalancerv1.WatchFrontendsRequest_Subscribe{
			Subscribe: &loadbalancerv1.Subscribe{
				Name: "node", Role: loadbalancerv1.SubscriberRole_SUBSCRIBER_ROLE_ENFORCES, Incarnation: []byte(run), Seq: seq,
			},
		}}
	}
	script := <-s.streams
	hears(script, subscribe("", 0))
	if err := script.Send(steps(upsertStep(wholeFrontend()), wholeBarrier(1, true))); err != nil {
		t.Fatal(err)
	}
	hears(script, ack(1, 0))
	hears(script, ack(1, 1))
	if keys, _ := k.Keys(); len(keys) != 1 {
		t.Fatalf("the kernel has %v", keys)
	}
	stop()
	for st := f.Status(); st.Connected || !errors.Is(st.Err, endpoint.ErrUnavailable); st = f.Status() {
		time.Sleep(time.Millisecond) // the client notices the end of the connection
	}
	if keys, _ := k.Keys(); len(keys) != 1 {
		t.Errorf("while the service is unavailable the kernel has %v", keys)
	}

	s, _ = serveLoadBalancer(t, path)
	script = <-s.streams
	hears(script, subscribe(lbRun, 1))
	other := barrierStep(&loadbalancerv1.Barrier{
		Incarnation: []byte("another"), Seq: 1, SnapshotComplete: true, State: []byte(lbState),
	})
	if err := script.Send(steps(other)); err != nil {
		t.Fatal(err)
	}
	hears(script, ack(1, 0))
	hears(script, ack(1, 1))
	if keys, _ := k.Keys(); len(keys) != 0 {
		t.Errorf("the kernel has %v, which is not in the state", keys)
	}
}
