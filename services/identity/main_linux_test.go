// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/identity/internal/snapshot"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
)

func TestMain(m *testing.M) {
	servicetest.Main(main)
	code := leaktest.Run(m)
	etcdtest.Cleanup()
	os.Exit(code)
}

// bench is a place for processes of the service, with an etcd.
type bench struct {
	*servicetest.Place
	t    *testing.T
	etcd *etcdtest.Server
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{Place: servicetest.NewPlace(t, instance.FirstServiceID), t: t, etcd: etcdtest.Start(t)}
	if err := os.Chmod(filepath.Dir(strings.TrimPrefix(b.etcd.Endpoint, "unix://")), 0o755); err != nil {
		t.Fatal(err)
	}
	b.openEtcd()
	return b
}

// openEtcd allows the service's user to connect; the kernel requires write permission for that.
func (b *bench) openEtcd() {
	b.t.Helper()
	if err := os.Chmod(strings.TrimPrefix(b.etcd.Endpoint, "unix://"), 0o666); err != nil {
		b.t.Fatal(err)
	}
}

// proc is one process of the service.
type proc struct {
	identityv1.IdentityServiceClient
	*servicetest.Process
	t *testing.T
}

func (b *bench) start(args ...string) *proc {
	b.t.Helper()
	return b.startAt(filepath.Join(b.Dir, "run", "identity.sock"), append([]string{"--state-dir", filepath.Join(b.Dir, "state"), "--node", "n1"}, args...)...)
}

func (b *bench) startAt(socket string, args ...string) *proc {
	b.t.Helper()
	p := servicetest.Start(b.t, b.Command(append([]string{
		"--socket-path", socket, "--metrics-address", "off", "--etcd-endpoints", b.etcd.Endpoint, "--etcd-timeout", "2s", "--etcd-heartbeat", "100ms", "--gc-interval", "50ms",
	}, args...)...), socket, client.Options{WaitForReady: true})
	return &proc{Process: p, IdentityServiceClient: identityv1.NewIdentityServiceClient(p.Conn), t: b.t}
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
	resp, err := p.ResolveEndpoint(servicetest.Context(p.t), &identityv1.ResolveEndpointRequest{
		Owner:  &workloadv1.Owner{ContainerId: container, InterfaceName: "eth0"},
		Labels: []*workloadv1.Label{{Source: "cni", Key: "app", Value: app}},
	})
	return resp.GetIdentity().GetNumber(), err
}

func (p *proc) release(container string) (uint32, error) {
	resp, err := p.ReleaseIdentity(servicetest.Context(p.t), &identityv1.ReleaseIdentityRequest{Holder: &identityv1.ReleaseIdentityRequest_Owner{
		Owner: &workloadv1.Owner{ContainerId: container, InterfaceName: "eth0"},
	}})
	return resp.GetReleasedNumber(), err
}

// keys lists the etcd keys of one kind below the service's prefix, without the prefix and the kind.
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
	boot, err := durable.BootID()
	if err != nil {
		t.Fatal(err)
	}
	return snapshot.HoldsFile(boot)
}

func TestKernelRunsWithoutAnyRight(t *testing.T) {
	b := newBench(t)
	p := b.start()
	p.Serving()
	if _, err := p.resolve("c1", "web"); err != nil {
		t.Fatal(err)
	}
	proc, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"Uid:\t65701\t65701\t65701\t65701", "Gid:\t65700\t65700\t65700\t65700", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "CapAmb:\t0000000000000000"} {
		if !strings.Contains(string(proc), line+"\n") {
			t.Errorf("status of the process has no line %q:\n%s", line, proc)
		}
	}
	for _, file := range []string{holdsFile(t), snapshot.KnownFile} {
		servicetest.Eventually(t, file, func() bool {
			fi, err := os.Stat(filepath.Join(b.Dir, "state", file))
			return err == nil && fi.Mode() == 0o600
		})
	}
	if code := p.Stop(); code != 0 {
		t.Errorf("exit code %d after SIGTERM\n%s", code, p.Log())
	}
}

func TestKernelHealthFollowsWhatIsKnown(t *testing.T) {
	b := newBench(t)
	b.etcd.Down()
	p := b.start()
	if s := p.Health(identityv1.IdentityService_ServiceDesc.ServiceName); s != grpc_health_v1.HealthCheckResponse_NOT_SERVING {
		t.Errorf("first start without etcd: %s, want NOT_SERVING", s)
	}
	servicetest.Eventually(t, "a reason in the status", func() bool {
		st := p.status()
		return !st.GetStoreConnected() && strings.Contains(st.GetStoreError(), "unavailable")
	})
	b.etcd.Up()
	b.openEtcd()
	p.Serving()
	number, err := p.resolve("c1", "web")
	if err != nil {
		t.Fatal(err)
	}
	if code := p.Stop(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	b.etcd.Down()
	p = b.start()
	p.Serving()
	if again, err := p.resolve("c2", "web"); err != nil || again != number {
		t.Errorf("known set without etcd: %d, %v, want %d", again, err, number)
	}
	if st := p.status(); st.GetStoreConnected() || st.GetHeldIdentities() != 1 {
		t.Errorf("status %v, want not connected and one identity held", st)
	}
}

func TestKernelProbesFollowEtcdAtTheFirstStart(t *testing.T) {
	b := newBench(t)
	b.etcd.Down()
	p := b.start(servicetest.ProbeFlags...)
	p.WantProbes(503, "waiting for etcd")
	b.etcd.Up()
	b.openEtcd()
	p.WantProbes(200, "ok")
}

func TestKernelKilledAnywhereLeavesNothingBehind(t *testing.T) {
	b := newBench(t)
	admin := b.etcd.Client()
	points := []string{
		"identity/resolve/before-txn", "identity/resolve/after-txn", "identity/resolve/before-snapshot", "identity/resolve/before-answer",
		"identity/release/before-snapshot", "identity/release/before-answer", "identity/release/before-txn", "identity/release/after-txn",
	}
	p := b.start()
	names, err := p.Faults.Names(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(points)
	all := slices.Sorted(slices.Values(slices.Concat(points, rangePoints, publicationPoints)))
	if !slices.Equal(names, all) {
		t.Fatalf("fault points %v, the tests know %v", names, all)
	}
	p.Serving()
	p.Kill()
	for i, point := range points {
		app := fmt.Sprint("app", i)
		p := b.start("--gc-grace", "0s", "--gc-quarantine", "1s")
		p.Serving()
		// A new process may repeat the releases of the previous one, which would end the test too early.
		servicetest.Eventually(t, point+": all writes are done", func() bool {
			st := p.status()
			return st.GetStoreConnected() && st.GetPendingStoreWrites() == 0
		})
		p.Faults.KillAt(point, 0)
		number, err := p.resolve("c1", app)
		if strings.HasPrefix(point, "identity/release/") {
			if err != nil {
				t.Fatalf("%s: resolve: %v", point, err)
			}
			p.release("c1") //nolint:errcheck // it may be killed before or after the answer
		}
		if code := p.Exit(); code != -1 {
			t.Fatalf("%s: exit code %d, want killed\n%s", point, code, p.Log())
		}

		p = b.start("--gc-grace", "0s", "--gc-quarantine", "1s")
		p.Serving()
		var again uint32
		// Before the first answer of etcd, an identity of the previous process is refused, because its number may belong to
		// another label set by now.
		servicetest.EventuallyNil(t, point+": resolving again", func() (err error) {
			again, err = p.resolve("c1", app)
			return err
		})
		if number != 0 && again != number {
			t.Errorf("%s: resolving again: %d, want %d", point, again, number)
		}
		if got, err := p.release("c1"); err != nil || got != again {
			t.Errorf("%s: release: %d, %v, want %d", point, got, err, again)
		}
		servicetest.Eventually(t, point+": no references and no keys are left", func() bool {
			return len(keys(t, admin, "ref"))+len(keys(t, admin, "id"))+len(keys(t, admin, "labels")) == 0
		})
		if st := p.status(); st.GetHeldIdentities() != 0 || st.GetPendingStoreWrites() != 0 {
			t.Errorf("%s: status %v", point, st)
		}
		if code := p.Stop(); code != 0 {
			t.Errorf("%s: exit code %d\n%s", point, code, p.Log())
		}
	}
}

func TestKernelDamagedHoldsStopTheStart(t *testing.T) {
	b := newBench(t)
	file := filepath.Join(b.Dir, "state", holdsFile(t))
	if err := os.WriteFile(file, []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	p := b.start()
	if code := p.Exit(); code != 1 || !strings.Contains(p.Log(), file) {
		t.Errorf("exit code %d, want 1 and the file's name in\n%s", code, p.Log())
	}
}

func TestKernelWrongConfigurationIsNamedAtOnce(t *testing.T) {
	b := newBench(t)
	p := b.start("--node", "a/b", "--quota", "0", "--etcd-endpoints", "localhost", "--etcd-prefix", "x/", "--gc-quarantine", "0s", "--labels-include", "*.")
	if code := p.Exit(); code != 2 {
		t.Errorf("exit code %d, want 2", code)
	}
	for _, key := range []string{"node:", "quota:", "etcd:", "etcd.prefix:", "gc.quarantine:", "labels:"} {
		if !strings.Contains(p.Log(), key) {
			t.Errorf("no word about %s in\n%s", key, p.Log())
		}
	}
}

func TestKernelSecondCopyOnOneStateIsRefusedAndTakesNothing(t *testing.T) {
	b := newBench(t)
	admin := b.etcd.Client()
	first := b.start()
	first.Serving()
	n, err := first.resolve("c1", "web")
	if err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "the reference", func() bool { return len(keys(t, admin, "ref")) == 1 })
	second := b.start("--socket-path", filepath.Join(b.Dir, "run", "second.sock"))
	if code := second.Exit(); code != process.ExitFailed || !strings.Contains(second.Log(), durable.ErrLocked.Error()) {
		t.Errorf("the second ended with %d:\n%s", code, second.Log())
	}
	if m, err := first.resolve("c1", "web"); err != nil || m != n {
		t.Errorf("the first answers %d, %v; want %d", m, err, n)
	}
	if code := first.Stop(); code != process.ExitOK {
		t.Errorf("the first ended with %d:\n%s", code, first.Log())
	}
	if code := func() int { p := b.start(); p.Serving(); return p.Stop() }(); code != process.ExitOK {
		t.Errorf("the next one ended with %d", code)
	}
}

// TestKernelNodesKilledAtRandomAgree: answers given before a kill -9 are the same after it, and every node has the same
// number for a label set.
func TestKernelNodesKilledAtRandomAgree(t *testing.T) {
	const nodes, sets, rounds = 8, 40, 4
	b := newBench(t)
	args := func(i int) []string {
		return []string{"--node", fmt.Sprint("n", i), "--state-dir", filepath.Join(b.Dir, fmt.Sprint("state", i))}
	}
	start := func(i int) *proc {
		extra := args(i)
		return b.startAt(filepath.Join(b.Dir, fmt.Sprint("run", i), "identity.sock"), extra...)
	}
	var wg sync.WaitGroup
	answered := make([]map[int]uint32, nodes) // node → set → number
	for i := range nodes {
		b.Mkdir(fmt.Sprint("run", i))
		b.Mkdir(fmt.Sprint("state", i))
		p := start(i)
		p.Serving()
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
						p.Kill()
						<-ended
						p = start(i)
						p.Serving()
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
