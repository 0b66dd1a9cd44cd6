// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	storev1 "github.com/sluice-net/sluice/proto/gen/sluice/store/v1"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
	"github.com/sluice-net/sluice/store"
)

// member is a sluice-store, as the user that it has on a node.
type member struct {
	t                     *testing.T
	program, dir, address string
	args                  []string
}

// newMember builds sluice-store, unless `make build` did.
func newMember(t *testing.T) *member {
	t.Helper()
	dir, err := os.MkdirTemp("", "store-") // t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	m := &member{
		t: t, program: filepath.Join(os.Getenv("SLUICE_BIN"), "sluice-store"), dir: dir,
		address: fmt.Sprintf("127.%d.%d.%d", 1+rand.IntN(254), rand.IntN(256), 1+rand.IntN(254)),
	}
	if os.Getenv("SLUICE_BIN") == "" {
		m.program = filepath.Join(dir, "sluice-store")
		build := exec.Command("go", "build", "-o", m.program, "../store")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("build sluice-store: %v\n%s", err, out)
		}
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"run", "state"} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.Mkdir(path, 0o750), m.own(name)); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// own gives a file below the directory to the user of sluice-store.
func (m *member) own(name string) error {
	return os.Chown(filepath.Join(m.dir, name), int(instance.StoreID), int(instance.GroupID))
}

func (m *member) socket() string { return filepath.Join(m.dir, "run", "etcd.sock") }

func (m *member) start() (*servicetest.Process, storev1.StoreServiceClient) {
	m.t.Helper()
	socket := filepath.Join(m.dir, "run", "store.sock")
	cmd := exec.Command(m.program, append([]string{
		"--socket-path", socket, "--etcd-socket", m.socket(), "--state-dir", filepath.Join(m.dir, "state"),
		"--metrics-address", "off", "--node", "m1", "--address", m.address,
	}, m.args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: instance.StoreID, Gid: instance.GroupID}, Pdeathsig: syscall.SIGKILL,
	}
	p := servicetest.Start(m.t, cmd, socket, client.Options{WaitForReady: true})
	p.Serving()
	return p, storev1.NewStoreServiceClient(p.Conn)
}

// etcd returns a client of etcd as its administrator.
func (m *member) etcd(t *testing.T) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{"unix://" + m.socket()}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// restore requests a restore as `sluice store snapshot restore` does.
func (m *member) restore(snapshot []byte) {
	m.t.Helper()
	state := filepath.Join(m.dir, "state")
	if _, err := store.RequestRestore(state, bytes.NewReader(snapshot)); err != nil {
		m.t.Fatal(err)
	}
	for _, name := range []string{store.RestoreFile, store.SnapshotFile} {
		if err := m.own(filepath.Join("state", name)); err != nil {
			m.t.Fatal(err)
		}
	}
}

// TestKernelIdentityUsesTheStore: by credentials of a join token on another machine, and by the socket on the machine
// of a member. After a restored snapshot the node moves to the new epoch by itself, and keeps its numbers.
func TestKernelIdentityUsesTheStore(t *testing.T) {
	m := newMember(t)
	s, calls := m.start()
	ctx := t.Context()
	resp, err := calls.CreateJoinToken(ctx, &storev1.CreateJoinTokenRequest{})
	if err != nil {
		t.Fatal(err)
	}
	token, err := store.ParseToken(resp.GetToken())
	if err != nil {
		t.Fatal(err)
	}
	request, err := store.NewRequest()
	if err != nil {
		t.Fatal(err)
	}
	c, err := store.Enrol(ctx, token, "n1", request)
	if err != nil {
		t.Fatal(err)
	}

	// Without the credentials, the process names the way out.
	b := &bench{Place: servicetest.NewPlace(t, instance.FirstServiceID), t: t, etcd: &etcdtest.Server{}}
	b.etcd.Endpoint = "http://127.0.0.1:1" // not used
	dir := filepath.Join(b.Dir, "state")
	p := b.start("--etcd-store-dir", dir)
	if code := p.Exit(); code != 2 || !strings.Contains(p.Log(), "sluice store join") {
		t.Errorf("without credentials: exit code %d\n%s", code, p.Log())
	}
	if err := c.Save(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(filepath.Join(dir, store.File), int(instance.IdentityID), int(instance.GroupID)); err != nil {
		t.Fatal(err)
	}
	p = b.start("--etcd-store-dir", dir)
	p.Serving()
	web, err := p.resolve("c1", "web")
	if err != nil {
		t.Fatal(err)
	}

	// Another node, on the machine of the member.
	local := &bench{Place: servicetest.NewPlace(t, instance.FirstServiceID), t: t, etcd: &etcdtest.Server{}}
	local.etcd.Endpoint = "unix://" + m.socket()
	if err := os.Chmod(filepath.Join(m.dir, "run"), 0o755); err != nil {
		t.Fatal(err)
	}
	q := local.startAt(filepath.Join(local.Dir, "run", "identity.sock"),
		"--state-dir", filepath.Join(local.Dir, "state"), "--node", "m1")
	q.Serving()
	if again, err := q.resolve("c9", "web"); err != nil || again != web {
		t.Errorf("the same label set on another node: %d, %v, want %d", again, err, web)
	}

	snapshot := read(t, calls)
	if _, err := p.resolve("c2", "db"); err != nil {
		t.Fatal(err)
	}
	s.Stop()
	m.restore(snapshot)
	_, calls = m.start()
	if st, err := calls.GetStatus(ctx, &storev1.GetStatusRequest{}); err != nil || st.GetEpoch() != 2 {
		t.Fatalf("after the restore: %v, %v", st, err)
	}
	// Other nodes may hold numbers that the snapshot lacks, so a new label set waits until they have claimed them.
	servicetest.Eventually(t, "the refusal of a new label set", func() bool {
		_, err := p.resolve("c3", "cache")
		if err == nil {
			t.Fatal("a new label set has a number at once after the restore")
		}
		return strings.Contains(err.Error(), "sluice-store was restored")
	})
	if again, err := p.resolve("c4", "web"); err != nil || again != web {
		t.Errorf("the former label set: %d, %v, want %d", again, err, web)
	}
	root := m.etcd(t)
	if r, err := root.Delete(ctx, "/sluice/v1/identity/restored"); err != nil || r.Deleted != 1 { // else in a minute
		t.Fatalf("end the time of claims: %v, %v", r, err)
	}
	var cache uint32
	servicetest.Eventually(t, "a new label set after the restore", func() (ok bool) {
		cache, err = p.resolve("c3", "cache")
		return err == nil
	})
	const zone = uint32(identity.ClusterSize / 8)
	if first := uint32(identity.MinCluster); (web-first)/zone != 0 || (cache-first)/zone != 1 {
		t.Errorf("numbers %d in epoch 1 and %d in epoch 2, want one of the first %d and one of the next", web, cache, zone)
	}
	now, err := store.Load(dir)
	if err != nil || now.Epoch != 2 {
		t.Errorf("the node knows epoch %d, %v", now.Epoch, err)
	}
	db, err := p.resolve("c5", "db")
	if err != nil {
		t.Error(err)
	}
	servicetest.Eventually(t, "the number that the snapshot lacked, on another node", func() bool {
		again, err := q.resolve("c6", "db")
		return err == nil && again == db
	})
}

func read(t *testing.T, calls storev1.StoreServiceClient) (all []byte) {
	t.Helper()
	stream, err := calls.SaveSnapshot(t.Context(), &storev1.SaveSnapshotRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, m.GetData()...)
	}
}
