// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
	"github.com/sluice-net/sluice/services/hubble/internal/api/observer"
	"github.com/sluice-net/sluice/services/hubble/internal/api/peer"
	"github.com/sluice-net/sluice/services/hubble/internal/history"
	"github.com/sluice-net/sluice/services/hubble/internal/test/authority"
)

func TestMain(m *testing.M) {
	servicetest.Main(main)
	leaktest.Main(m)
}

// bench is a test environment for processes of the service, with a datapath.
type bench struct {
	*servicetest.Place
	*datapath
	t testing.TB
}

func newBench(t testing.TB) *bench {
	t.Helper()
	b := &bench{Place: servicetest.NewPlace(t, instance.HubbleID), t: t}
	b.datapath = newDatapath(t, filepath.Join(b.Mkdir("datapath"), "datapath.sock"))
	return b
}

// proc is one process of the service.
type proc struct {
	observer.ObserverClient
	*servicetest.Process
	t testing.TB
}

func (b *bench) socket() string { return filepath.Join(b.Dir, "run", "hubble.sock") }

func (b *bench) start(args ...string) *proc {
	b.t.Helper()
	p := servicetest.Start(b.t, b.Command(append([]string{
		"--socket-path", b.socket(), "--metrics-address", "off", "--state-dir", filepath.Join(b.Dir, "state"),
		"--datapath", b.path, "--identity", filepath.Join(b.Dir, "identity.sock"), "--node-name", "here",
	}, args...)...), b.socket(), client.Options{WaitForReady: true})
	return &proc{Process: p, ObserverClient: observer.NewObserverClient(p.Conn), t: b.t}
}

// datapath simulates the part of sluice-datapath that this service calls. It keeps its last events; each reader has
// its own position.
type datapath struct {
	datapathv1.UnimplementedObserverServiceServer
	t    testing.TB
	path string

	mu     sync.Mutex
	server *grpc.Server  // guarded by mu; nil while it is unavailable
	first  int           // guarded by mu; number of the oldest event
	count  int           // guarded by mu; number of the next event
	news   chan struct{} // guarded by mu; closed and replaced at each event
}

// ring is the number of events that the datapath keeps.
const ring = 4096

func newDatapath(t testing.TB, path string) *datapath {
	d := &datapath{t: t, path: path, news: make(chan struct{})}
	d.begin()
	t.Cleanup(d.end)
	return d
}

func (d *datapath) begin() {
	d.t.Helper()
	l, err := net.Listen("unix", d.path)
	if err != nil {
		d.t.Fatal(err)
	}
	if err := os.Chown(d.path, int(instance.DatapathID), int(instance.GroupID)); err != nil {
		d.t.Fatal(err)
	}
	if err := os.Chmod(d.path, 0o660); err != nil {
		d.t.Fatal(err)
	}
	s := grpc.NewServer()
	datapathv1.RegisterObserverServiceServer(s, d)
	d.mu.Lock()
	d.server = s
	d.mu.Unlock()
	go s.Serve(l) //nolint:errcheck // the server stops in end
}

func (d *datapath) end() {
	d.mu.Lock()
	s := d.server
	d.server = nil
	d.mu.Unlock()
	if s != nil {
		s.Stop()
	}
}

// happen adds events.
func (d *datapath) happen(events int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.count += events
	d.first = max(d.first, d.count-ring)
	close(d.news)
	d.news = make(chan struct{})
}

// event returns the event with a number. Every tenth event is a drop.
func event(number int) *datapathv1.Flow {
	f := &datapathv1.Flow{
		Time: timestamppb.Now(), Uuid: fmt.Sprint(number), NodeName: "node-1",
		Type: datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT, Verdict: datapathv1.Verdict_VERDICT_FORWARDED,
		Direction: netv1.Direction_DIRECTION_EGRESS, Protocol: netv1.Protocol_PROTOCOL_TCP, TcpFlags: 2, Ethertype: 0x0800,
		Source: &datapathv1.FlowEnd{
			EndpointIndex: 3, Identity: 17_000, Address: "10.244.0.2", Port: uint32(1024 + number%60_000),
			Pod: &workloadv1.PodReference{Namespace: "shop", Name: "client"},
			Labels: []*workloadv1.Label{
				{Source: "k8s", Key: "app", Value: "client"},
				{Source: "k8s", Key: "io.kubernetes.pod.namespace", Value: "shop"},
			},
		},
		Destination: &datapathv1.FlowEnd{Identity: 17_001, Address: "10.244.0.3", Port: 8080},
	}
	if number%10 == 0 {
		f.Type, f.Verdict = datapathv1.FlowType_FLOW_TYPE_DROP, datapathv1.Verdict_VERDICT_DROPPED
		f.Reason = datapathv1.Reason_REASON_POLICY_DENIED
		f.Direction, f.Ingress = netv1.Direction_DIRECTION_INGRESS, &datapathv1.SideVerdict{
			Verdict: f.GetVerdict(), Revision: 7, RuleSources: []string{"NetworkPolicy shop/web spec.ingress[1]"},
		}
	}
	return f
}

// Observe sends the events after the requested event. A reader that is too slow, or starts too late, gets a message
// about lost events.
func (d *datapath) Observe(
	r *datapathv1.ObserveRequest, stream grpc.ServerStreamingServer[datapathv1.ObserveResponse],
) error {
	next := 0
	if r.GetAfterUuid() != "" {
		if _, err := fmt.Sscan(r.GetAfterUuid(), &next); err != nil {
			return status.Error(codes.NotFound, err.Error())
		}
		next++
	}
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	for {
		d.mu.Lock()
		first, count, news := d.first, d.count, d.news
		d.mu.Unlock()
		if next < first {
			if err := stream.Send(&datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Lost{
				Lost: &datapathv1.LostEvents{
					Source: datapathv1.LossSource_LOSS_SOURCE_OBSERVER, Count: uint64(first - next),
				},
			}}); err != nil {
				return err
			}
			next = first
		}
		if next < count {
			if err := stream.Send(&datapathv1.ObserveResponse{
				Event: &datapathv1.ObserveResponse_Flow{Flow: event(next)},
			}); err != nil {
				return err
			}
			next++
			continue
		}
		select {
		case <-news:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// count returns the numbers of stored and of lost flows.
func (p *proc) count(r *observer.GetFlowsRequest) (flows, lost int, err error) {
	stream, err := p.GetFlows(servicetest.Context(p.t), r)
	if err != nil {
		return 0, 0, err
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			if err.Error() == "EOF" {
				err = nil
			}
			return flows, lost, err
		}
		if l := m.GetLostEvents(); l != nil {
			lost += int(l.GetNumEventsLost())
			continue
		}
		flows++
	}
}

// wants waits until a request selects this number of flows, and this number is lost.
func (p *proc) wants(flows, lost int, r *observer.GetFlowsRequest) {
	p.t.Helper()
	servicetest.EventuallyNil(p.t, fmt.Sprintf("%d flows, %d lost", flows, lost), func() error {
		f, l, err := p.count(r)
		if err == nil && (f != flows || l != lost) {
			err = fmt.Errorf("%d flows, %d lost", f, l)
		}
		return err
	})
}

// TestServiceFollowsTheDatapath: when either process restarts, no flow is missing or duplicated, and a loss is
// reported.
func TestServiceFollowsTheDatapath(t *testing.T) {
	b := newBench(t)
	b.happen(50)
	p := b.start(servicetest.ProbeFlags...)
	p.WantProbes(http.StatusOK, "")
	p.wants(50, 0, &observer.GetFlowsRequest{})
	p.wants(5, 0, &observer.GetFlowsRequest{
		Whitelist: []*flow.FlowFilter{{Verdict: []flow.Verdict{flow.Verdict_DROPPED}}},
	})
	b.end()
	b.begin()
	b.happen(10)
	p.wants(60, 0, &observer.GetFlowsRequest{})
	if code := p.Stop(); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	b.happen(10)
	p = b.start()
	p.wants(70, 0, &observer.GetFlowsRequest{})
	p.Kill()
	b.happen(ring + 30) // 30 more than the datapath keeps
	p = b.start()
	// A killed process may have lost the flows of its last second. The next process requests them again, and the
	// datapath reports how many it no longer has.
	servicetest.EventuallyNil(t, "every flow is stored or reported as lost", func() error {
		flows, lost, err := p.count(&observer.GetFlowsRequest{})
		if err == nil && (flows+lost != 70+ring+30 || lost < 30 || lost > 30+10) {
			err = fmt.Errorf("%d flows, %d lost", flows, lost)
		}
		return err
	})
	stream, err := peer.NewPeerClient(p.Conn).Notify(servicetest.Context(t), &peer.NotifyRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := stream.Recv(); err != nil || m.GetName() != "node-1" {
		t.Errorf("the first peer: %v, %v", m, err)
	}
	// The hubble CLI uses this name in its health check.
	h, err := grpc_health_v1.NewHealthClient(p.Conn).Check(servicetest.Context(t),
		&grpc_health_v1.HealthCheckRequest{Service: "hubble.server.Observer"})
	if err != nil || h.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
		t.Errorf("health: %v, %v", h, err)
	}
}

// TestStoredFlowsAreReadWithoutTheDatapath: without the datapath, the process is ready, and reports that the node is
// unavailable.
func TestStoredFlowsAreReadWithoutTheDatapath(t *testing.T) {
	b := newBench(t)
	b.happen(20)
	p := b.start()
	p.wants(20, 0, &observer.GetFlowsRequest{})
	p.Stop()
	b.end()
	p = b.start(servicetest.ProbeFlags...)
	p.WantProbes(http.StatusOK, "")
	p.wants(20, 0, &observer.GetFlowsRequest{})
	nodes, err := p.GetNodes(servicetest.Context(t), &observer.GetNodesRequest{})
	if err != nil || nodes.GetNodes()[0].GetState().String() != "NODE_UNAVAILABLE" {
		t.Errorf("%v, %v", nodes, err)
	}
}

// TestFlowsAreExported: the sandboxed process writes the selected flows into a file, and the next process continues.
func TestFlowsAreExported(t *testing.T) {
	b := newBench(t)
	file := filepath.Join(b.Mkdir("export"), "flows.json")
	if err := os.Chown(filepath.Dir(file), int(instance.HubbleID), int(instance.GroupID)); err != nil {
		t.Fatal(err)
	}
	exported := func(want int) {
		t.Helper()
		servicetest.EventuallyNil(t, "flows are exported", func() error {
			content, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			if got := strings.Count(string(content), "\n"); got != want {
				return fmt.Errorf("%d lines, want %d", got, want)
			}
			if strings.Count(string(content), `"verdict":"DROPPED"`) != want {
				return fmt.Errorf("wrong flows: %s", content)
			}
			return nil
		})
	}
	args := []string{
		"--history-export-file", file, "--history-export-allow", `{"verdict":["DROPPED"]}`,
		"--history-export-fields", "uuid,verdict",
	}
	p := b.start(args...)
	b.happen(100)
	exported(10)
	p.Stop() // the simulated datapath gives an event that it sends again another time
	b.happen(50)
	b.start(args...)
	exported(15)
}

// TestSocketAndFilesAreForTheGroupAndTheUser: users outside of the group cannot connect to the socket, and other
// users cannot read the files.
func TestSocketAndFilesAreForTheGroupAndTheUser(t *testing.T) {
	b := newBench(t)
	b.happen(20)
	p := b.start()
	p.wants(20, 0, &observer.GetFlowsRequest{})
	p.Stop()
	p = b.start()
	p.wants(20, 0, &observer.GetFlowsRequest{})
	info, err := os.Stat(b.socket())
	if err != nil {
		t.Fatal(err)
	}
	st := info.Sys().(*syscall.Stat_t)
	if info.Mode().Perm() != 0o660 || st.Uid != instance.HubbleID || st.Gid != instance.GroupID {
		t.Errorf("the socket is %s of %d:%d", info.Mode(), st.Uid, st.Gid)
	}
	files, err := filepath.Glob(filepath.Join(b.Dir, "state", "history", "*"))
	if err != nil || len(files) == 0 {
		t.Fatalf("files of the history: %v, %v", files, err)
	}
	for _, file := range append(files, filepath.Join(b.Dir, "state", "history")) {
		info, err := os.Stat(file)
		if err != nil || info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s is %v, %v", file, info.Mode(), err)
		}
	}
	if conn, err := servicetest.DialerAs(b.socket(), 65_534)(t.Context(), ""); err == nil {
		conn.Close()
		t.Error("another user connects to the socket")
	}
	// Even if the directory and the socket are open to all, the user of the caller decides which methods it may call.
	if err := os.Chmod(b.socket(), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Dir(b.socket()), 0o755); err != nil {
		t.Fatal(err)
	}
	for uid, want := range map[uintptr]codes.Code{0: codes.OK, 65_534: codes.PermissionDenied} {
		conn, err := client.Dial(b.socket(), client.Options{
			Dial: []grpc.DialOption{grpc.WithContextDialer(servicetest.DialerAs(b.socket(), uid))},
		})
		if err != nil {
			t.Fatal(err)
		}
		err = conn.Invoke(servicetest.Context(t), "/sluice.status.v1.ProcessService/SetLogLevel",
			&observer.ServerStatusRequest{}, &observer.ServerStatusResponse{})
		if got := status.Code(err); (got == codes.PermissionDenied) != (want == codes.PermissionDenied) {
			t.Errorf("uid %d sets the log level: %v", uid, err)
		}
		conn.Close()
	}
}

// TestClientsOverTCPNeedACertificate: clients over TCP need a certificate, in the sandbox and also after the files
// were replaced. Over TCP, no client can call methods that change the process.
func TestClientsOverTCPNeedACertificate(t *testing.T) {
	b := newBench(t)
	dir := b.Mkdir("tls")
	install := func(ca *authority.CA) {
		t.Helper()
		certificate, key := ca.Sign("node-1")
		for name, content := range map[string][]byte{"tls.crt": certificate, "tls.key": key, "ca.crt": ca.PEM} {
			next := filepath.Join(dir, name+".next")
			if err := os.WriteFile(next, content, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chown(next, int(instance.HubbleID), int(instance.GroupID)); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(next, filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	ca := authority.New(t)
	install(ca)
	b.happen(20)
	p := b.start("--listen-address", "127.0.0.1:0", "--listen-cert", filepath.Join(dir, "tls.crt"), "--listen-key",
		filepath.Join(dir, "tls.key"), "--listen-client-ca", filepath.Join(dir, "ca.crt"),
		"--listen-advertise", "10.0.0.1:4244")
	p.wants(20, 0, &observer.GetFlowsRequest{})
	var line struct{ Msg, Address string }
	for text := range strings.Lines(p.Log()) {
		if err := json.Unmarshal([]byte(text), &line); err == nil && strings.HasPrefix(line.Msg, "listening for clients") {
			break
		}
	}
	for range 2 {
		conn, err := grpc.NewClient("passthrough:///"+line.Address,
			grpc.WithTransportCredentials(credentials.NewTLS(ca.Client("reader", "node-1"))))
		if err != nil {
			t.Fatal(err)
		}
		over := &proc{ObserverClient: observer.NewObserverClient(conn), Process: p.Process, t: t}
		over.wants(20, 0, &observer.GetFlowsRequest{})
		stream, err := peer.NewPeerClient(conn).Notify(servicetest.Context(t), &peer.NotifyRequest{})
		if err != nil {
			t.Fatal(err)
		}
		m, err := stream.Recv()
		if err != nil || m.GetAddress() != "10.0.0.1:4244" || m.GetTls().GetServerName() != "node-1" {
			t.Errorf("the first peer: %v, %v", m, err)
		}
		err = conn.Invoke(servicetest.Context(t), "/sluice.status.v1.ProcessService/SetLogLevel",
			&observer.ServerStatusRequest{}, &observer.ServerStatusResponse{})
		if status.Code(err) != codes.Unimplemented {
			t.Errorf("setting the log level over TCP: %v", err)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		ca = authority.New(t)
		install(ca)
	}
}

// TestCorruptFilesAreReported: with corrupt files, the service starts, serves the other flows, and logs the names of
// the files.
func TestCorruptFilesAreReported(t *testing.T) {
	b := newBench(t)
	const flows = 4 * history.Recent
	p := b.start()
	for range flows / 1024 {
		before := b.total()
		b.happen(1024)
		p.reads(before + 1024)
	}
	p.Stop()
	files, err := filepath.Glob(filepath.Join(b.Dir, "state", "history", "*.segment"))
	if err != nil || len(files) < 4 {
		t.Fatalf("segments: %v, %v", files, err)
	}
	slices.Sort(files)
	for i, change := range []func(string) error{
		func(name string) error { return os.Truncate(name, 0) },
		func(name string) error { return os.Truncate(name, 100) },
		func(name string) error { return os.WriteFile(name, []byte(strings.Repeat("x", 10_000)), 0o600) },
	} {
		if err := change(files[i]); err != nil {
			t.Fatal(err)
		}
	}
	p = b.start()
	got, lost, err := p.count(&observer.GetFlowsRequest{})
	if err != nil || got == 0 || got >= flows || lost == 0 {
		t.Errorf("%d flows, %d lost, %v", got, lost, err)
	}
	for _, file := range files[:3] {
		if !strings.Contains(p.Log(), file) {
			t.Errorf("the log does not name %s", file)
		}
	}
	b.happen(10)
	p.wants(got+10, lost, &observer.GetFlowsRequest{})
}

func (d *datapath) total() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.count
}

// reads waits until the service has read the given number of events.
func (p *proc) reads(events int) {
	p.t.Helper()
	servicetest.Eventually(p.t, fmt.Sprintf("%d events are read", events), func() bool {
		st, err := p.ServerStatus(servicetest.Context(p.t), &observer.ServerStatusRequest{})
		return err == nil && st.GetSeenFlows() >= uint64(events)
	})
}

// TestSeenAndLostAreSent: some followers do not read. The other followers get every flow, or the number of lost
// flows. Every flow is stored.
func TestSeenAndLostAreSent(t *testing.T) {
	b := newBench(t)
	p := b.start()
	ctx, cancel := context.WithCancel(servicetest.Context(t))
	defer cancel()
	for range 8 { // these followers read nothing
		if _, err := p.GetFlows(ctx, &observer.GetFlowsRequest{Follow: true}); err != nil {
			t.Fatal(err)
		}
	}
	follower, err := p.GetFlows(ctx, &observer.GetFlowsRequest{Follow: true, Since: timestamppb.New(time.Unix(0, 0))})
	if err != nil {
		t.Fatal(err)
	}
	const sent = 50_000
	b.happen(1)
	if _, err := follower.Recv(); err != nil { // the stream is open
		t.Fatal(err)
	}
	go func() {
		for range (sent - 1) / 7 {
			b.happen(7)
		}
		b.happen((sent - 1) % 7)
	}()
	got, lost := 1, 0
	for got+lost < sent {
		m, err := follower.Recv()
		if err != nil {
			t.Fatalf("after %d flows and %d lost ones: %v", got, lost, err)
		}
		if l := m.GetLostEvents(); l != nil {
			lost += int(l.GetNumEventsLost())
		} else {
			got++
		}
	}
	if got+lost != sent {
		t.Errorf("%d flows and %d lost ones, want %d together", got, lost, sent)
	}
	servicetest.EventuallyNil(t, "the history is complete", func() error {
		got, lost, err := p.count(&observer.GetFlowsRequest{})
		if err == nil && got+lost != sent {
			err = fmt.Errorf("%d flows and %d lost ones, want %d together", got, lost, sent)
		}
		return err
	})
}
