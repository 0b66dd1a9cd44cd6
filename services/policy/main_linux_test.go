// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/fault/faulttest"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc/client"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/policy/internal/journal"
)

// asService makes this test binary the service itself.
const asService = "SLUICE_TEST_AS_SERVICE"

const patience = 30 * time.Second

// user is the service's own.
const user = instance.PolicyID

func TestMain(m *testing.M) {
	if os.Getenv(asService) != "" {
		main()
	}
	leaktest.Main(m)
}

// bench is a place where processes of the service run as their own user, with
// an identity service.
type bench struct {
	t   *testing.T
	dir string
	exe string
	ids *registry
}

func newBench(t *testing.T) *bench {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("needs root: the service runs as a user of its own")
	}
	dir, err := os.MkdirTemp("", "policy-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	b := &bench{t: t, dir: dir, exe: filepath.Join(dir, "sluice-policy")}
	// go test's own directory may be closed to other users.
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	exe, err := os.OpenFile(b.exe, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(exe, self); err != nil {
		t.Fatal(err)
	}
	if err := exe.Close(); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"run", "state", "files"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(filepath.Join(dir, d), int(user), int(instance.GroupID)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	b.ids = newRegistry(t, filepath.Join(dir, "identity.sock"))
	return b
}

// registry is an identity service that lists what it has and then stays silent.
type registry struct {
	identityv1.UnimplementedIdentityServiceServer
	ids map[uint32][]*workloadv1.Label
}

func newRegistry(t *testing.T, socket string) *registry {
	t.Helper()
	k8s := func(pairs ...string) (out []*workloadv1.Label) {
		for i := 0; i < len(pairs); i += 2 {
			out = append(out, &workloadv1.Label{Source: "k8s", Key: pairs[i], Value: pairs[i+1]})
		}
		return out
	}
	const namespace = "io.kubernetes.pod.namespace"
	r := &registry{ids: map[uint32][]*workloadv1.Label{
		1:   {{Source: "reserved", Key: "host"}},
		9:   {{Source: "reserved", Key: "world-ipv4"}},
		300: k8s("app", "web", namespace, "shop"),
		301: k8s("app", "db", namespace, "shop"),
	}}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(socket, 0o666); err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	identityv1.RegisterIdentityServiceServer(srv, r)
	done := make(chan struct{})
	go func() {
		defer close(done)
		srv.Serve(l) //nolint:errcheck // it ends when the test does
	}()
	t.Cleanup(func() { srv.Stop(); <-done })
	return r
}

func (r *registry) WatchIdentities(_ *identityv1.WatchIdentitiesRequest, s grpc.ServerStreamingServer[identityv1.WatchIdentitiesResponse]) error {
	for n, labels := range r.ids {
		if err := s.Send(&identityv1.WatchIdentitiesResponse{ResumeToken: []byte("t"), Event: &identityv1.WatchIdentitiesResponse_Upsert{
			Upsert: &identityv1.Identity{Number: n, Labels: labels},
		}}); err != nil {
			return err
		}
	}
	if err := s.Send(&identityv1.WatchIdentitiesResponse{ResumeToken: []byte("t"), Event: &identityv1.WatchIdentitiesResponse_Bookmark{
		Bookmark: &identityv1.Bookmark{SnapshotComplete: true},
	}}); err != nil {
		return err
	}
	<-s.Context().Done()
	return nil
}

// proc is one process of the service.
type proc struct {
	policyv1.PolicyServiceClient
	t      *testing.T
	cmd    *exec.Cmd
	health grpc_health_v1.HealthClient
	conn   *grpc.ClientConn
	faults *faulttest.Controller
	ended  chan struct{}
	mu     sync.Mutex
	stderr bytes.Buffer // guarded by mu
}

func (p *proc) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stderr.Write(b)
}

func (p *proc) log() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stderr.String()
}

func (b *bench) start(args ...string) *proc {
	b.t.Helper()
	p := &proc{t: b.t, ended: make(chan struct{})}
	socket := filepath.Join(b.dir, "run", "policy.sock")
	p.cmd = exec.Command(b.exe, append([]string{
		"--socket-path", socket, "--metrics-address", "off", "--state-dir", filepath.Join(b.dir, "state"),
		"--sources-identity", filepath.Join(b.dir, "identity.sock"),
	}, args...)...)
	p.cmd.Env = []string{asService + "=1", "GORACE=atexit_sleep_ms=0"} // -race waits a second otherwise
	p.cmd.Stderr = p
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: instance.GroupID}, Pdeathsig: syscall.SIGKILL}
	p.faults = faulttest.Start(b.t, p.cmd)
	go func() {
		defer close(p.ended)
		p.cmd.Wait() //nolint:errcheck // the state is looked at by who cares
	}()
	var err error
	if p.conn, err = client.Dial(socket, client.Options{WaitForReady: true}); err != nil {
		b.t.Fatal(err)
	}
	p.PolicyServiceClient, p.health = policyv1.NewPolicyServiceClient(p.conn), grpc_health_v1.NewHealthClient(p.conn)
	b.t.Cleanup(p.kill)
	return p
}

func (p *proc) kill() {
	p.cmd.Process.Kill() //nolint:errcheck // it may have ended
	<-p.ended
	p.conn.Close()
}

// stop asks the process to end and returns its exit code.
func (p *proc) stop() int {
	p.t.Helper()
	p.cmd.Process.Signal(syscall.SIGTERM) //nolint:errcheck // it may have ended
	return p.exit()
}

func (p *proc) exit() int {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(patience):
		p.t.Fatalf("the process does not end:\n%s", p.log())
	}
	p.conn.Close()
	return p.cmd.ProcessState.ExitCode()
}

func (p *proc) ctx() context.Context {
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	p.t.Cleanup(cancel)
	return ctx
}

func (p *proc) state() grpc_health_v1.HealthCheckResponse_ServingStatus {
	p.t.Helper()
	resp, err := p.health.Check(p.ctx(), &grpc_health_v1.HealthCheckRequest{Service: policyv1.PolicyService_ServiceDesc.ServiceName})
	if err != nil {
		p.t.Fatalf("health: %v\n%s", err, p.log())
	}
	return resp.GetStatus()
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not in time: %s", what)
		}
	}
}

func (p *proc) serving() {
	p.t.Helper()
	eventually(p.t, "SERVING", func() bool { return p.state() == grpc_health_v1.HealthCheckResponse_SERVING })
}

func (p *proc) status() *policyv1.GetStatusResponse {
	p.t.Helper()
	st, err := p.GetStatus(p.ctx(), &policyv1.GetStatusRequest{})
	if err != nil {
		p.t.Fatalf("%v\n%s", err, p.log())
	}
	return st
}

func (p *proc) synced(name string) {
	p.t.Helper()
	eventually(p.t, name+" has said everything", func() bool {
		return slices.ContainsFunc(p.status().GetSources(), func(s *policyv1.SourceStatus) bool { return s.GetName() == name && s.GetSynced() })
	})
}

// allowPort lets web reach db on a port; the rest is a comment.
func allowPort(port int, size int) []byte {
	return fmt.Appendf(nil, "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: db, namespace: shop}\nspec:\n"+
		"  podSelector: {matchLabels: {app: db}}\n  ingress:\n  - from: [{podSelector: {matchLabels: {app: web}}}]\n    ports: [{protocol: TCP, port: %d}]\n# %s\n",
		port, strings.Repeat("x", size))
}

// allowInParts allows two ports by the first and the last policy of a change that
// the journal writes in parts.
func allowInParts(port int) []byte {
	var b strings.Builder
	b.Write(allowPort(port, 0))
	for i := range 600 {
		fmt.Fprintf(&b, "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p%d, namespace: other}\nspec: {podSelector: {}, ingress: [{ports: [{port: %d}]}]}\n", i, port)
	}
	b.WriteString("---\n" + strings.Replace(string(allowPort(port+lastPort, 0)), "name: db", "name: last", 1))
	return []byte(b.String())
}

// lastPort is what the port of the last policy of allowInParts is above the first.
const lastPort = 20_000

func (p *proc) apply(manifest []byte) (uint64, error) {
	out, err := p.UpsertPolicies(p.ctx(), &policyv1.UpsertPoliciesRequest{Manifests: manifest})
	return out.GetRevision(), err
}

// verdict of web to db on a port.
func (p *proc) verdict(port uint32) policyv1.Action {
	p.t.Helper()
	x, err := p.Explain(p.ctx(), &policyv1.ExplainRequest{From: &policyv1.Peer{Identity: 300}, To: &policyv1.Peer{Identity: 301}, Protocol: 6, Port: port})
	if err != nil {
		p.t.Fatalf("%v\n%s", err, p.log())
	}
	return x.GetVerdict()
}

// tables are those of the db: what a subscriber is told, less what belongs to
// one run of the service.
func (p *proc) tables(subject uint32) (hash string, revision uint64) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	w, err := p.WatchPolicyTables(ctx)
	if err != nil {
		p.t.Fatal(err)
	}
	if err := w.Send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Subscribe{
		Subscribe: &policyv1.Subscribe{Name: "datapath", Subjects: []uint32{subject}},
	}}); err != nil {
		p.t.Fatal(err)
	}
	var hashes []string
	for {
		m, err := w.Recv()
		if err != nil {
			p.t.Fatalf("%v\n%s", err, p.log())
		}
		for _, s := range m.GetSteps() {
			if d := s.GetTableDefine(); d != nil {
				hashes = append(hashes, fmt.Sprintf("%x", d.GetStructureHash()))
			}
			if b := s.GetBarrier(); b != nil {
				slices.Sort(hashes)
				return strings.Join(hashes, " "), b.GetPolicyRevision()
			}
		}
	}
}

func TestKernelRunsWithoutAnyRight(t *testing.T) {
	b := newBench(t)
	p := b.start()
	p.serving()
	if _, err := p.apply(allowPort(5432, 0)); err != nil {
		t.Fatal(err)
	}
	rights, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"Uid:\t65703\t65703\t65703\t65703", "Gid:\t65700\t65700\t65700\t65700", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "CapAmb:\t0000000000000000"} {
		if !strings.Contains(string(rights), line+"\n") {
			t.Errorf("status of the process has no line %q:\n%s", line, rights)
		}
	}
	if fi, err := os.Stat(filepath.Join(b.dir, "state", journal.File)); err != nil || fi.Mode() != 0o600 {
		t.Errorf("journal: %v, %v", fi, err)
	}
	if code := p.stop(); code != process.ExitOK {
		t.Errorf("exit code %d after SIGTERM\n%s", code, p.log())
	}
}

// INV-60, INV-61
func TestKernelRestartServesTheSameBeforeAnySourceAnswers(t *testing.T) {
	b := newBench(t)
	file := filepath.Join(b.dir, "files", "db.yaml")
	if err := os.WriteFile(file, allowPort(5432, 0), 0o644); err != nil {
		t.Fatal(err)
	}
	p := b.start("--sources-directory", filepath.Join(b.dir, "files"))
	p.synced("identity")
	p.synced("file")
	hash, revision := p.tables(301)
	if hash == "" || revision != 1 {
		t.Fatalf("tables %q at revision %d", hash, revision)
	}
	p.kill()

	// Neither source can be asked.
	p = b.start("--sources-directory", filepath.Join(b.dir, "absent"), "--sources-identity", filepath.Join(b.dir, "absent.sock"))
	p.serving()
	if again, r := p.tables(301); again != hash || r != revision {
		t.Errorf("after a restart: %q at %d, want %q at %d", again, r, hash, revision)
	}
	if a := p.verdict(5432); a != policyv1.Action_ACTION_ALLOW {
		t.Errorf("after a restart: %s", a)
	}
	for _, s := range p.status().GetSources() {
		if s.GetName() != "grpc" && s.GetSynced() {
			t.Errorf("source %v has synced", s)
		}
	}
	p.kill()

	// What is gone when the source can be asked is gone. A directory without any
	// file would be looked at twice.
	if err := os.Rename(file, filepath.Join(filepath.Dir(file), "removed")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(filepath.Dir(file), "none.yaml"), []byte("# no policy\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	p = b.start("--sources-directory", filepath.Join(b.dir, "files"))
	eventually(t, "the policy is gone", func() bool { return p.status().GetPolicies() == 0 })
	if code := p.stop(); code != process.ExitOK {
		t.Errorf("exit code %d\n%s", code, p.log())
	}
}

// INV-60
func TestKernelKilledAnywhereLosesNoAnsweredChange(t *testing.T) {
	b := newBench(t)
	p := b.start()
	names, err := p.faults.Names(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	points := []string{
		"policy/change/before-answer", "policy/change/before-compile", "policy/change/before-journal",
		"policy/journal/before-stage", "policy/journal/before-tidy", "policy/journal/before-write",
	}
	if !slices.Equal(names, points) {
		t.Fatalf("fault points %v, this test knows %v", names, points)
	}
	p.synced("identity")
	p.tables(301)
	port := 1000
	answered, err := p.apply(allowInParts(port))
	if err != nil {
		t.Fatal(err)
	}
	policies := p.status().GetPolicies()
	p.kill()
	for _, manifests := range []func(int) []byte{func(port int) []byte { return allowPort(port, 0) }, allowInParts} {
		for _, point := range points {
			large := len(manifests(0)) > 1000
			if !large && (point == "policy/journal/before-stage" || point == "policy/journal/before-tidy") {
				continue // a small change does not get there
			}
			p := b.start()
			p.synced("identity")
			p.faults.KillAt(point, 0)
			for range 4 {
				port++
				revision, err := p.apply(manifests(port))
				if err != nil {
					break
				}
				answered = revision
			}
			if code := p.exit(); code != -1 {
				t.Fatalf("%s: exit code %d, want killed\n%s", point, code, p.log())
			}

			p = b.start()
			p.serving()
			allows := func(port int) bool {
				first, last := p.verdict(uint32(port)), p.verdict(uint32(port+lastPort))
				if large && first != last {
					t.Errorf("%s: half of a change: %d: %s, %d: %s", point, port, first, port+lastPort, last)
				}
				return first == policyv1.Action_ACTION_ALLOW
			}
			_, revision := p.tables(301)
			// The change that was not answered is whole, or not there.
			before, after := allows(port-1), allows(port)
			if !(revision == answered && before && !after || revision == answered+1 && after && !before) || p.status().GetPolicies() != policies {
				t.Errorf("%s: revision %d, answered was %d; %d is allowed: %v, %d: %v; %d policies, want %d", point, revision, answered,
					port-1, before, port, after, p.status().GetPolicies(), policies)
			}
			if answered, err = p.apply(manifests(port)); err != nil || !allows(port) {
				t.Errorf("%s: the same again: %v", point, err)
			}
			if code := p.stop(); code != process.ExitOK {
				t.Errorf("%s: exit code %d\n%s", point, code, p.log())
			}
		}
		// The next ones begin with both ports of the same change.
		p := b.start()
		port++
		if answered, err = p.apply(allowInParts(port)); err != nil {
			t.Fatal(err)
		}
		p.kill()
	}
}

func TestKernelChangeThatStorageDoesNotTakeIsUndone(t *testing.T) {
	b := newBench(t)
	p := b.start()
	p.synced("identity")
	hash, _ := p.tables(301)
	if hash != "" {
		t.Fatalf("tables without policy: %s", hash)
	}
	if _, err := p.apply(allowPort(5432, 0)); err != nil {
		t.Fatal(err)
	}
	hash, _ = p.tables(301)
	for _, point := range []string{"policy/journal/before-write", "policy/change/before-journal"} {
		p.faults.FailAt(point, 0, "no space left on device")
		if _, err := p.apply(allowPort(80, 0)); status.Code(err) != codes.Unavailable && point != "policy/change/before-journal" || err == nil {
			t.Errorf("%s: %v, want UNAVAILABLE", point, err)
		}
		p.faults.Pass(point)
		if again, revision := p.tables(301); again != hash || revision != 1 {
			t.Errorf("%s: tables %q at %d, want %q at 1", point, again, revision, hash)
		}
	}
	if revision, err := p.apply(allowPort(81, 0)); err != nil || revision != 2 {
		t.Errorf("afterwards: %d, %v", revision, err)
	}
	p.kill()
	p = b.start()
	p.serving()
	if a := p.verdict(81); a != policyv1.Action_ACTION_ALLOW {
		t.Errorf("after a restart: %s", a)
	}
}

// INV-43
func TestKernelLostPoliciesStopTheStart(t *testing.T) {
	for what, damage := range map[string]func(file string) error{
		"emptied": func(file string) error { return os.Truncate(file, 0) },
		"cut":     func(file string) error { return os.Truncate(file, 20_000) },
		"removed": os.Remove,
	} {
		b := newBench(t)
		p := b.start()
		if _, err := p.apply(allowPort(5432, 0)); err != nil {
			t.Fatal(err)
		}
		p.kill()
		file := filepath.Join(b.dir, "state", journal.File)
		if err := damage(file); err != nil {
			t.Fatal(err)
		}
		p = b.start()
		if code := p.exit(); code != process.ExitFailed || !strings.Contains(p.log(), file) || !strings.Contains(p.log(), "restore a copy of it") {
			t.Errorf("%s: exit code %d, want %d and the file's name in\n%s", what, code, process.ExitFailed, p.log())
		}
	}
}

func TestKernelHealthWaitsForTheSources(t *testing.T) {
	b := newBench(t)
	p := b.start("--sources-directory", filepath.Join(b.dir, "absent"))
	p.synced("identity")
	if s := p.state(); s != grpc_health_v1.HealthCheckResponse_NOT_SERVING {
		t.Errorf("without the directory: %s, want NOT_SERVING", s)
	}
	eventually(t, "a reason in the status", func() bool {
		return slices.ContainsFunc(p.status().GetSources(), func(s *policyv1.SourceStatus) bool {
			return s.GetName() == "file" && strings.Contains(s.GetError(), "no such file")
		})
	})
	if err := os.Mkdir(filepath.Join(b.dir, "absent"), 0o755); err != nil {
		t.Fatal(err)
	}
	p.serving()
	if code := p.stop(); code != process.ExitOK {
		t.Errorf("exit code %d\n%s", code, p.log())
	}
}

func TestKernelSecondCopyOnOneStateIsRefused(t *testing.T) {
	b := newBench(t)
	first := b.start()
	first.serving()
	second := b.start("--socket-path", filepath.Join(b.dir, "run", "second.sock"))
	if code := second.exit(); code != process.ExitFailed || !strings.Contains(second.log(), durable.ErrLocked.Error()) {
		t.Errorf("the second ended with %d:\n%s", code, second.log())
	}
	if code := first.stop(); code != process.ExitOK {
		t.Errorf("the first ended with %d:\n%s", code, first.log())
	}
}

func TestKernelWrongConfigurationIsNamedAtOnce(t *testing.T) {
	b := newBench(t)
	p := b.start("--sources-identity", "x", "--sources-directory", "y", "--cluster-name", "", "--enforcement-mode", "z",
		"--limits-policies", "0", "--limits-manifests", "0", "--names-max", "0", "--names-addresses", "0", "--names-grace", "-1s", "--subscribers-linger", "-1s")
	if code := p.exit(); code != 2 {
		t.Errorf("exit code %d, want 2", code)
	}
	for _, key := range []string{
		"sources.identity:", "sources.directory:", "cluster.name:", "enforcement.mode:", "limits.policies:", "limits.manifests:",
		"names.max:", "names.addresses:", "names.grace:", "subscribers.linger:",
	} {
		if !strings.Contains(p.log(), key) {
			t.Errorf("no word about %s in\n%s", key, p.log())
		}
	}
}
