// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/policy/internal/record"
)

func TestMain(m *testing.M) {
	servicetest.Main(main)
	leaktest.Main(m)
}

// bench is an environment for processes of the service, with an identity service.
type bench struct {
	*servicetest.Place
	t *testing.T
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{Place: servicetest.NewPlace(t, instance.PolicyID), t: t}
	b.Mkdir("files")
	serveRegistry(t, filepath.Join(b.Dir, "identity.sock"))
	return b
}

// registry is an identity service that lists its identities and then sends nothing more.
type registry struct {
	identityv1.UnimplementedIdentityServiceServer
	ids map[uint32][]*workloadv1.Label
}

func serveRegistry(t *testing.T, socket string) {
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
		srv.Serve(l) //nolint:errcheck // the server ends with the test
	}()
	t.Cleanup(func() { srv.Stop(); <-done })
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

// proc is a process of the service.
type proc struct {
	policyv1.PolicyServiceClient
	*servicetest.Process
	t *testing.T
}

func (b *bench) start(args ...string) *proc {
	b.t.Helper()
	socket := filepath.Join(b.Dir, "run", "policy.sock")
	p := servicetest.Start(b.t, b.Command(append([]string{
		"--socket-path", socket, "--metrics-address", "off", "--state-dir", filepath.Join(b.Dir, "state"),
		"--sources-identity", filepath.Join(b.Dir, "identity.sock"),
	}, args...)...), socket, client.Options{WaitForReady: true})
	return &proc{Process: p, PolicyServiceClient: policyv1.NewPolicyServiceClient(p.Conn), t: b.t}
}

func (p *proc) status() *policyv1.GetStatusResponse {
	p.t.Helper()
	st, err := p.GetStatus(servicetest.Context(p.t), &policyv1.GetStatusRequest{})
	if err != nil {
		p.t.Fatal(err)
	}
	return st
}

func (p *proc) synced(name string) {
	p.t.Helper()
	servicetest.Eventually(p.t, name+" has said everything", func() bool {
		return slices.ContainsFunc(p.status().GetSources(), func(s *policyv1.SourceStatus) bool { return s.GetName() == name && s.GetSynced() })
	})
}

// allowPort returns a policy that allows web to connect to db on a port. A comment pads the policy to the given size.
func allowPort(port int, size int) []byte {
	return fmt.Appendf(nil, "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: db, namespace: shop}\nspec:\n"+
		"  podSelector: {matchLabels: {app: db}}\n  ingress:\n  - from: [{podSelector: {matchLabels: {app: web}}}]\n    ports: [{protocol: TCP, port: %d}]\n# %s\n",
		port, strings.Repeat("x", size))
}

// allowInParts returns a change that allows two ports: one by its first policy and one by its last. The journal
// writes a change of this size in parts.
func allowInParts(port int) []byte {
	var b strings.Builder
	b.Write(allowPort(port, 0))
	for i := range 600 {
		fmt.Fprintf(&b, "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p%d, namespace: other}\nspec: {podSelector: {}, ingress: [{ports: [{port: %d}]}]}\n", i, port)
	}
	b.WriteString("---\n" + strings.Replace(string(allowPort(port+lastPort, 0)), "name: db", "name: last", 1))
	return []byte(b.String())
}

// lastPort is the offset of the last policy's port from the first policy's port in allowInParts.
const lastPort = 20_000

func (p *proc) apply(manifest []byte) (uint64, error) {
	out, err := p.UpsertPolicies(servicetest.Context(p.t), &policyv1.UpsertPoliciesRequest{Manifests: manifest})
	return out.GetRevision(), err
}

// verdict returns the verdict for web to db on a port.
func (p *proc) verdict(port uint32) policyv1.Action {
	p.t.Helper()
	x, err := p.Explain(servicetest.Context(p.t), &policyv1.ExplainRequest{From: &policyv1.Peer{Identity: 300}, To: &policyv1.Peer{Identity: 301}, Protocol: 6, Port: port})
	if err != nil {
		p.t.Fatal(err)
	}
	return x.GetVerdict()
}

// tables returns a hash of the db's tables as sent to a subscriber, without values that belong to one run of the
// service.
func (p *proc) tables(subject uint32) (hash string, revision uint64) {
	p.t.Helper()
	ctx, cancel := context.WithCancel(servicetest.Context(p.t))
	defer cancel()
	w, err := p.WatchPolicyTables(ctx)
	if err != nil {
		p.t.Fatal(err)
	}
	if err := w.Send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Subscribe{
		Subscribe: &policyv1.Subscribe{Name: "datapath", Subjects: []uint32{subject}, Formats: []policyv1.TableFormat{policyv1.TableFormat_TABLE_FORMAT_RANGES}},
	}}); err != nil {
		p.t.Fatal(err)
	}
	var hashes []string
	for {
		m, err := w.Recv()
		if err != nil {
			p.t.Fatal(err)
		}
		for _, s := range m.GetSteps() {
			if d := s.GetDefineTable(); d != nil {
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
	p.Serving()
	if _, err := p.apply(allowPort(5432, 0)); err != nil {
		t.Fatal(err)
	}
	rights, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"Uid:\t65703\t65703\t65703\t65703", "Gid:\t65700\t65700\t65700\t65700", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "CapAmb:\t0000000000000000"} {
		if !strings.Contains(string(rights), line+"\n") {
			t.Errorf("status of the process has no line %q:\n%s", line, rights)
		}
	}
	if fi, err := os.Stat(filepath.Join(b.Dir, "state", record.File)); err != nil || fi.Mode() != 0o600 {
		t.Errorf("journal: %v, %v", fi, err)
	}
	if code := p.Stop(); code != process.ExitOK {
		t.Errorf("exit code %d after SIGTERM\n%s", code, p.Log())
	}
}

// TestKernelRestartServesTheSameBeforeAnySourceAnswers proves INV-60, INV-61.
func TestKernelRestartServesTheSameBeforeAnySourceAnswers(t *testing.T) {
	b := newBench(t)
	file := filepath.Join(b.Dir, "files", "db.yaml")
	if err := os.WriteFile(file, allowPort(5432, 0), 0o644); err != nil {
		t.Fatal(err)
	}
	p := b.start("--sources-directory", filepath.Join(b.Dir, "files"))
	p.synced("identity")
	p.synced("file")
	hash, revision := p.tables(301)
	if hash == "" || revision != 1 {
		t.Fatalf("tables %q at revision %d", hash, revision)
	}
	p.Kill()

	// Both sources are unreachable.
	if err := os.Rename(filepath.Join(b.Dir, "files"), filepath.Join(b.Dir, "away")); err != nil {
		t.Fatal(err)
	}
	p = b.start("--sources-directory", filepath.Join(b.Dir, "files"), "--sources-identity", filepath.Join(b.Dir, "absent.sock"))
	p.Serving()
	if again, r := p.tables(301); again != hash || r != revision {
		t.Errorf("after a restart: %q at %d, want %q at %d", again, r, hash, revision)
	}
	if a := p.verdict(5432); a != policyv1.Action_ACTION_ALLOW {
		t.Errorf("after a restart: %s", a)
	}
	for _, s := range p.status().GetSources() {
		if s.GetName() != "grpc" && s.GetSynced() {
			t.Errorf("source %v is synced", s)
		}
	}
	p.Kill()

	// A policy whose file is missing when the source becomes readable again is removed. The directory must not become
	// empty, because an empty directory counts only after a second scan.
	if err := os.Rename(filepath.Join(b.Dir, "away"), filepath.Join(b.Dir, "files")); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(file, filepath.Join(filepath.Dir(file), "removed")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(filepath.Dir(file), "none.yaml"), []byte("# no policy\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	p = b.start("--sources-directory", filepath.Join(b.Dir, "files"))
	servicetest.Eventually(t, "the policy is removed", func() bool { return p.status().GetPolicies() == 0 })
	if code := p.Stop(); code != process.ExitOK {
		t.Errorf("exit code %d\n%s", code, p.Log())
	}
}

// TestKernelKilledAnywhereLosesNoAnsweredChange proves INV-60.
func TestKernelKilledAnywhereLosesNoAnsweredChange(t *testing.T) {
	b := newBench(t)
	p := b.start()
	names, err := p.Faults.Names(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	points := []string{
		"journal/before-stage", "journal/before-tidy", "journal/before-write",
		"policy/change/before-answer", "policy/change/before-compile", "policy/change/before-journal",
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
	p.Kill()
	for _, manifests := range []func(int) []byte{func(port int) []byte { return allowPort(port, 0) }, allowInParts} {
		for _, point := range points {
			large := len(manifests(0)) > 1000
			if !large && (point == "journal/before-stage" || point == "journal/before-tidy") {
				continue // a small change does not reach this point
			}
			p := b.start()
			p.synced("identity")
			p.Faults.KillAt(point, 0)
			for range 4 {
				port++
				revision, err := p.apply(manifests(port))
				if err != nil {
					break
				}
				answered = revision
			}
			if code := p.Exit(); code != -1 {
				t.Fatalf("%s: exit code %d, want killed\n%s", point, code, p.Log())
			}

			p = b.start()
			p.Serving()
			allows := func(port int) bool {
				first, last := p.verdict(uint32(port)), p.verdict(uint32(port+lastPort))
				if large && first != last {
					t.Errorf("%s: half of a change: %d: %s, %d: %s", point, port, first, port+lastPort, last)
				}
				return first == policyv1.Action_ACTION_ALLOW
			}
			_, revision := p.tables(301)
			// The change that was not acknowledged is either complete or absent.
			before, after := allows(port-1), allows(port)
			if !(revision == answered && before && !after || revision == answered+1 && after && !before) || p.status().GetPolicies() != policies {
				t.Errorf("%s: revision %d, last answered %d; %d is allowed: %v, %d: %v; %d policies, want %d", point, revision,
					answered,
					port-1, before, port, after, p.status().GetPolicies(), policies)
			}
			if answered, err = p.apply(manifests(port)); err != nil || !allows(port) {
				t.Errorf("%s: the same again: %v", point, err)
			}
			if code := p.Stop(); code != process.ExitOK {
				t.Errorf("%s: exit code %d\n%s", point, code, p.Log())
			}
		}
		// The next iteration starts from a state with both ports of one change.
		p := b.start()
		port++
		if answered, err = p.apply(allowInParts(port)); err != nil {
			t.Fatal(err)
		}
		p.Kill()
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
	for _, point := range []string{"journal/before-write", "policy/change/before-journal"} {
		p.Faults.FailAt(point, 0, "no space left on device")
		if _, err := p.apply(allowPort(80, 0)); status.Code(err) != codes.Unavailable && point != "policy/change/before-journal" || err == nil {
			t.Errorf("%s: %v, want UNAVAILABLE", point, err)
		}
		p.Faults.Pass(point)
		if again, revision := p.tables(301); again != hash || revision != 1 {
			t.Errorf("%s: tables %q at %d, want %q at 1", point, again, revision, hash)
		}
	}
	if revision, err := p.apply(allowPort(81, 0)); err != nil || revision != 2 {
		t.Errorf("afterwards: %d, %v", revision, err)
	}
	p.Kill()
	p = b.start()
	p.Serving()
	if a := p.verdict(81); a != policyv1.Action_ACTION_ALLOW {
		t.Errorf("after a restart: %s", a)
	}
}

// TestKernelLostPoliciesStopTheStart proves INV-43.
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
		p.Kill()
		file := filepath.Join(b.Dir, "state", record.File)
		if err := damage(file); err != nil {
			t.Fatal(err)
		}
		p = b.start()
		if code := p.Exit(); code != process.ExitFailed || !strings.Contains(p.Log(), file) || !strings.Contains(p.Log(), "restore a copy of it") {
			t.Errorf("%s: exit code %d, want %d and the file's name in\n%s", what, code, process.ExitFailed, p.Log())
		}
	}
}

func TestKernelHealthWaitsForTheSources(t *testing.T) {
	b := newBench(t)
	p := b.start("--sources-directory", filepath.Join(b.Dir, "absent"))
	p.synced("identity")
	if s := p.Health(policyv1.PolicyService_ServiceDesc.ServiceName); s != grpc_health_v1.HealthCheckResponse_NOT_SERVING {
		t.Errorf("without the directory: %s, want NOT_SERVING", s)
	}
	servicetest.Eventually(t, "a reason in the status", func() bool {
		return slices.ContainsFunc(p.status().GetSources(), func(s *policyv1.SourceStatus) bool {
			return s.GetName() == "file" && strings.Contains(s.GetError(), "no such file")
		})
	})
	if err := os.Mkdir(filepath.Join(b.Dir, "absent"), 0o755); err != nil {
		t.Fatal(err)
	}
	p.Serving()
	if code := p.Stop(); code != process.ExitOK {
		t.Errorf("exit code %d\n%s", code, p.Log())
	}
}

func TestKernelProbesFollowTheSources(t *testing.T) {
	b := newBench(t)
	socket := filepath.Join(b.Dir, "later.sock")
	p := b.start(append([]string{"--sources-identity", socket}, servicetest.ProbeFlags...)...)
	p.WantProbes(503, "waiting until every source")
	serveRegistry(t, socket)
	p.WantProbes(200, "ok")
}

func TestKernelSecondCopyOnOneStateIsRefused(t *testing.T) {
	b := newBench(t)
	first := b.start()
	first.Serving()
	second := b.start("--socket-path", filepath.Join(b.Dir, "run", "second.sock"))
	if code := second.Exit(); code != process.ExitFailed || !strings.Contains(second.Log(), durable.ErrLocked.Error()) {
		t.Errorf("the second process ended with %d:\n%s", code, second.Log())
	}
	if code := first.Stop(); code != process.ExitOK {
		t.Errorf("the first process ended with %d:\n%s", code, first.Log())
	}
}

func TestKernelWrongConfigurationIsNamedAtOnce(t *testing.T) {
	b := newBench(t)
	p := b.start("--sources-identity", "x", "--sources-directory", "y", "--cluster-name", "", "--enforcement-mode", "z",
		"--limits-policies", "0", "--limits-manifests", "0", "--names-max", "0", "--names-addresses", "0", "--names-grace", "-1s", "--subscribers-linger", "-1s")
	if code := p.Exit(); code != 2 {
		t.Errorf("exit code %d, want 2", code)
	}
	for _, key := range []string{
		"sources.identity:", "sources.directory:", "cluster.name:", "enforcement.mode:", "limits.policies:", "limits.manifests:",
		"names.max:", "names.addresses:", "names.grace:", "subscribers.linger:",
	} {
		if !strings.Contains(p.Log(), key) {
			t.Errorf("%s is not mentioned in\n%s", key, p.Log())
		}
	}
}
