// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
)

func TestMain(m *testing.M) {
	servicetest.Main(main)
	leaktest.Main(m)
}

// bench is a place for processes of the service.
type bench struct {
	*servicetest.Place
	t testing.TB
}

func newBench(t testing.TB) *bench {
	t.Helper()
	b := &bench{Place: servicetest.NewPlace(t, instance.LoadBalancerID), t: t}
	b.Mkdir("files")
	return b
}

// proc is one process of the service.
type proc struct {
	lbv1.LoadBalancerServiceClient
	*servicetest.Process
	t testing.TB
}

func (b *bench) start(args ...string) *proc {
	b.t.Helper()
	socket := filepath.Join(b.Dir, "run", "loadbalancer.sock")
	p := servicetest.Start(b.t, b.Command(append([]string{
		"--socket-path", socket, "--metrics-address", "off", "--state-dir", filepath.Join(b.Dir, "state"), "--node-name", "here",
	}, args...)...), socket, client.Options{WaitForReady: true})
	return &proc{Process: p, LoadBalancerServiceClient: lbv1.NewLoadBalancerServiceClient(p.Conn), t: b.t}
}

func (p *proc) apply(manifest string) *lbv1.UpsertServicesResponse {
	p.t.Helper()
	out, err := p.UpsertServices(servicetest.Context(p.t), &lbv1.UpsertServicesRequest{Manifests: []byte(manifest)})
	if err != nil {
		p.t.Fatal(err)
	}
	return out
}

func (p *proc) status() *lbv1.GetStatusResponse {
	p.t.Helper()
	st, err := p.GetStatus(servicetest.Context(p.t), &lbv1.GetStatusRequest{})
	if err != nil {
		p.t.Fatal(err)
	}
	return st
}

// web is a service with that many backends.
func web(name, ip string, backends int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "apiVersion: v1\nkind: Service\nmetadata: {name: %s}\nspec: {clusterIP: %s, ports: [{port: 80}]}\n---\n", name, ip)
	fmt.Fprintf(&b, "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: %s-x, labels: {kubernetes.io/service-name: %s}}\n", name, name)
	b.WriteString("addressType: IPv4\nports: [{port: 8080}]\nendpoints:\n")
	for i := range backends {
		fmt.Fprintf(&b, "- {addresses: [10.1.0.%d], nodeName: here}\n", i+1)
	}
	return b.String()
}

// subscription is a datapath as the service sees one.
type subscription struct {
	t      testing.TB
	conn   lbv1.LoadBalancerService_WatchFrontendsClient
	cancel context.CancelFunc
	// has are the frontends by their keys as of the last barrier.
	has     map[string]*lbv1.Frontend
	barrier *lbv1.Barrier
}

func (p *proc) subscribe(sub *lbv1.Subscribe) *subscription {
	p.t.Helper()
	ctx, cancel := context.WithCancel(servicetest.Context(p.t))
	p.t.Cleanup(cancel)
	conn, err := p.WatchFrontends(ctx)
	if err != nil {
		p.t.Fatal(err)
	}
	if sub.Role == 0 {
		sub.Role = lbv1.SubscriberRole_SUBSCRIBER_ROLE_ENFORCES
	}
	s := &subscription{t: p.t, conn: conn, cancel: cancel, has: make(map[string]*lbv1.Frontend)}
	s.send(&lbv1.WatchFrontendsRequest{Message: &lbv1.WatchFrontendsRequest_Subscribe{Subscribe: sub}})
	return s
}

func (s *subscription) send(m *lbv1.WatchFrontendsRequest) {
	s.t.Helper()
	if err := s.conn.Send(m); err != nil {
		s.t.Fatal(err)
	}
}

func (s *subscription) ack(enforced, ended uint64) {
	s.t.Helper()
	s.send(&lbv1.WatchFrontendsRequest{Message: &lbv1.WatchFrontendsRequest_Ack{Ack: &lbv1.Ack{Enforced: enforced, Ended: ended}}})
}

// until carries out steps up to the barrier of a revision.
func (s *subscription) until(revision uint64) {
	s.t.Helper()
	for {
		m, err := s.conn.Recv()
		if err != nil {
			s.t.Fatal(err)
		}
		for _, step := range m.GetSteps() {
			switch x := step.GetStep().(type) {
			case *lbv1.FrontendStep_Upsert:
				s.has[x.Upsert.GetKey().String()] = x.Upsert
			case *lbv1.FrontendStep_Remove:
				delete(s.has, x.Remove.String())
			case *lbv1.FrontendStep_Barrier:
				s.barrier = x.Barrier
			}
		}
		if s.barrier.GetRevision() >= revision {
			return
		}
	}
}

// text are the frontends on one line each.
func (s *subscription) text() []string {
	var out []string
	for _, f := range s.has {
		line := fmt.Sprintf("%s:%d/%d %s/%s:", f.GetKey().GetAddress(), f.GetKey().GetPort(), f.GetKey().GetProtocol(), f.GetNamespace(), f.GetName())
		for _, b := range f.GetInside().GetBackends() {
			line += fmt.Sprintf(" %s:%d", b.GetAddress(), b.GetPort())
		}
		if len(f.GetInside().GetBackends()) == 0 {
			line += " " + f.GetInside().GetWhenEmpty().String()
		}
		out = append(out, line)
	}
	slices.Sort(out)
	return out
}

func (s *subscription) want(what string, want ...string) {
	s.t.Helper()
	if got := s.text(); !slices.Equal(got, want) {
		s.t.Errorf("%s: the subscriber has\n%s\nwant\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestServiceReachesASubscriberAndOutlivesAKill(t *testing.T) {
	b := newBench(t)
	p := b.start()
	p.Serving()
	applied := p.apply(web("web", "10.96.0.1", 2))
	if applied.GetRevision() != 1 || len(applied.GetChanges()) != 2 || len(applied.GetIncarnation()) != 16 {
		t.Fatalf("the answer is %v", applied)
	}
	s := p.subscribe(&lbv1.Subscribe{Name: "datapath"})
	s.until(1)
	if !s.barrier.GetSnapshotComplete() || !s.barrier.GetSourcesComplete() {
		t.Errorf("the first barrier is %v", s.barrier)
	}
	const both = "10.96.0.1:80/6 default/web: 10.1.0.1:8080 10.1.0.2:8080"
	s.want("at first", both)
	waited := make(chan error, 1)
	go func() {
		_, err := p.WaitForRevision(servicetest.Context(t), &lbv1.WaitForRevisionRequest{Revision: 1})
		waited <- err
	}()
	s.ack(s.barrier.GetSeq(), 0)
	if err := <-waited; err != nil {
		t.Fatal(err)
	}
	state, first := s.barrier.GetState(), s.barrier.GetIncarnation()

	p.Kill()
	p = b.start()
	p.Serving()
	s = p.subscribe(&lbv1.Subscribe{Name: "datapath", Incarnation: first, Seq: 1})
	s.until(1)
	s.want("after a kill", both)
	if string(s.barrier.GetState()) != string(state) || string(s.barrier.GetIncarnation()) == string(first) || !s.barrier.GetSnapshotComplete() {
		t.Errorf("after a kill the barrier is %v, before state %x and incarnation %x", s.barrier, state, first)
	}
	p.apply(web("web", "10.96.0.1", 1))
	s.until(2)
	s.want("after a change", "10.96.0.1:80/6 default/web: 10.1.0.1:8080")
	if _, err := p.DeleteServices(servicetest.Context(t), &lbv1.DeleteServicesRequest{Keys: []*lbv1.ObjectKey{
		{Kind: "EndpointSlice", Namespace: "default", Name: "web-x"},
	}}); err != nil {
		t.Fatal(err)
	}
	s.until(3)
	s.want("without endpoints", "10.96.0.1:80/6 default/web: EMPTY_ACTION_REJECT")
	if _, err := p.DeleteServices(servicetest.Context(t), &lbv1.DeleteServicesRequest{Keys: []*lbv1.ObjectKey{
		{Kind: "Service", Namespace: "default", Name: "web"},
	}}); err != nil {
		t.Fatal(err)
	}
	s.until(4)
	s.want("without the service")
	if _, err := p.GetService(servicetest.Context(t), &lbv1.GetServiceRequest{Name: "web"}); status.Code(err) != codes.NotFound {
		t.Errorf("of a service that is gone: %v", err)
	}
	if code := p.Stop(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}
