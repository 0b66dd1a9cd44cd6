// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

type own struct {
	Size int `config:"size"`
}

func ownDefaults(instance.Paths) own { return own{Size: 3} }

func (o *own) Validate() error {
	var p config.Problems
	if o.Size > 100 {
		p.Addf("size", "%d is more than 100", o.Size)
	}
	return p.Err()
}

type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// messages returns the "msg" of each log line.
func (o *output) messages(t *testing.T) []string {
	t.Helper()
	var all []string
	for line := range strings.Lines(o.String()) {
		var m map[string]any
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Fatalf("log line %q: %v", line, err)
		}
		all = append(all, m["msg"].(string))
	}
	return all
}

// logged returns the log line with the message.
func (s *started) logged(t *testing.T, msg string) map[string]any {
	t.Helper()
	for line := range strings.Lines(s.out.String()) {
		var m map[string]any
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Fatal(err)
		}
		if m["msg"] == msg {
			return m
		}
	}
	t.Fatalf("no line %q in:\n%s", msg, s.out)
	return nil
}

type started struct {
	root string
	out  *output
	stop context.CancelFunc
	exit chan int
}

// start runs a service within the test process.
func start(t *testing.T, main func(context.Context, *Process, own) error, args ...string) *started {
	t.Helper()
	root, err := os.MkdirTemp("/tmp", "kit")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	if err := os.MkdirAll(filepath.Join(root, "/run/sluice"), 0o755); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	s := &started{root: root, out: &output{}, stop: cancel, exit: make(chan int, 1)}
	args = append([]string{"--socket-group=-1"}, args...)
	go func() {
		s.exit <- run(environment{args: args, stdout: s.out, stderr: s.out, root: root, ctx: ctx}, "demo", ownDefaults, main)
	}()
	return s
}

func (s *started) socket() string  { return filepath.Join(s.root, "/run/sluice/demo/demo.sock") }
func (s *started) metrics() string { return filepath.Join(s.root, "/run/sluice/demo/metrics.sock") }

func (s *started) wantExit(t *testing.T, want int) {
	t.Helper()
	if got := <-s.exit; got != want {
		t.Fatalf("exit code %d, want %d; log:\n%s", got, want, s.out)
	}
}

type service struct {
	pb.UnimplementedTestServiceServer
	call func(context.Context) error
}

func (s *service) EmptyCall(ctx context.Context, _ *pb.Empty) (*pb.Empty, error) {
	return &pb.Empty{}, s.call(ctx)
}

func options(svc *service) rpc.Options {
	methods := rpc.Methods{}
	for _, d := range pb.TestService_ServiceDesc.Methods {
		methods["/grpc.testing.TestService/"+d.MethodName] = rpc.Method{Access: rpc.Group()}
	}
	for _, d := range pb.TestService_ServiceDesc.Streams {
		methods["/grpc.testing.TestService/"+d.StreamName] = rpc.Method{Access: rpc.Group()}
	}
	return rpc.Options{Register: func(r grpc.ServiceRegistrar) { pb.RegisterTestServiceServer(r, svc) }, Methods: methods}
}

func get(t *testing.T, socket, path string) (int, string) {
	t.Helper()
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}
	r, err := (&http.Client{Transport: tr}).Get("http://x" + path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(b)
}

func TestServiceStartsServesAndStopsInOrder(t *testing.T) {
	var order []string // written by one goroutine at a time
	ready, inCall, release := make(chan struct{}), make(chan struct{}), make(chan struct{})
	s := start(t, func(ctx context.Context, p *Process, cfg own) error {
		if cfg.Size != 5 {
			return fmt.Errorf("size is %d", cfg.Size)
		}
		p.OnExit(func() error { order = append(order, "store closed"); return nil })
		p.OnExit(func() error { order = append(order, "cache closed"); return nil })
		if _, err := Phase(p, "open store", func() (int, error) { return 1, nil }); err != nil {
			return err
		}
		srv, err := p.NewServer(options(&service{call: func(context.Context) error {
			close(inCall)
			<-release
			order = append(order, "call done")
			return nil
		}}))
		if err != nil {
			return err
		}
		p.Go("sweep", func(ctx context.Context) error {
			<-ctx.Done()
			order = append(order, "work done")
			return ctx.Err()
		})
		srv.SetAllServing(true)
		p.Ready()
		close(ready)
		return p.Serve(ctx, srv)
	}, "--size=5")
	<-ready
	cc, err := client.Dial(s.socket(), client.Options{WaitForReady: true})
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	h, err := grpc_health_v1.NewHealthClient(cc).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	if err != nil || h.Status != grpc_health_v1.HealthCheckResponse_SERVING {
		t.Errorf("health is %v, %v", h, err)
	}
	code, body := get(t, s.metrics(), "/metrics")
	for _, want := range []string{
		`sluice_demo_start_phase_seconds{phase="open store"}`, "sluice_demo_ready_seconds ",
		"sluice_demo_build_info{", "process_resident_memory_bytes", "sluice_demo_socket_connections 1",
		"sluice_demo_socket_refused_connections_total 0", "grpc_server_handled_total",
	} {
		if code != 200 || !strings.Contains(body, want) {
			t.Errorf("metrics (%d) lack %s", code, want)
		}
	}
	if code, _ := get(t, s.metrics(), "/debug/pprof/"); code != 404 {
		t.Errorf("pprof answers %d without being asked for", code)
	}
	call := make(chan error, 1)
	go func() {
		_, err := pb.NewTestServiceClient(cc).EmptyCall(context.Background(), &pb.Empty{})
		call <- err
	}()
	<-inCall
	s.stop()
	close(release)
	if err := <-call; err != nil {
		t.Errorf("the running call got %v", err)
	}
	s.wantExit(t, ExitOK)
	if got := strings.Join(order, ", "); got != "call done, work done, cache closed, store closed" {
		t.Errorf("order is %s", got)
	}
	want := "starting, metrics, start phase done, ready, listening, stopping, stopped"
	if got := strings.Join(s.out.messages(t), ", "); got != want {
		t.Errorf("log is %s, want %s", got, want)
	}
	for _, path := range []string{s.socket(), s.metrics()} {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", path, err)
		}
	}
}

// TestProbesFollowTheStartTheServerAndTheEnd: /livez succeeds throughout, and /readyz explains why
// the process does not serve.
func TestProbesFollowTheStartTheServerAndTheEnd(t *testing.T) {
	steps, inCall, release := make(chan struct{}), make(chan struct{}), make(chan struct{})
	step := func() { steps <- struct{}{}; <-steps }
	s := start(t, func(ctx context.Context, p *Process, _ own) error {
		if err := p.Phase("open store", func() error { step(); return nil }); err != nil {
			return err
		}
		srv, err := p.NewServer(options(&service{call: func(context.Context) error {
			close(inCall)
			<-release
			return nil
		}}))
		if err != nil {
			return err
		}
		p.Waiting("waiting for the sources")
		p.Go("readiness", func(ctx context.Context) error {
			step()
			p.Standby(true)
			step()
			p.Standby(false)
			srv.SetAllServing(true)
			p.Ready()
			step()
			p.Unready(errors.New("a peer is unavailable"))
			step()
			p.Unready(nil)
			<-ctx.Done()
			return nil
		})
		return p.Serve(ctx, srv)
	}, "--health-address=127.0.0.1:0", "--metrics-address=off")
	<-steps
	address := s.logged(t, "health")["address"].(string)
	probe := func(path string) string {
		r, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Get("http://" + address + path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("%d %s", r.StatusCode, b)
	}
	wantProbes := func(when string, code int, why string) {
		t.Helper()
		want := fmt.Sprintf("%d %s\n", code, why)
		servicetest.EventuallyNil(t, when, func() error {
			if got := probe("/readyz"); got != want {
				return fmt.Errorf("/readyz says %q, want %q", got, want)
			}
			return nil
		})
		if got := probe("/livez"); got != "200 ok\n" {
			t.Errorf("%s: /livez says %q", when, got)
		}
	}
	wantProbes("in a phase", 503, "starting: open store")
	steps <- struct{}{}
	<-steps
	wantProbes("before it serves", 503, "waiting for the sources")
	steps <- struct{}{}
	<-steps
	wantProbes("while it stands by", 200, "ok")
	steps <- struct{}{}
	cc, err := client.Dial(s.socket(), client.Options{WaitForReady: true})
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	call := make(chan error, 1)
	go func() {
		_, err := pb.NewTestServiceClient(cc).EmptyCall(context.Background(), &pb.Empty{})
		call <- err
	}()
	<-inCall
	wantProbes("while it serves", 200, "ok")
	<-steps
	steps <- struct{}{}
	<-steps
	wantProbes("while a peer is unavailable", 503, "a peer is unavailable")
	steps <- struct{}{}
	wantProbes("when it is back", 200, "ok")
	s.stop()
	wantProbes("while it stops", 503, "stopping")
	close(release)
	if err := <-call; err != nil {
		t.Errorf("the running call got %v", err)
	}
	s.wantExit(t, ExitOK)
}

func TestFailingStartNamesThePhaseAndExitsWithOne(t *testing.T) {
	s := start(t, func(_ context.Context, p *Process, _ own) error {
		return p.Phase("open store", func() error { return errors.New("disk is on fire") })
	})
	s.wantExit(t, ExitFailed)
	if !strings.Contains(s.out.String(), `"error":"open store: disk is on fire"`) {
		t.Errorf("log:\n%s", s.out)
	}
}

func TestStartThatAPersonMustPrepareExitsWithTwo(t *testing.T) {
	s := start(t, func(_ context.Context, p *Process, _ own) error {
		return p.Phase("probe", func() error { return Misconfigured(errors.New("no bpffs is mounted")) })
	})
	s.wantExit(t, ExitUsage)
	if !strings.Contains(s.out.String(), `"error":"probe: no bpffs is mounted"`) {
		t.Errorf("log:\n%s", s.out)
	}
	if err := Misconfigured(nil); err != nil {
		t.Errorf("no error became %v", err)
	}
}

func TestWrongConfigurationIsPrintedAndExitsWithTwo(t *testing.T) {
	s := start(t, func(context.Context, *Process, own) error { t.Error("main ran"); return nil },
		"--size=101", "--metrics-address=off", "--metrics-pprof", "--socket-path=relative", "--shutdown-timeout=0s",
		"--health-address=0.0.0.0:80")
	s.wantExit(t, ExitUsage)
	for _, want := range []string{
		"sluice-demo: size: 101 is more than 100\n",
		"sluice-demo: metrics.pprof: needs metrics.address, which is off\n",
		"sluice-demo: socket.path: \"relative\" is not an absolute path\n",
		"sluice-demo: shutdownTimeout: 0s is not between",
		"sluice-demo: health.address: \"0.0.0.0:80\" is not ip:port with a loopback address, nor off\n",
	} {
		if !strings.Contains(s.out.String(), want) {
			t.Errorf("missing %q in:\n%s", want, s.out)
		}
	}
	for _, address := range []string{"nonsense", "/" + strings.Repeat("x", 200)} {
		s := start(t, func(context.Context, *Process, own) error { t.Error("main ran"); return nil },
			"--metrics-address="+address)
		s.wantExit(t, ExitUsage)
	}
}

func TestHelpAndVersionExitWithZero(t *testing.T) {
	for _, arg := range []string{"--help", "--version", "--print-config"} {
		s := start(t, func(context.Context, *Process, own) error { t.Error("main ran"); return nil }, arg)
		s.wantExit(t, ExitOK)
		if s.out.String() == "" {
			t.Errorf("%s printed nothing", arg)
		}
	}
}

func TestBackgroundWorkThatEndsStopsTheService(t *testing.T) {
	for name, result := range map[string]error{"with an error": errors.New("lost the store"), "without one": nil} {
		s := start(t, func(ctx context.Context, p *Process, _ own) error {
			srv, err := p.NewServer(options(&service{}))
			if err != nil {
				return err
			}
			p.Go("sweep", func(context.Context) error { return result })
			p.Go("other", func(ctx context.Context) error { <-ctx.Done(); return nil })
			return p.Serve(ctx, srv)
		})
		s.wantExit(t, ExitFailed)
		if !strings.Contains(s.out.String(), "background work ended: sweep") {
			t.Errorf("%s: log:\n%s", name, s.out)
		}
	}
}

func TestSecondCopyIsRefusedWhileTheFirstServes(t *testing.T) {
	listening := make(chan struct{})
	s := start(t, func(ctx context.Context, p *Process, _ own) error {
		l, err := p.Listen()
		if err != nil {
			return err
		}
		close(listening)
		return errors.Join(p.Wait(ctx), l.Close())
	}, "--metrics-address=off")
	<-listening
	out := &output{}
	code := run(environment{
		args: []string{"--socket-group=-1", "--metrics-address=off"}, stdout: out, stderr: out,
		root: s.root,
	}, "demo", ownDefaults,
		func(ctx context.Context, p *Process, _ own) error {
			srv, err := p.NewServer(options(&service{}))
			if err != nil {
				return err
			}
			return p.Serve(ctx, srv)
		})
	if code != ExitFailed || !strings.Contains(out.String(), "another process serves this socket") {
		t.Errorf("the second copy exited with %d:\n%s", code, out)
	}
	s.stop()
	s.wantExit(t, ExitOK)
}

func TestCallThatDoesNotEndIsCutAtTheBound(t *testing.T) {
	inCall := make(chan struct{})
	s := start(t, func(ctx context.Context, p *Process, _ own) error {
		srv, err := p.NewServer(options(&service{call: func(ctx context.Context) error {
			close(inCall)
			<-ctx.Done()
			return ctx.Err()
		}}))
		if err != nil {
			return err
		}
		return p.Serve(ctx, srv)
	}, "--shutdown-timeout=30ms")
	cc, err := client.Dial(s.socket(), client.Options{WaitForReady: true})
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	call := make(chan error, 1)
	go func() {
		_, err := pb.NewTestServiceClient(cc).EmptyCall(context.Background(), &pb.Empty{})
		call <- err
	}()
	<-inCall
	s.stop()
	if err := <-call; status.Code(err) != codes.Unavailable && status.Code(err) != codes.Canceled {
		t.Errorf("the call got %v", err)
	}
	s.wantExit(t, ExitOK)
	if !strings.Contains(s.out.String(), "calls were terminated at shutdown") {
		t.Errorf("log:\n%s", s.out)
	}
}

func TestWorkThatDoesNotStopIsReported(t *testing.T) {
	hang := make(chan struct{})
	defer close(hang)
	s := start(t, func(ctx context.Context, p *Process, _ own) error {
		p.OnExit(func() error { t.Error("something was closed under running work"); return nil })
		p.Go("stuck", func(context.Context) error { <-hang; return nil })
		return nil
	}, "--shutdown-timeout=10ms")
	s.wantExit(t, ExitFailed)
	if !strings.Contains(s.out.String(), "background work did not stop") {
		t.Errorf("log:\n%s", s.out)
	}
}

func TestSignalEndsTheContext(t *testing.T) {
	running := make(chan struct{})
	s := start(t, func(ctx context.Context, p *Process, _ own) error {
		close(running)
		return p.Wait(ctx)
	})
	<-running
	if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	s.wantExit(t, ExitOK)
}

func TestMetricsOnTCPWithPprofWhenAskedFor(t *testing.T) {
	running := make(chan struct{})
	s := start(t, func(ctx context.Context, p *Process, _ own) error {
		close(running)
		return p.Wait(ctx)
	}, "--metrics-address=127.0.0.1:0", "--metrics-pprof")
	<-running
	address := s.logged(t, "metrics")["address"].(string)
	for _, path := range []string{"/metrics", "/debug/pprof/heap"} {
		r, err := http.Get("http://" + address + path)
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		if r.StatusCode != 200 {
			t.Errorf("%s answers %d", path, r.StatusCode)
		}
	}
	http.DefaultClient.CloseIdleConnections()
	s.stop()
	s.wantExit(t, ExitOK)
}

func TestCallsToOtherServicesAreCounted(t *testing.T) {
	called := make(chan struct{})
	s := start(t, func(ctx context.Context, p *Process, _ own) error {
		srv, err := p.NewServer(options(&service{call: func(context.Context) error { return nil }}))
		if err != nil {
			return err
		}
		conn, err := p.Dial(p.Config.Socket.Path, 0) // connects to this very service
		if err != nil {
			return err
		}
		p.Go("call", func(ctx context.Context) error {
			_, err := pb.NewTestServiceClient(conn).EmptyCall(ctx, &pb.Empty{}, grpc.WaitForReady(true))
			if err != nil {
				return err
			}
			close(called)
			<-ctx.Done()
			return ctx.Err()
		})
		return p.Serve(ctx, srv)
	})
	<-called
	want := `grpc_client_handled_total{grpc_code="OK",grpc_method="EmptyCall",grpc_service="grpc.testing.TestService",grpc_type="unary"} 1`
	if _, body := get(t, s.metrics(), "/metrics"); !strings.Contains(body, want) {
		t.Errorf("the metrics do not have\n%s", want)
	}
	s.stop()
	s.wantExit(t, ExitOK)
}

func TestFailureWhileStoppingIsNotTakenForTheSignal(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want int
	}{
		"the signal alone": {fmt.Errorf("watch: %w", context.Canceled), ExitOK},
		"both":             {errors.Join(context.Canceled, errors.New("store not written")), ExitFailed},
	} {
		running := make(chan struct{})
		s := start(t, func(ctx context.Context, p *Process, _ own) error {
			close(running)
			<-ctx.Done()
			return c.err
		})
		<-running
		s.stop()
		if got := <-s.exit; got != c.want {
			t.Errorf("%s: exit code %d, want %d", name, got, c.want)
		}
	}
}

func TestReferenceHasCommonAndOwnKeys(t *testing.T) {
	table, err := Reference("demo", ownDefaults)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| `log.level` | `--log-level` | `SLUICE_DEMO_LOG_LEVEL` | `info` |",
		"| `size` | `--size` | `SLUICE_DEMO_SIZE` | `3` |",
		"| `socket.path` | `--socket-path` | `SLUICE_DEMO_SOCKET_PATH` | `/run/sluice/demo/demo.sock` |",
	} {
		if !strings.Contains(table, want) {
			t.Errorf("missing %s in:\n%s", want, table)
		}
	}
}

func TestNobodyCountsAsRootInAServiceWithRights(t *testing.T) {
	defer func(f func() bool) { hasRights = f }(hasRights)
	for _, c := range []struct {
		rights bool
		also   []uint32
		bad    string
	}{
		{false, []uint32{1000}, ""},
		{false, nil, ""},
		{true, []uint32{0}, ""},
		{true, []uint32{0, 1000}, "socket.alsoRoot[1]"},
		{false, []uint32{1<<32 - 1}, "socket.alsoRoot[0]"},
	} {
		hasRights = func() bool { return c.rights }
		paths, err := instance.New("")
		if err != nil {
			t.Fatal(err)
		}
		cfg := defaultConfig(paths, "demo")
		cfg.Socket.AlsoRoot = c.also
		switch err := cfg.Validate(); {
		case c.bad == "" && err != nil:
			t.Errorf("rights %v, also %v: %v", c.rights, c.also, err)
		case c.bad != "" && (err == nil || !strings.Contains(err.Error(), c.bad)):
			t.Errorf("rights %v, also %v: %v, want %q", c.rights, c.also, err, c.bad)
		}
	}
}

// TestDocumentationHasTheCommonKeysAndMetrics: docs/reference/process.md lists what all services have in common.
func TestDocumentationHasTheCommonKeysAndMetrics(t *testing.T) {
	b, err := os.ReadFile("../../docs/reference/process.md")
	if err != nil {
		t.Fatal(err)
	}
	doc := string(b)
	reference, err := Reference("demo", func(instance.Paths) struct{} { return struct{}{} })
	if err != nil {
		t.Fatal(err)
	}
	reference = strings.NewReplacer("/demo", "/<service>", "demo.", "<service>.", "SLUICE_DEMO",
		"SLUICE_<SERVICE>").Replace(reference)
	for line := range strings.Lines(reference) {
		if !strings.Contains(doc, strings.TrimSpace(line)) {
			t.Errorf("docs/reference/process.md does not have the line\n%s", line)
		}
	}

	var names []string
	s := start(t, func(_ context.Context, p *Process, _ own) error {
		p.Ready()
		if err := p.Phase("open", func() error { return nil }); err != nil {
			return err
		}
		srv, err := p.NewServer(options(&service{}))
		if err != nil {
			return err
		}
		l, err := p.Listen()
		if err != nil {
			return err
		}
		srv.Stop()
		defer l.Close()
		ch := make(chan *prometheus.Desc, 1000)
		p.Metrics.Describe(ch)
		close(ch)
		for d := range ch {
			name := regexp.MustCompile(`fqName: "([^"]+)"`).FindStringSubmatch(d.String())[1]
			if !strings.HasPrefix(name, "go_") && !strings.HasPrefix(name, "process_") {
				names = append(names, strings.Replace(name, "sluice_demo_", "sluice_<service>_", 1))
			}
		}
		return nil
	})
	s.wantExit(t, ExitOK)
	for _, name := range names {
		if !strings.Contains(doc, "`"+name+"`") {
			t.Errorf("docs/reference/process.md does not have the metric %s", name)
		}
	}
	for _, m := range regexp.MustCompile("`((?:sluice_<service>|grpc)_[a-z_]+)`").FindAllStringSubmatch(doc, -1) {
		if !slices.Contains(names, m[1]) {
			t.Errorf("docs/reference/process.md has the metric %s, which does not exist; there are %v", m[1], names)
		}
	}
}
