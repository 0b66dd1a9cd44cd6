// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/fault/faulttest"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc/client"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/identity/internal/allocator/storetest"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/etcdtest"
	"github.com/sluice-net/sluice/services/identity/internal/snapshot"
)

// asService makes this test binary the service itself.
const asService = "SLUICE_TEST_AS_SERVICE"

func TestMain(m *testing.M) {
	if os.Getenv(asService) != "" {
		main()
	}
	code := leaktest.Run(m)
	etcdtest.Cleanup()
	os.Exit(code)
}

// bench is a place where processes of the service run as their own user.
type bench struct {
	t    *testing.T
	dir  string
	exe  string
	etcd *etcdtest.Server
}

func newBench(t *testing.T) *bench {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("needs root: the service runs as a user of its own")
	}
	dir, err := os.MkdirTemp("", "identity-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	b := &bench{t: t, dir: dir, exe: filepath.Join(dir, "sluice-identity"), etcd: etcdtest.Start(t)}
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
	for _, d := range []string{"run", "state"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(filepath.Join(dir, d), int(instance.FirstServiceID), int(instance.GroupID)); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{dir, filepath.Dir(strings.TrimPrefix(b.etcd.Endpoint, "unix://"))} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	b.openEtcd()
	return b
}

// openEtcd lets the service's user connect; the kernel wants write permission for that.
func (b *bench) openEtcd() {
	b.t.Helper()
	if err := os.Chmod(strings.TrimPrefix(b.etcd.Endpoint, "unix://"), 0o666); err != nil {
		b.t.Fatal(err)
	}
}

// proc is one process of the service.
type proc struct {
	identityv1.IdentityServiceClient
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
	return b.startAt(filepath.Join(b.dir, "run", "identity.sock"), append([]string{"--state-dir", filepath.Join(b.dir, "state"), "--node", "n1"}, args...)...)
}

func (b *bench) startAt(socket string, args ...string) *proc {
	b.t.Helper()
	p := &proc{t: b.t, ended: make(chan struct{})}
	p.cmd = exec.Command(b.exe, append([]string{
		"--socket-path", socket, "--metrics-address", "off", "--etcd-endpoints", b.etcd.Endpoint, "--etcd-timeout", "2s", "--etcd-heartbeat", "100ms", "--gc-interval", "50ms",
	}, args...)...)
	p.cmd.Env = []string{asService + "=1", "GORACE=atexit_sleep_ms=0"} // -race waits a second otherwise
	p.cmd.Stderr = p
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: instance.FirstServiceID, Gid: instance.GroupID}, Pdeathsig: syscall.SIGKILL}
	p.faults = faulttest.Start(b.t, p.cmd)
	go func() {
		defer close(p.ended)
		p.cmd.Wait() //nolint:errcheck // the state is looked at by who cares
	}()
	var err error
	if p.conn, err = client.Dial(socket, client.Options{WaitForReady: true}); err != nil {
		b.t.Fatal(err)
	}
	p.IdentityServiceClient, p.health = identityv1.NewIdentityServiceClient(p.conn), grpc_health_v1.NewHealthClient(p.conn)
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
	case <-time.After(storetest.Patience):
		p.t.Fatalf("the process does not end:\n%s", p.log())
	}
	p.conn.Close()
	return p.cmd.ProcessState.ExitCode()
}

func (p *proc) state() grpc_health_v1.HealthCheckResponse_ServingStatus {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), storetest.Patience)
	defer cancel()
	resp, err := p.health.Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: identityv1.IdentityService_ServiceDesc.ServiceName})
	if err != nil {
		p.t.Fatalf("health: %v\n%s", err, p.log())
	}
	return resp.GetStatus()
}

func (p *proc) serving() {
	p.t.Helper()
	storetest.Eventually(p.t, "SERVING", func() bool { return p.state() == grpc_health_v1.HealthCheckResponse_SERVING })
}

func (p *proc) status() *identityv1.GetStatusResponse {
	p.t.Helper()
	st, err := p.GetStatus(p.t.Context(), &identityv1.GetStatusRequest{})
	if err != nil {
		p.t.Fatal(err)
	}
	return st
}

func (p *proc) resolve(container, app string) (uint32, error) {
	ctx, cancel := context.WithTimeout(p.t.Context(), storetest.Patience)
	defer cancel()
	resp, err := p.ResolveEndpoint(ctx, &identityv1.ResolveEndpointRequest{
		Owner:  &workloadv1.Owner{ContainerId: container, InterfaceName: "eth0"},
		Labels: []*workloadv1.Label{{Source: "cni", Key: "app", Value: app}},
	})
	return resp.GetIdentity().GetNumber(), err
}

func (p *proc) release(container string) (uint32, error) {
	ctx, cancel := context.WithTimeout(p.t.Context(), storetest.Patience)
	defer cancel()
	resp, err := p.ReleaseIdentity(ctx, &identityv1.ReleaseIdentityRequest{Holder: &identityv1.ReleaseIdentityRequest_Owner{
		Owner: &workloadv1.Owner{ContainerId: container, InterfaceName: "eth0"},
	}})
	return resp.GetReleasedNumber(), err
}

// keys lists what etcd has below the service's prefix, of one kind.
func keys(t *testing.T, admin *clientv3.Client, kind string) []string {
	t.Helper()
	const prefix = "/sluice/v1/identity/"
	resp, err := admin.Get(t.Context(), prefix+kind+"/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, kv := range resp.Kvs {
		out = append(out, strings.TrimPrefix(string(kv.Key), prefix+kind+"/"))
	}
	return out
}

func holdsFile(t *testing.T) string {
	t.Helper()
	boot, err := snapshot.BootID()
	if err != nil {
		t.Fatal(err)
	}
	return snapshot.HoldsFile(boot)
}

func TestKernelRunsWithoutAnyRight(t *testing.T) {
	b := newBench(t)
	p := b.start()
	p.serving()
	if _, err := p.resolve("c1", "web"); err != nil {
		t.Fatal(err)
	}
	proc, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"Uid:\t65701\t65701\t65701\t65701", "Gid:\t65700\t65700\t65700\t65700", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "CapAmb:\t0000000000000000"} {
		if !strings.Contains(string(proc), line+"\n") {
			t.Errorf("status of the process has no line %q:\n%s", line, proc)
		}
	}
	for _, file := range []string{holdsFile(t), snapshot.KnownFile} {
		storetest.Eventually(t, file, func() bool {
			fi, err := os.Stat(filepath.Join(b.dir, "state", file))
			return err == nil && fi.Mode() == 0o600
		})
	}
	if code := p.stop(); code != 0 {
		t.Errorf("exit code %d after SIGTERM\n%s", code, p.log())
	}
}

func TestKernelHealthFollowsWhatIsKnown(t *testing.T) {
	b := newBench(t)
	b.etcd.Down()
	p := b.start()
	if s := p.state(); s != grpc_health_v1.HealthCheckResponse_NOT_SERVING {
		t.Errorf("first start without etcd: %s, want NOT_SERVING", s)
	}
	storetest.Eventually(t, "a reason in the status", func() bool {
		st := p.status()
		return !st.GetStoreConnected() && strings.Contains(st.GetStoreError(), "unavailable")
	})
	b.etcd.Up()
	b.openEtcd()
	p.serving()
	number, err := p.resolve("c1", "web")
	if err != nil {
		t.Fatal(err)
	}
	if code := p.stop(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	b.etcd.Down()
	p = b.start()
	p.serving()
	if again, err := p.resolve("c2", "web"); err != nil || again != number {
		t.Errorf("known set without etcd: %d, %v, want %d", again, err, number)
	}
	if st := p.status(); st.GetStoreConnected() || st.GetHeldIdentities() != 1 {
		t.Errorf("status %v, want not connected and one identity held", st)
	}
}

func TestKernelKilledAnywhereLeavesNothingBehind(t *testing.T) {
	b := newBench(t)
	admin := b.etcd.Client()
	points := []string{
		"identity/resolve/before-txn", "identity/resolve/after-txn", "identity/resolve/before-snapshot", "identity/resolve/before-answer",
		"identity/release/before-snapshot", "identity/release/before-answer", "identity/release/before-txn", "identity/release/after-txn",
	}
	p := b.start()
	names, err := p.faults.Names(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(points)
	if !slices.Equal(names, points) {
		t.Fatalf("fault points %v, this test knows %v", names, points)
	}
	p.serving()
	p.kill()
	for i, point := range points {
		app := fmt.Sprint("app", i)
		p := b.start("--gc-grace", "0s", "--gc-rest", "1s")
		p.serving()
		p.faults.KillAt(point, 0)
		number, err := p.resolve("c1", app)
		if strings.HasPrefix(point, "identity/release/") {
			if err != nil {
				t.Fatalf("%s: resolve: %v", point, err)
			}
			p.release("c1") //nolint:errcheck // it may be killed before or after the answer
		}
		if code := p.exit(); code != -1 {
			t.Fatalf("%s: exit code %d, want killed\n%s", point, code, p.log())
		}

		p = b.start("--gc-grace", "0s", "--gc-rest", "1s")
		p.serving()
		again, err := p.resolve("c1", app)
		if err != nil || number != 0 && again != number {
			t.Errorf("%s: resolving again: %d, %v, want %d", point, again, err, number)
		}
		if got, err := p.release("c1"); err != nil || got != again {
			t.Errorf("%s: release: %d, %v, want %d", point, got, err, again)
		}
		storetest.Eventually(t, point+": nothing is referred to, nothing is left", func() bool {
			return len(keys(t, admin, "ref"))+len(keys(t, admin, "id"))+len(keys(t, admin, "labels")) == 0
		})
		if st := p.status(); st.GetHeldIdentities() != 0 || st.GetPendingStoreWrites() != 0 {
			t.Errorf("%s: status %v", point, st)
		}
		if code := p.stop(); code != 0 {
			t.Errorf("%s: exit code %d\n%s", point, code, p.log())
		}
	}
}

func TestKernelDamagedHoldsStopTheStart(t *testing.T) {
	b := newBench(t)
	file := filepath.Join(b.dir, "state", holdsFile(t))
	if err := os.WriteFile(file, []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	p := b.start()
	if code := p.exit(); code != 1 || !strings.Contains(p.log(), file) {
		t.Errorf("exit code %d, want 1 and the file's name in\n%s", code, p.log())
	}
}

func TestKernelWrongConfigurationIsNamedAtOnce(t *testing.T) {
	b := newBench(t)
	p := b.start("--node", "a/b", "--quota", "0", "--etcd-endpoints", "localhost", "--etcd-prefix", "x/", "--gc-rest", "0s", "--labels-include", "*.")
	if code := p.exit(); code != 2 {
		t.Errorf("exit code %d, want 2", code)
	}
	for _, key := range []string{"node:", "quota:", "etcd:", "etcd.prefix:", "gc.rest:", "labels:"} {
		if !strings.Contains(p.log(), key) {
			t.Errorf("no word about %s in\n%s", key, p.log())
		}
	}
}

func TestKernelSecondCopyOnOneStateIsRefusedAndTakesNothing(t *testing.T) {
	b := newBench(t)
	admin := b.etcd.Client()
	first := b.start()
	first.serving()
	n, err := first.resolve("c1", "web")
	if err != nil {
		t.Fatal(err)
	}
	storetest.Eventually(t, "the reference", func() bool { return len(keys(t, admin, "ref")) == 1 })
	second := b.start("--socket-path", filepath.Join(b.dir, "run", "second.sock"))
	if code := second.exit(); code != process.ExitFailed || !strings.Contains(second.log(), durable.ErrLocked.Error()) {
		t.Errorf("the second ended with %d:\n%s", code, second.log())
	}
	if m, err := first.resolve("c1", "web"); err != nil || m != n {
		t.Errorf("the first answers %d, %v; want %d", m, err, n)
	}
	if code := first.stop(); code != process.ExitOK {
		t.Errorf("the first ended with %d:\n%s", code, first.log())
	}
	if code := func() int { p := b.start(); p.serving(); return p.stop() }(); code != process.ExitOK {
		t.Errorf("the next one ended with %d", code)
	}
}

// TestKernelNodesKilledAtRandomAgree: what was answered before a kill -9 is
// answered again after it, and every node has the same number for a set.
func TestKernelNodesKilledAtRandomAgree(t *testing.T) {
	const nodes, sets, rounds = 8, 40, 6
	b := newBench(t)
	args := func(i int) []string {
		for _, d := range []string{"run", "state"} {
			d = filepath.Join(b.dir, fmt.Sprint(d, i))
			if err := os.Mkdir(d, 0o750); err != nil && !errors.Is(err, fs.ErrExist) {
				t.Fatal(err)
			}
			if err := os.Chown(d, int(instance.FirstServiceID), int(instance.GroupID)); err != nil {
				t.Fatal(err)
			}
		}
		return []string{"--node", fmt.Sprint("n", i), "--state-dir", filepath.Join(b.dir, fmt.Sprint("state", i))}
	}
	start := func(i int) *proc {
		extra := args(i)
		return b.startAt(filepath.Join(b.dir, fmt.Sprint("run", i), "identity.sock"), extra...)
	}
	var wg sync.WaitGroup
	answered := make([]map[int]uint32, nodes) // node → set → number
	for i := range nodes {
		p := start(i)
		p.serving()
		answered[i] = map[int]uint32{}
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 7))
			for range rounds {
				kill := r.IntN(sets)
				for k := range sets {
					set := r.IntN(sets)
					if k == kill {
						// It dies somewhere in the middle of this call.
						ended := make(chan struct{})
						go func() { defer close(ended); p.resolve(fmt.Sprint("c", set), fmt.Sprint(set)) }() //nolint:errcheck // killed
						p.cmd.Process.Kill()                                                                 //nolint:errcheck // it runs
						p.kill()
						<-ended
						p = start(i)
						p.serving()
					}
					n, err := p.resolve(fmt.Sprint("c", set), fmt.Sprint(set))
					if err != nil {
						t.Errorf("node %d, set %d: %v", i, set, err)
						return
					}
					if was, ok := answered[i][set]; ok && was != n {
						t.Errorf("node %d: set %d was %d and is %d", i, set, was, n)
					}
					answered[i][set] = n
				}
			}
		})
	}
	wg.Wait()
	all := map[int]uint32{}
	for i, have := range answered {
		for set, n := range have {
			if was, ok := all[set]; ok && was != n {
				t.Errorf("set %d is %d, and %d on node %d", set, was, n, i)
			}
			all[set] = n
		}
	}
	unique := map[uint32]bool{}
	for _, n := range all {
		unique[n] = true
	}
	if len(unique) != len(all) || len(all) != sets {
		t.Errorf("%d numbers for %d sets, want %d", len(unique), len(all), sets)
	}
	if ids := keys(t, b.etcd.Client(), "id"); len(ids) != len(all) {
		t.Errorf("etcd has %d identities, want %d", len(ids), len(all))
	}
}
