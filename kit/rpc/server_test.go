// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"buf.build/gen/go/bufbuild/protovalidate/protocolbuffers/go/buf/validate"
	"buf.build/go/protovalidate"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/requestid"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/kit/servicetest"
)

// testService is grpc's test service; each test sets the handlers that it needs.
type testService struct {
	pb.UnimplementedTestServiceServer
	empty  func(context.Context) error
	stream func(pb.TestService_StreamingOutputCallServer) error
}

func (s *testService) EmptyCall(ctx context.Context, _ *pb.Empty) (*pb.Empty, error) {
	if s.empty != nil {
		if err := s.empty(ctx); err != nil {
			return nil, err
		}
	}
	return &pb.Empty{}, nil
}

func (s *testService) UnaryCall(_ context.Context, r *pb.SimpleRequest) (*pb.SimpleResponse, error) {
	return &pb.SimpleResponse{Payload: r.Payload}, nil
}

func (s *testService) StreamingOutputCall(_ *pb.StreamingOutputCallRequest, ss pb.TestService_StreamingOutputCallServer) error {
	return s.stream(ss)
}

const service = "grpc.testing.TestService"

// table allows the group to call every method.
func table() Methods {
	m := Methods{}
	for _, d := range pb.TestService_ServiceDesc.Methods {
		m["/"+service+"/"+d.MethodName] = Method{Access: Group()}
	}
	for _, d := range pb.TestService_ServiceDesc.Streams {
		m["/"+service+"/"+d.StreamName] = Method{Access: Group()}
	}
	return m
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) lines(t *testing.T) []map[string]any {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []map[string]any
	for line := range bytes.Lines(s.b.Bytes()) {
		var m map[string]any
		if err := json.Unmarshal(line, &m); err != nil {
			t.Fatalf("log line %q: %v", line, err)
		}
		all = append(all, m)
	}
	return all
}

type fixture struct {
	server *Server
	path   string
	log    *syncBuffer
	reg    *prometheus.Registry
	served chan error
}

func serve(t testing.TB, svc *testService, methods Methods) *fixture {
	t.Helper()
	f := &fixture{path: shortDir(t) + "/s.sock", log: &syncBuffer{}, reg: prometheus.NewRegistry(), served: make(chan error, 1)}
	var err error
	f.server, err = NewServer(Options{
		Register:   func(r grpc.ServiceRegistrar) { pb.RegisterTestServiceServer(r, svc) },
		Methods:    methods,
		Logger:     log.New(f.log, slog.LevelDebug),
		Registerer: f.reg,
	})
	if err != nil {
		t.Fatal(err)
	}
	l := listen(t, f.path, ListenOptions{})
	go func() { f.served <- f.server.Serve(l) }()
	t.Cleanup(func() {
		f.server.Stop()
		if err := <-f.served; err != nil {
			t.Error(err)
		}
	})
	return f
}

func (f *fixture) dial(t testing.TB, o client.Options) *grpc.ClientConn {
	t.Helper()
	cc, err := client.Dial(f.path, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cc.Close() })
	return cc
}

func wantCode(t *testing.T, err error, want codes.Code, part string) {
	t.Helper()
	if status.Code(err) != want || err != nil && !strings.Contains(err.Error(), part) {
		t.Fatalf("got %v, want %v with %q", err, want, part)
	}
}

// TestForgottenOrUnknownMethodsStopTheServerFromBeingBuilt proves INV-2.
func TestForgottenOrUnknownMethodsStopTheServerFromBeingBuilt(t *testing.T) {
	missing := table()
	delete(missing, pb.TestService_EmptyCall_FullMethodName)
	delete(missing, pb.TestService_StreamingOutputCall_FullMethodName)
	missing["/x.Y/Z"] = Method{}
	missing[pb.TestService_UnaryCall_FullMethodName] = Method{Limit: Limit{Waiting: 3}}
	_, err := NewServer(Options{Register: func(r grpc.ServiceRegistrar) { pb.RegisterTestServiceServer(r, &testService{}) }, Methods: missing})
	for _, part := range []string{"/EmptyCall is registered", "/StreamingOutputCall is registered", "/x.Y/Z is in the table", "UnaryCall: 3 calls may wait"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("NewServer: %v, want an error with %q", err, part)
		}
	}
	if _, err := NewServer(Options{}); err == nil {
		t.Error("NewServer without Register succeeded")
	}
}

func TestAccessTable(t *testing.T) {
	for _, c := range []struct {
		access Access
		uid    uint32
		also   []uint32
		want   bool
	}{
		{Access{}, 0, nil, false},
		{Access{}, 7, []uint32{7}, false},
		{Root(), 0, nil, true},
		{Root(), 7, nil, false},
		{Root(), 7, []uint32{7}, true},
		{Group(), 7, nil, true},
		{Group(), 0, nil, true},
		{RootAnd(8), 8, nil, true},
		{RootAnd(8), 7, nil, false},
		{RootAnd(8), 0, nil, true},
		{Access{UIDs: []uint32{8}}, 0, nil, false},
	} {
		if got := c.access.allows(c.uid, c.also); got != c.want {
			t.Errorf("%+v allows uid %d (also root %v) = %v, want %v", c.access, c.uid, c.also, got, c.want)
		}
	}
}

func TestMethodsOfOthersAreDeniedAndHealthIsNot(t *testing.T) {
	methods := table()
	methods[pb.TestService_EmptyCall_FullMethodName] = Method{Access: Access{UIDs: []uint32{4242}}}
	methods[pb.TestService_StreamingOutputCall_FullMethodName] = Method{}
	f := serve(t, &testService{stream: func(pb.TestService_StreamingOutputCallServer) error { return nil }}, methods)
	cc := f.dial(t, client.Options{})
	c := pb.NewTestServiceClient(cc)
	_, err := c.EmptyCall(t.Context(), &pb.Empty{})
	wantCode(t, err, codes.PermissionDenied, "may not call "+pb.TestService_EmptyCall_FullMethodName)
	ss, err := c.StreamingOutputCall(t.Context(), &pb.StreamingOutputCallRequest{})
	if err == nil {
		_, err = ss.Recv()
	}
	wantCode(t, err, codes.PermissionDenied, "may not call")
	if _, err := c.UnaryCall(t.Context(), &pb.SimpleRequest{}); err != nil {
		t.Error(err)
	}
	if _, err := grpc_health_v1.NewHealthClient(cc).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{}); err != nil {
		t.Error(err)
	}
}

// TestKernelPeersAreToldApartByTheirUID: the peer with another uid is a child process that runs this test binary's
// client. Uid 0 of a user namespace counts as the uid that it is mapped to.
func TestKernelPeersAreToldApartByTheirUID(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	methods := table()
	methods[pb.TestService_EmptyCall_FullMethodName] = Method{Access: Root()}
	var mu sync.Mutex
	var uids []uint32
	f := serve(t, &testService{empty: func(ctx context.Context) error {
		mu.Lock()
		defer mu.Unlock()
		cred, _ := PeerCred(ctx)
		uids = append(uids, cred.UID)
		return nil
	}}, methods)
	if err := os.Chmod(f.path, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Dir(f.path), 0o755); err != nil {
		t.Fatal(err)
	}
	as := func(uid uint32) *syscall.SysProcAttr {
		return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	mapped := as(0)
	mapped.Cloneflags = syscall.CLONE_NEWUSER
	mapped.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 165702, Size: 1}}
	mapped.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 165702, Size: 1}}
	for _, caller := range []struct {
		name string
		attr *syscall.SysProcAttr
		want string
	}{
		{"root", as(0), "OK"},
		{"uid 65702", as(65702), "PermissionDenied"},
		{"root of a user namespace", mapped, "PermissionDenied"},
	} {
		cmd := exec.Command("/proc/self/exe", callArg, f.path)
		cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0")
		cmd.SysProcAttr = caller.attr
		if out, err := cmd.CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != caller.want {
			t.Errorf("%s got %q, %v; want %q", caller.name, out, err, caller.want)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if len(uids) != 1 || uids[0] != 0 {
		t.Errorf("the handler saw uids %v, want root only", uids)
	}
}

func TestHealthIsNotServingUntilSaid(t *testing.T) {
	f := serve(t, &testService{}, table())
	h := grpc_health_v1.NewHealthClient(f.dial(t, client.Options{}))
	check := func(name string, want grpc_health_v1.HealthCheckResponse_ServingStatus) {
		t.Helper()
		r, err := h.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: name})
		if err != nil || r.Status != want {
			t.Errorf("health of %q is %v, %v; want %v", name, r.GetStatus(), err, want)
		}
	}
	const no, yes = grpc_health_v1.HealthCheckResponse_NOT_SERVING, grpc_health_v1.HealthCheckResponse_SERVING
	check(service, no)
	check("", no)
	f.server.SetServing(service, true)
	check(service, yes)
	check("", no)
	f.server.SetAllServing(true)
	check("", yes)
	f.server.SetAllServing(false)
	check(service, no)
}

func TestReflectionListsTheService(t *testing.T) {
	f := serve(t, &testService{}, table())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s, err := grpc_reflection_v1.NewServerReflectionClient(f.dial(t, client.Options{})).ServerReflectionInfo(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Send(&grpc_reflection_v1.ServerReflectionRequest{MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	r, err := s.Recv()
	if err != nil || !strings.Contains(r.String(), service) {
		t.Fatalf("reflection said %v, %v", r, err)
	}
}

func TestPanicIsInternalAndItsStackIsLogged(t *testing.T) {
	f := serve(t, &testService{empty: func(context.Context) error { panic("secret detail") }}, table())
	ctx := requestid.Into(t.Context(), "req-1")
	_, err := pb.NewTestServiceClient(f.dial(t, client.Options{})).EmptyCall(ctx, &pb.Empty{})
	wantCode(t, err, codes.Internal, "req-1")
	if strings.Contains(err.Error(), "secret") {
		t.Errorf("the caller received the panic: %v", err)
	}
	var found bool
	for _, l := range f.log.lines(t) {
		if l["msg"] == "handler panicked" {
			found = l["error"] == "secret detail" && strings.Contains(l["stack"].(string), "server_test.go") && l["request_id"] == "req-1"
		}
	}
	if !found {
		t.Errorf("no line with the panic, its stack and the request id in %v", f.log.lines(t))
	}
	if n := metric(t, f.reg, "grpc_server_panics_recovered_total"); n != 1 {
		t.Errorf("panics counter is %v, want 1", n)
	}
}

func metric(t *testing.T, g prometheus.Gatherer, name string) (sum float64) {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.Metric {
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return sum
}

func TestFinishIsLoggedOnceAndHealthIsMuted(t *testing.T) {
	f := serve(t, &testService{empty: func(context.Context) error {
		return status.Error(codes.InvalidArgument, "you did it")
	}}, table())
	cc := f.dial(t, client.Options{})
	if _, err := grpc_health_v1.NewHealthClient(cc).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{}); err != nil {
		t.Fatal(err)
	}
	_, err := pb.NewTestServiceClient(cc).EmptyCall(requestid.Into(t.Context(), "abc"), &pb.Empty{})
	wantCode(t, err, codes.InvalidArgument, "you did it")
	lines := f.log.lines(t)
	if len(lines) != 1 {
		t.Fatalf("%d log lines, want 1: %v", len(lines), lines)
	}
	l := lines[0]
	for key, want := range map[string]any{
		"level": "INFO", "request_id": "abc", "grpc.code": "InvalidArgument", "grpc.method": "EmptyCall",
		"uid": float64(os.Geteuid()), "msg": "finished call",
	} {
		if l[key] != want {
			t.Errorf("%s is %v, want %v; line %v", key, l[key], want, l)
		}
	}
	if n := metric(t, f.reg, "grpc_server_handled_total"); n != 2 {
		t.Errorf("grpc_server_handled_total is %v, want 2", n)
	}
}

// TestCallsThatFailAlikeAreLoggedWithARate: users that can connect cannot flood the log or suppress
// the log lines of other users.
func TestCallsThatFailAlikeAreLoggedWithARate(t *testing.T) {
	f := serve(t, &testService{empty: func(context.Context) error {
		return status.Error(codes.InvalidArgument, "you did it")
	}}, table())
	cc := pb.NewTestServiceClient(f.dial(t, client.Options{}))
	for range 10 * failureBurst {
		_, err := cc.EmptyCall(t.Context(), &pb.Empty{})
		wantCode(t, err, codes.InvalidArgument, "you did it")
	}
	if lines := f.log.lines(t); len(lines) < failureBurst || len(lines) > 2*failureBurst {
		t.Errorf("%d lines about %d calls that failed alike, want about %d", len(lines), 10*failureBurst, failureBurst)
	}
	as := func(uid int, method string) []any {
		return []any{"grpc.service", "x.Y", "grpc.method", method, "grpc.code", "NotFound", "uid", uid}
	}
	var out syncBuffer
	logged := newFinishes(log.New(&out, slog.LevelInfo))
	for range failureBurst + 5 {
		logged.Log(t.Context(), logging.LevelInfo, "finished call", as(1000, "Get")...)
	}
	for _, other := range [][]any{as(1001, "Get"), as(1000, "List")} {
		logged.Log(t.Context(), logging.LevelInfo, "finished call", other...)
	}
	logged.Log(t.Context(), logging.LevelError, "finished call", as(1000, "Get")...) // a server error
	if n := len(out.lines(t)); n != failureBurst+3 {
		t.Errorf("%d lines, want %d, one each of another user, another method and an error", n, failureBurst+3)
	}
	for kind := range 2 * maxFailures {
		logged.allow(fmt.Sprint(kind))
	}
	if n := len(logged.kinds); n > maxFailures+1 {
		t.Errorf("%d kinds of failures are remembered, at most %d", n, maxFailures+1)
	}
	logged.kinds["1000 x.Y/Get NotFound"].limit.SetLimit(rate.Inf)
	if omitted, ok := logged.allow("1000 x.Y/Get NotFound"); !ok || omitted != 5 {
		t.Errorf("the next line reports %d suppressed lines, want 5", omitted)
	}
}

func TestRequestIDIsCarriedOrMade(t *testing.T) {
	got := make(chan string, 1)
	f := serve(t, &testService{
		empty: func(ctx context.Context) error { got <- requestid.From(ctx); return nil },
		stream: func(ss pb.TestService_StreamingOutputCallServer) error {
			got <- requestid.From(ss.Context())
			return nil
		},
	}, table())
	c := pb.NewTestServiceClient(f.dial(t, client.Options{}))
	for id, check := range map[string]func(string) bool{
		"shim-42":          func(s string) bool { return s == "shim-42" },
		"":                 func(s string) bool { return len(s) == 16 },
		"evil\" injection": func(s string) bool { return len(s) == 16 },
	} {
		ctx := requestid.Into(t.Context(), id)
		if _, err := c.EmptyCall(ctx, &pb.Empty{}); err != nil {
			t.Fatal(err)
		}
		if s := <-got; !check(s) {
			t.Errorf("sent %q, the handler has %q", id, s)
		}
		ss, err := c.StreamingOutputCall(ctx, &pb.StreamingOutputCallRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ss.Recv(); !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		if s := <-got; !check(s) {
			t.Errorf("stream: sent %q, the handler has %q", id, s)
		}
	}
}

func TestFullQueueIsRefusedWithRetryInfo(t *testing.T) {
	methods := table()
	methods[pb.TestService_EmptyCall_FullMethodName] = Method{Access: Group(), Limit: Limit{InFlight: 2, Waiting: 1, RetryAfter: 250 * time.Millisecond}}
	entered, release := make(chan struct{}), make(chan struct{})
	f := serve(t, &testService{empty: func(context.Context) error { entered <- struct{}{}; <-release; return nil }}, methods)
	c := pb.NewTestServiceClient(f.dial(t, client.Options{}))
	results := make(chan error, 3)
	call := func() { _, err := c.EmptyCall(context.Background(), &pb.Empty{}); results <- err }
	go call()
	go call()
	<-entered
	<-entered
	go call() // waits in the queue
	lim := f.server.limiters[pb.TestService_EmptyCall_FullMethodName].of(os.Geteuid() == 0)
	servicetest.Eventually(t, "one waiting and two running calls", func() bool { return len(lim.admitted) == 3 })

	_, err := c.EmptyCall(t.Context(), &pb.Empty{})
	wantCode(t, err, codes.ResourceExhausted, "2 calls running, 1 waiting")
	if d, _ := rpcerr.RetryDelay(err); d != 250*time.Millisecond || !rpcerr.Has(err, rpcerr.TooManyCalls) {
		t.Errorf("retry after %v, details %v; want 250ms and TOO_MANY_CALLS", d, status.Convert(err).Details())
	}
	if _, err := c.UnaryCall(t.Context(), &pb.SimpleRequest{}); err != nil {
		t.Errorf("another method is limited too: %v", err)
	}
	release <- struct{}{}
	<-entered
	close(release)
	for range 3 {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
	servicetest.Eventually(t, "the end of all calls", func() bool {
		return len(lim.admitted) == 0 && len(lim.running) == 0
	})
}

func TestWaiterThatGivesUpFreesItsPlace(t *testing.T) {
	l := newLimiter(Limit{InFlight: 1, Waiting: 1})
	done, err := l.enter(t.Context(), "m")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 3 {
		_, err := l.enter(ctx, "m")
		wantCode(t, err, codes.Canceled, "")
	}
	done()
	if len(l.admitted) != 0 || len(l.running) != 0 {
		t.Errorf("%d calls admitted and %d running, want none", len(l.admitted), len(l.running))
	}
}

func TestNobodyElseTakesRootsPlaces(t *testing.T) {
	const method = "/x.Y/Z"
	as := func(uid uint32) context.Context {
		return peer.NewContext(t.Context(), &peer.Peer{AuthInfo: AuthInfo{Cred: Cred{UID: uid}}})
	}
	for name, limit := range map[string]Limit{"places": {InFlight: 1}, "rate": {Rate: 1e-9}} {
		s := &Server{alsoRoot: []uint32{7}, limiters: map[string]limiters{method: newLimiters(limit)}}
		leave, err := s.enter(as(65799), method)
		if err != nil {
			t.Fatalf("%s: the first reader: %v", name, err)
		}
		for _, uid := range []uint32{65799, 65701} {
			if _, err := s.enter(as(uid), method); status.Code(err) != codes.ResourceExhausted {
				t.Errorf("%s: reader %d got %v, want RESOURCE_EXHAUSTED", name, uid, err)
			}
		}
		done, err := s.enter(as(0), method)
		if err != nil {
			t.Fatalf("%s: root must wait for readers: %v", name, err)
		}
		if _, err := s.enter(as(7), method); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("%s: a trusted user got %v beyond root's limit, want RESOURCE_EXHAUSTED", name, err)
		}
		done()
		leave()
	}
}

// foreign is a listener that reports a chosen uid for its callers.
type foreign struct {
	net.Listener
	uid atomic.Uint32
}

type foreignConn struct {
	net.Conn
	uid uint32
}

func (l *foreign) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return foreignConn{c, l.uid.Load()}, nil
}

func (c foreignConn) Cred() Cred { return Cred{UID: c.uid} }

func TestStreamsOfHealthAndReflectionAreLimited(t *testing.T) {
	reg := prometheus.NewRegistry()
	server, err := NewServer(Options{
		Register: func(r grpc.ServiceRegistrar) { pb.RegisterTestServiceServer(r, &testService{}) }, Methods: table(), Registerer: reg,
	})
	if err != nil {
		t.Fatal(err)
	}
	path := shortDir(t) + "/s.sock"
	l := &foreign{Listener: listen(t, path, ListenOptions{})}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	connect := func(uid uint32) *grpc.ClientConn {
		t.Helper()
		l.uid.Store(uid)
		cc, err := client.Dial(path, client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cc.Close() })
		// The connection is established, and health checks need no stream slot.
		if _, err := grpc_health_v1.NewHealthClient(cc).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{}); err != nil {
			t.Fatalf("uid %d: health check: %v", uid, err)
		}
		return cc
	}
	watch := func(ctx context.Context, cc *grpc.ClientConn) error {
		stream, err := grpc_health_v1.NewHealthClient(cc).Watch(ctx, &grpc_health_v1.HealthCheckRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		return err
	}
	reflect := func(cc *grpc.ClientConn) error {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream, err := grpc_reflection_v1.NewServerReflectionClient(cc).ServerReflectionInfo(ctx)
		if err == nil {
			_ = stream.Send(&grpc_reflection_v1.ServerReflectionRequest{
				MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_ListServices{},
			})
			_, err = stream.Recv()
		}
		return err
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	readers := []*grpc.ClientConn{connect(65799), connect(65701), connect(65799)}
	const asked = 3 * MaxAlwaysStreams
	refused := 0
	for i := range asked {
		switch err := watch(ctx, readers[i%len(readers)]); status.Code(err) {
		case codes.OK:
		case codes.ResourceExhausted:
			refused++
		default:
			t.Fatalf("stream %d: %v", i, err)
		}
	}
	if refused != asked-MaxAlwaysStreams {
		t.Errorf("%d of %d streams were refused, want %d", refused, asked, asked-MaxAlwaysStreams)
	}
	wantCode(t, reflect(readers[0]), codes.ResourceExhausted, "")
	if _, err := grpc_health_v1.NewHealthClient(readers[0]).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{}); err != nil {
		t.Errorf("a health check during the watches: %v", err)
	}
	if _, err := pb.NewTestServiceClient(readers[0]).EmptyCall(t.Context(), &pb.Empty{}); err != nil {
		t.Errorf("a call during the watches: %v", err)
	}
	root := connect(0)
	for i := range 4 {
		if err := watch(ctx, root); err != nil {
			t.Errorf("stream %d of root: %v", i, err)
		}
	}
	if err := reflect(root); err != nil {
		t.Errorf("reflection for root: %v", err)
	}
	if n := counted(t, reg, "grpc_server_handled_total", map[string]string{"grpc_method": "Watch", "grpc_code": "ResourceExhausted"}); n != float64(refused) {
		t.Errorf("%v refusals are counted, want %d", n, refused)
	}
	cancel()
	servicetest.Eventually(t, "the end of the call", func() bool { return len(server.always.others.running) == 0 })
	if err := reflect(readers[0]); err != nil {
		t.Errorf("after the watches have ended: %v", err)
	}
}

// counted returns the value of a counter with these labels.
func counted(t *testing.T, reg *prometheus.Registry, name string, labels map[string]string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			found := 0
			for _, l := range m.GetLabel() {
				if labels[l.GetName()] == l.GetValue() {
					found++
				}
			}
			if f.GetName() == name && found == len(labels) {
				return m.GetCounter().GetValue()
			}
		}
	}
	return 0
}

// TestNamedUsersShareRootsPlaces: a user other than root that a row of the table lists runs a service that other
// services wait for. Its calls do not queue behind readers, of the same or another method.
func TestNamedUsersShareRootsPlaces(t *testing.T) {
	const named, method = "/x.Y/Named", "/x.Y/Z"
	table := Methods{named: {Access: RootAnd(65706)}, method: {Access: Group(), Limit: Limit{InFlight: 1}}}
	s := &Server{methods: table, named: table.named(), limiters: map[string]limiters{method: newLimiters(table[method].Limit)}}
	as := func(uid uint32) context.Context {
		return peer.NewContext(t.Context(), &peer.Peer{AuthInfo: AuthInfo{Cred: Cred{UID: uid}}})
	}
	leave, err := s.enter(as(65799), method)
	if err != nil {
		t.Fatal(err)
	}
	defer leave()
	done, err := s.enter(as(65706), method)
	if err != nil {
		t.Fatalf("the named user must wait for readers: %v", err)
	}
	if _, err := s.enter(as(0), method); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("root got %v beyond the shared limit, want RESOURCE_EXHAUSTED", err)
	}
	done()
	for uid, want := range map[uint32]codes.Code{0: codes.OK, 65706: codes.OK, 65701: codes.PermissionDenied, 65799: codes.PermissionDenied} {
		if err := s.authorise(as(uid), named); status.Code(err) != want {
			t.Errorf("uid %d calls the method that names 65706: %v, want %s", uid, err, want)
		}
	}
}

func TestRateIsLimited(t *testing.T) {
	l := newLimiter(Limit{Rate: 1e-9, Burst: 2})
	for range 2 {
		if _, err := l.enter(t.Context(), "m"); err != nil {
			t.Fatal(err)
		}
	}
	_, err := l.enter(t.Context(), "m")
	wantCode(t, err, codes.ResourceExhausted, "calls per second")
	for _, bad := range []Limit{{InFlight: -1}, {Waiting: 1}, {Burst: 1}, {Rate: -1}} {
		if bad.check() == nil {
			t.Errorf("limit %+v was accepted", bad)
		}
	}
}

func TestShutdownFinishesCallsEndsStreamsAndTakesNoMore(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	streaming := make(chan struct{})
	f := serve(t, &testService{
		empty: func(context.Context) error { close(entered); <-release; return nil },
		stream: func(ss pb.TestService_StreamingOutputCallServer) error {
			close(streaming)
			<-ss.Context().Done()
			return ss.Context().Err()
		},
	}, table())
	cc := f.dial(t, client.Options{})
	c := pb.NewTestServiceClient(cc)
	call := make(chan error, 1)
	go func() { _, err := c.EmptyCall(context.Background(), &pb.Empty{}); call <- err }()
	ss, err := c.StreamingOutputCall(t.Context(), &pb.StreamingOutputCallRequest{})
	if err != nil {
		t.Fatal(err)
	}
	health, err := grpc_health_v1.NewHealthClient(cc).Watch(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := health.Recv(); err != nil {
		t.Fatal(err)
	}
	<-entered
	<-streaming
	shut := make(chan error, 1)
	go func() { shut <- f.server.Shutdown(t.Context()) }()
	_, err = ss.Recv()
	wantCode(t, err, codes.Unavailable, "shutting down")
	select {
	case err := <-shut:
		t.Fatalf("Shutdown returned %v before the call was done", err)
	default:
	}
	close(release)
	if err := <-call; err != nil {
		t.Errorf("the running call got %v", err)
	}
	if err := <-shut; err != nil {
		t.Error(err)
	}
	if _, err := net.Dial("unix", f.path); err == nil {
		t.Error("the socket still answers")
	}
}

func TestShutdownEndsStreamsThatWaitForTheirClient(t *testing.T) {
	f := serve(t, &testService{}, table())
	// Reflection reads until its client closes the stream, which this client does not do.
	s, err := grpc_reflection_v1.NewServerReflectionClient(f.dial(t, client.Options{})).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	list := &grpc_reflection_v1.ServerReflectionRequest{MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_ListServices{}}
	if err := s.Send(list); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := f.server.Shutdown(ctx); err != nil {
		t.Errorf("Shutdown: %v, want the idle stream ended", err)
	}
	_, err = s.Recv()
	wantCode(t, err, codes.Unavailable, "shutting down")
}

func TestShutdownCutsWhatDoesNotEnd(t *testing.T) {
	entered := make(chan struct{})
	f := serve(t, &testService{empty: func(ctx context.Context) error { close(entered); <-ctx.Done(); return ctx.Err() }}, table())
	c := pb.NewTestServiceClient(f.dial(t, client.Options{}))
	call := make(chan error, 1)
	go func() { _, err := c.EmptyCall(context.Background(), &pb.Empty{}); call <- err }()
	<-entered
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := f.server.Shutdown(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Shutdown returned %v, want the context's error", err)
	}
	if err := <-call; err == nil {
		t.Error("the terminated call succeeded")
	}
}

func TestTooLargeMessagesAreRefused(t *testing.T) {
	f := serve(t, &testService{}, table())
	c := pb.NewTestServiceClient(f.dial(t, client.Options{
		Dial: []grpc.DialOption{grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(64 << 20))},
	}))
	_, err := c.UnaryCall(t.Context(), &pb.SimpleRequest{Payload: &pb.Payload{Body: make([]byte, MaxRecv+1)}})
	wantCode(t, err, codes.ResourceExhausted, "larger than max")
}

func TestClientFindsARestartedServer(t *testing.T) {
	path := shortDir(t) + "/s.sock"
	up := func() (stop func()) {
		srv, err := NewServer(Options{Register: func(r grpc.ServiceRegistrar) { pb.RegisterTestServiceServer(r, &testService{}) }, Methods: table()})
		if err != nil {
			t.Fatal(err)
		}
		l := listen(t, path, ListenOptions{})
		served := make(chan error, 1)
		go func() { served <- srv.Serve(l) }()
		return func() {
			srv.Stop()
			if err := <-served; err != nil {
				t.Error(err)
			}
		}
	}
	cc, err := client.Dial(path, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	c := pb.NewTestServiceClient(cc)
	call := func(opts ...grpc.CallOption) error {
		_, err := c.EmptyCall(t.Context(), &pb.Empty{}, opts...)
		return err
	}
	wantCode(t, call(), codes.Unavailable, path) // the message has the path of the socket
	stream := func() error {
		s, err := c.StreamingOutputCall(t.Context(), &pb.StreamingOutputCallRequest{})
		if err == nil {
			_, err = s.Recv()
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		return err
	}
	// However often the client has tried before: the next call reaches a server that listens, and
	// fails at once if none does.
	for range 20 {
		for range 5 {
			wantCode(t, call(), codes.Unavailable, "")
			wantCode(t, stream(), codes.Unavailable, "")
		}
		stop := up()
		if err := call(); err != nil {
			t.Errorf("the server listens: %v", err)
		}
		stop()
		wantCode(t, stream(), codes.Unavailable, "")
		wantCode(t, stream(), codes.Unavailable, "")
		stop = up()
		if err := stream(); status.Code(err) == codes.Unavailable {
			t.Errorf("the server listens: stream: %v", err)
		}
		stop()
	}
}

func TestClientSetsADeadlineWhereThereIsNone(t *testing.T) {
	deadlines := make(chan time.Duration, 1)
	f := serve(t, &testService{empty: func(ctx context.Context) error {
		d, ok := ctx.Deadline()
		if !ok {
			deadlines <- 0
		} else {
			deadlines <- time.Until(d)
		}
		return nil
	}}, table())
	call := func(o client.Options) time.Duration {
		if _, err := pb.NewTestServiceClient(f.dial(t, o)).EmptyCall(context.Background(), &pb.Empty{}); err != nil {
			t.Fatal(err)
		}
		return <-deadlines
	}
	if d := call(client.Options{Timeout: time.Hour}); d < time.Minute || d > time.Hour+time.Minute {
		t.Errorf("deadline is %s away, want about an hour", d)
	}
	if d := call(client.Options{Timeout: -1}); d != 0 {
		t.Errorf("deadline is %s away, want none", d)
	}
}

func TestClientMetricsCountCalls(t *testing.T) {
	f := serve(t, &testService{}, table())
	reg := prometheus.NewRegistry()
	opts, err := ClientMetrics(reg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pb.NewTestServiceClient(f.dial(t, client.Options{Dial: opts})).EmptyCall(t.Context(), &pb.Empty{}); err != nil {
		t.Fatal(err)
	}
	if n := metric(t, reg, "grpc_client_handled_total"); n != 1 {
		t.Errorf("grpc_client_handled_total is %v, want 1", n)
	}
	if _, err := ClientMetrics(reg); err == nil {
		t.Error("a second registration succeeded")
	}
}

// ruled returns a message of type {string name = 1 [min_len 3]; repeated int32 ports = 2 [items gt
// 0]}.
func ruled(t *testing.T) *dynamicpb.Message {
	t.Helper()
	options := func(r *validate.FieldRules) *descriptorpb.FieldOptions {
		o := &descriptorpb.FieldOptions{}
		proto.SetExtension(o, validate.E_Field, r)
		return o
	}
	fd, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: proto.String("kit_test.proto"), Package: proto.String("kit.test"), Syntax: proto.String("proto3"),
		MessageType: []*descriptorpb.DescriptorProto{{
			Name: proto.String("Ruled"),
			Field: []*descriptorpb.FieldDescriptorProto{
				{
					Name: proto.String("name"), Number: proto.Int32(1), Type: descriptorpb.FieldDescriptorProto_TYPE_STRING.Enum(), Label: descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum(),
					Options: options(&validate.FieldRules{Type: &validate.FieldRules_String_{String_: &validate.StringRules{MinLen: proto.Uint64(3)}}}),
				},
				{
					Name: proto.String("ports"), Number: proto.Int32(2), Type: descriptorpb.FieldDescriptorProto_TYPE_INT32.Enum(), Label: descriptorpb.FieldDescriptorProto_LABEL_REPEATED.Enum(),
					Options: options(&validate.FieldRules{Type: &validate.FieldRules_Repeated{Repeated: &validate.RepeatedRules{
						Items: &validate.FieldRules{Type: &validate.FieldRules_Int32{Int32: &validate.Int32Rules{GreaterThan: &validate.Int32Rules_Gt{Gt: 0}}}},
					}}}),
				},
			},
		}},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return dynamicpb.NewMessage(fd.Messages().Get(0))
}

func TestHostileMessageGetsAShortAnswer(t *testing.T) {
	v, err := protovalidate.New()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ bad, want int }{"small": {1000, rpcerr.MaxViolations}, "large": {1 << 20, 1}} {
		m := ruled(t)
		b := protowire.AppendTag([]byte{0x0a, 3, 'a', 'b', 'c'}, 2, protowire.BytesType)
		b = protowire.AppendBytes(b, make([]byte, c.bad)) // c.bad numbers that violate the rule
		if err := proto.Unmarshal(b, m); err != nil {
			t.Fatal(err)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := checkMessage(v, m)
		runtime.ReadMemStats(&after)
		wantCode(t, err, codes.InvalidArgument, "ports[0]")
		st := status.Convert(err)
		violations := rpcerr.Fields(err)
		if len(violations) != c.want {
			t.Errorf("%s: the answer has %d violations, want %d", name, len(violations), c.want)
		}
		if n := proto.Size(st.Proto()); n > 16<<10 {
			t.Errorf("%s: the answer has %d bytes", name, n)
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > 64<<20 {
			t.Errorf("%s: %d MB were allocated for the answer", name, n>>20)
		}
	}
}

// TestInvalidRequestNamesEveryField proves INV-42.
func TestInvalidRequestNamesEveryField(t *testing.T) {
	v, err := protovalidate.New()
	if err != nil {
		t.Fatal(err)
	}
	m := ruled(t)
	if err := proto.Unmarshal([]byte{0x0a, 2, 'a', 'b', 0x12, 2, 1, 0}, m); err != nil {
		t.Fatal(err)
	}
	err = checkMessage(v, m)
	wantCode(t, err, codes.InvalidArgument, "name")
	got := map[string]string{}
	for _, f := range rpcerr.Fields(err) {
		got[f.Field] = f.Reason
	}
	if len(got) != 2 || got["name"] != "string.min_len" || got["ports[1]"] != "int32.gt" {
		t.Errorf("violations are %v, want name and ports[1]", got)
	}
	m = ruled(t)
	if err := proto.Unmarshal([]byte{0x0a, 3, 'a', 'b', 'c'}, m); err != nil {
		t.Fatal(err)
	}
	if err := checkMessage(v, m); err != nil {
		t.Errorf("a valid message: %v", err)
	}
	wantCode(t, checkMessage(v, "text"), codes.Internal, "not a proto.Message")
}

// TestRefusalsHaveReasons: every refusal of this package has a reason, so that callers can distinguish it from refusals
// of the service.
func TestRefusalsHaveReasons(t *testing.T) {
	v, err := protovalidate.New()
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{
		log: slog.New(slog.DiscardHandler), panics: prometheus.NewCounter(prometheus.CounterOpts{}),
		methods: Methods{"/a/b": {Access: Root()}},
	}
	for name, c := range map[string]struct {
		err  error
		code codes.Code
		want rpcerr.Reason
	}{
		"no row":         {s.authorise(t.Context(), "/c/d"), codes.PermissionDenied, rpcerr.NotPermitted},
		"no credentials": {s.authorise(t.Context(), "/a/b"), codes.Unauthenticated, rpcerr.NoCredentials},
		"a panic":        {s.recovered(t.Context(), "boom"), codes.Internal, rpcerr.Panicked},
		"not a message":  {checkMessage(v, "text"), codes.Internal, rpcerr.Panicked},
		"a bad message":  {checkMessage(v, ruled(t)), codes.InvalidArgument, rpcerr.InvalidMessage},
		"the end":        {errStopping, codes.Unavailable, rpcerr.ShuttingDown},
	} {
		if got, _ := rpcerr.ReasonIn(c.err); status.Code(c.err) != c.code || got != c.want {
			t.Errorf("%s: %s, %v; want %s, %v", name, status.Code(c.err), got, c.code, c.want)
		}
	}
}
