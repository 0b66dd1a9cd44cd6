// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/kit/servicetest"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
)

func TestMain(m *testing.M) {
	servicetest.Main(main)
	leaktest.Main(m)
}

// bench is a test environment for processes of the service.
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
		"--socket-path", socket, "--metrics-address", "off", "--state-dir", filepath.Join(b.Dir,
			"state"), "--node-name", "here",
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

// web returns a service with the given number of backends.
func web(name, ip string, backends int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "apiVersion: v1\nkind: Service\nmetadata: {name: %s}\nspec: {clusterIP: %s, ports: [{port: "+
		"80}]}\n---\n", name, ip)
	fmt.Fprintf(&b, "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: %s-x, labels: "+
		"{kubernetes.io/service-name: %s}}\n", name, name)
	b.WriteString("addressType: IPv4\nports: [{port: 8080}]\nendpoints:\n")
	for i := range backends {
		fmt.Fprintf(&b, "- {addresses: [10.1.0.%d], nodeName: here}\n", i+1)
	}
	return b.String()
}

// subscription acts as a datapath that subscribes.
type subscription struct {
	t      testing.TB
	conn   lbv1.LoadBalancerService_WatchFrontendsClient
	cancel context.CancelFunc
	// has contains the frontends at the last barrier, by key.
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
	s.send(&lbv1.WatchFrontendsRequest{Message: &lbv1.WatchFrontendsRequest_Ack{Ack: &lbv1.Ack{
		Enforced: enforced,
		Ended:    ended,
	}}})
}

// until applies steps up to the barrier of a revision.
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

// text formats the frontends, one per line.
func (s *subscription) text() []string {
	var out []string
	for _, f := range s.has {
		line := fmt.Sprintf("%s:%d/%d %s/%s:", f.GetKey().GetAddress(), f.GetKey().GetPort(), f.GetKey().GetProtocol(),
			f.GetNamespace(), f.GetName())
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
	if string(s.barrier.GetState()) != string(state) || string(s.barrier.GetIncarnation()) == string(first) ||
		!s.barrier.GetSnapshotComplete() {
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
	if _, err := p.GetService(servicetest.Context(t),
		&lbv1.GetServiceRequest{Name: "web"}); status.Code(err) != codes.NotFound {
		t.Errorf("of a deleted service: %v", err)
	}
	if code := p.Stop(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// many returns the services of one change. A change that is only partly applied is visible in them.
func many(port int) string {
	var b strings.Builder
	for i := range 40 {
		fmt.Fprintf(&b, "---\napiVersion: v1\nkind: Service\nmetadata: {name: s%d}\nspec: {clusterIP: 10.96.1.%d, ports: "+
			"[{port: %d}]}\n", i, i+1, port)
	}
	return b.String()
}

// TestKilledChangeIsWholeOrAbsent: if the process is killed during a change, either the whole change was stored or no
// part of it. After the call has returned, the whole change is stored.
func TestKilledChangeIsWholeOrAbsent(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct {
		point string
		after int // the port that the services have
	}{
		{"journal/before-write", 80},
		{"loadbalancer/change/before-apply", 81},
		{"loadbalancer/change/before-answer", 81},
	} {
		t.Run(c.point, func(t *testing.T) {
			p := b.start()
			p.Serving()
			first := p.apply(many(80)).GetRevision()
			p.Faults.KillAt(c.point, 0)
			if _, err := p.UpsertServices(servicetest.Context(t),
				&lbv1.UpsertServicesRequest{Manifests: []byte(many(81))}); err == nil {
				t.Fatal("a killed process answers")
			}
			p.Killed()
			p = b.start()
			p.Serving()
			want := first
			if c.after == 81 {
				want++
			}
			s := p.subscribe(&lbv1.Subscribe{Name: "datapath"})
			s.until(want)
			if s.barrier.GetRevision() != want || len(s.has) != 40 {
				t.Errorf("revision %d with %d frontends, want %d with 40", s.barrier.GetRevision(), len(s.has), want)
			}
			for _, f := range s.has {
				if f.GetKey().GetPort() != uint32(c.after) {
					t.Fatalf("after a kill %s has port %d, want %d", f.GetName(), f.GetKey().GetPort(), c.after)
				}
			}
			p.Kill()
		})
	}
	// A failed write changes nothing, and the next one succeeds.
	p := b.start()
	p.Serving()
	before := p.apply(many(80)).GetRevision()
	const write = "journal/before-write"
	p.Faults.FailAt(write, 0, "no space left on device")
	_, err := p.UpsertServices(servicetest.Context(t), &lbv1.UpsertServicesRequest{Manifests: []byte(many(81))})
	if status.Code(err) != codes.Unavailable || !rpcerr.Is(err, lbv1.ErrorReason_ERROR_REASON_STORAGE_FAILED) {
		t.Errorf("without storage: %v", err)
	}
	if st := p.status(); st.GetRevision() != before || len(st.GetService().GetProblems()) != 1 {
		t.Errorf("without storage: %v", st)
	}
	p.Faults.Pass(write)
	if got := p.apply(many(81)).GetRevision(); got != before+1 {
		t.Errorf("revision %d, want %d", got, before+1)
	}
	if st := p.status(); len(st.GetService().GetProblems()) != 0 {
		t.Errorf("with storage again: %v", st.GetService().GetProblems())
	}
}

func TestDamagedStateIsRefusedAndLeft(t *testing.T) {
	b := newBench(t)
	p := b.start()
	p.Serving()
	p.apply(web("web", "10.96.0.1", 1))
	p.Kill()
	file := filepath.Join(b.Dir, "state", "services.db")
	if err := os.Rename(file, file+".away"); err != nil {
		t.Fatal(err)
	}
	p = b.start()
	if code := p.Exit(); code == 0 || !strings.Contains(p.Log(), "services.db") ||
		!strings.Contains(p.Log(), "docs/loadbalancer.md") {
		t.Errorf("without the state file: exit code %d, %s", code, p.Log())
	}
	if err := os.Rename(file+".away", file); err != nil {
		t.Fatal(err)
	}
	p = b.start()
	p.Serving()
	if st := p.status(); st.GetServices() != 1 || st.GetRevision() != 1 {
		t.Errorf("with the state file again: %v", st)
	}
}

// TestFilesAndHealthChecksInTheSandbox: the process opens health check ports and reads files within
// its sandbox.
func TestFilesAndHealthChecksInTheSandbox(t *testing.T) {
	b := newBench(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close() //nolint:errcheck // free the port for the process
	files := filepath.Join(b.Dir, "files")
	text := strings.Replace(web("web", "10.96.0.1", 2), "clusterIP: 10.96.0.1",
		fmt.Sprintf("clusterIP: 10.96.0.1, type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: %d",
			port), 1)
	if err := os.WriteFile(filepath.Join(files, "web.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(files, "bad.yaml"), []byte("kind: Pod\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	p := b.start("--sources-directory", files, "--health-checks-address", "127.0.0.1")
	p.Serving()
	s := p.subscribe(&lbv1.Subscribe{Name: "datapath"})
	s.until(1)
	if len(s.has) != 1 || !s.barrier.GetSourcesComplete() {
		t.Errorf("%d frontends, the barrier %v", len(s.has), s.barrier)
	}
	code := func() int {
		c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := c.Get(fmt.Sprintf("http://127.0.0.1:%d/", port))
		if err != nil {
			return 0
		}
		defer resp.Body.Close()
		return resp.StatusCode
	}
	servicetest.Eventually(t, "503 before the acknowledgement",
		func() bool { return code() == http.StatusServiceUnavailable })
	s.ack(s.barrier.GetSeq(), 0)
	servicetest.Eventually(t, "200", func() bool { return code() == http.StatusOK })
	st := p.status()
	if st.GetHealthCheckPorts() != 1 || st.GetRefused() != 1 ||
		!strings.Contains(st.GetService().GetProblems()[0].GetText(), "bad.yaml") {
		t.Errorf("%v", st)
	}
	// The kernel continues to forward while the datapath is disconnected and while this process restarts.
	s.cancel()
	servicetest.Eventually(t, "the subscriber is disconnected", func() bool {
		subscribers := p.status().GetSubscribers()
		return len(subscribers) == 1 && !subscribers[0].GetConnected()
	})
	if got := code(); got != http.StatusOK {
		t.Errorf("%d while the datapath is disconnected", got)
	}
	if code := p.Stop(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	p = b.start("--sources-directory", files, "--health-checks-address", "127.0.0.1")
	p.Serving()
	servicetest.Eventually(t, "200 after a restart", func() bool { return code() == http.StatusOK })
	if err := os.Remove(filepath.Join(files, "web.yaml")); err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "the port is closed", func() bool { return code() == 0 })
	if code := p.Stop(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}
