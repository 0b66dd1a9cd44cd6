// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/rpc/reasontest"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/kit/servicetest"
	storev1 "github.com/sluice-net/sluice/proto/gen/sluice/store/v1"
	"github.com/sluice-net/sluice/store"
)

func TestMain(m *testing.M) {
	servicetest.Main(main)
	os.Exit(reasontest.Run(func() int { return leaktest.Run(m) }, storev1.ErrorReason_ERROR_REASON_UNSPECIFIED, nil))
}

// machine is a machine with a member of the store.
type machine struct {
	*servicetest.Place
	t       *testing.T
	name    string
	address string // "" for none
	token   store.Token
	peer    string // its address for other members when it joined
}

// machines returns machines with addresses of their own, which no other test uses.
func machines(t *testing.T, names ...string) (out []*machine) {
	t.Helper()
	network := fmt.Sprintf("127.%d.%d.", 1+rand.IntN(254), rand.IntN(256))
	for i, name := range names {
		out = append(out, &machine{
			Place: servicetest.NewPlace(t, instance.StoreID), t: t, name: name, address: network + fmt.Sprint(10+i),
		})
	}
	return out
}

func (m *machine) state() string  { return filepath.Join(m.Dir, "state") }
func (m *machine) socket() string { return filepath.Join(m.Dir, "run", "etcd.sock") }

// proc is a running member.
type proc struct {
	storev1.StoreServiceClient
	*servicetest.Process
	t *testing.T
}

func (m *machine) start(args ...string) *proc {
	m.t.Helper()
	socket := filepath.Join(m.Dir, "run", "store.sock")
	all := []string{
		"--socket-path", socket, "--etcd-socket", m.socket(), "--state-dir", m.state(), "--metrics-address", "off",
		"--node", m.name,
	}
	if m.address != "" {
		all = append(all, "--address", m.address)
	}
	p := servicetest.Start(m.t, m.Command(append(all, args...)...), socket, client.Options{WaitForReady: true})
	return &proc{StoreServiceClient: storev1.NewStoreServiceClient(reasontest.Record(p.Conn)), Process: p, t: m.t}
}

func (p *proc) status() *storev1.GetStatusResponse {
	p.t.Helper()
	st, err := p.GetStatus(servicetest.Context(p.t), &storev1.GetStatusRequest{})
	if err != nil {
		p.t.Fatal(err)
	}
	return st
}

func (p *proc) token(r *storev1.CreateJoinTokenRequest) store.Token {
	p.t.Helper()
	resp, err := p.CreateJoinToken(servicetest.Context(p.t), r)
	if err != nil {
		p.t.Fatal(err)
	}
	t, err := store.ParseToken(resp.GetToken())
	if err != nil {
		p.t.Fatal(err)
	}
	return t
}

// join returns credentials of a node by a new token.
func (p *proc) join(node string) store.Credentials {
	p.t.Helper()
	c, err := enrolWith(p.t, p.token(&storev1.CreateJoinTokenRequest{}), node)
	if err != nil {
		p.t.Fatal(err)
	}
	return c
}

// joinBy makes a machine a member with a token of by, and starts it.
func (m *machine) joinBy(by *proc) *proc {
	m.t.Helper()
	m.token, m.peer = by.token(&storev1.CreateJoinTokenRequest{Member: true}), m.address+":23800"
	var r *storev1.EnrolMemberResponse
	servicetest.Eventually(m.t, "the members accept "+m.name, func() (ok bool) {
		var err error
		r, err = store.EnrolMember(servicetest.Context(m.t), m.token, m.name, m.peer)
		if err != nil && status.Code(err) != codes.FailedPrecondition {
			m.t.Fatalf("%s joins: %v", m.name, err)
		}
		return err == nil
	})
	if err := store.SaveMember(m.state(), m.name, m.address, r); err != nil {
		m.t.Fatal(err)
	}
	m.own(store.MemberFile)
	m.address = "" // the one with which it joined
	return m.start()
}

// own gives files of the state directory to the user of sluice-store.
func (m *machine) own(names ...string) {
	m.t.Helper()
	for _, name := range names {
		err := os.Chown(filepath.Join(m.state(), name), int(instance.StoreID), int(instance.GroupID))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			m.t.Fatal(err)
		}
	}
}

// restore requests a restore, as `sluice store` does.
func (m *machine) restore(snapshot []byte) {
	m.t.Helper()
	var from io.Reader
	if snapshot != nil {
		from = bytes.NewReader(snapshot)
	}
	if _, err := store.RequestRestore(m.state(), from); err != nil {
		m.t.Fatal(err)
	}
	m.own(store.RestoreFile, store.SnapshotFile)
}

// snapshot returns a copy of the store's data.
func (p *proc) snapshot() (all []byte) {
	p.t.Helper()
	stream, err := p.SaveSnapshot(servicetest.Context(p.t), &storev1.SaveSnapshotRequest{})
	if err != nil {
		p.t.Fatal(err)
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			p.t.Fatal(err)
		}
		all = append(all, m.GetData()...)
	}
}

func enrolWith(t *testing.T, token store.Token, node string) (store.Credentials, error) {
	t.Helper()
	r, err := store.NewRequest()
	if err != nil {
		t.Fatal(err)
	}
	return store.Enrol(servicetest.Context(t), token, node, r)
}

// enrolBy returns a client of the enrolment that sends any request, without a check of the server.
func enrolBy(t *testing.T, address string) storev1.EnrolServiceClient {
	t.Helper()
	c, err := grpc.NewClient(address, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
		InsecureSkipVerify: true, //nolint:gosec // the test sends no secret of a real store
	})))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return storev1.NewEnrolServiceClient(c)
}

// etcdAs returns a client of etcd on the unix socket. The kernel reports uid as the user of its process.
func (m *machine) etcdAs(uid int) *clientv3.Client {
	m.t.Helper()
	c, err := clientv3.New(clientv3.Config{
		Endpoints: []string{"unix://" + m.socket()}, Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			return dialAs(uid, m.socket())
		})},
	})
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() { c.Close() })
	return c
}

// dialAs connects from a thread with another effective user.
func dialAs(uid int, socket string) (net.Conn, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	same := ^uintptr(0)
	if _, _, errno := syscall.RawSyscall(unix.SYS_SETRESUID, same, uintptr(uid), same); errno != 0 {
		return nil, errno
	}
	defer syscall.RawSyscall(unix.SYS_SETRESUID, same, 0, same) //nolint:errcheck // root may
	return net.Dial("unix", socket)
}

// etcdBy returns a client of etcd with credentials.
func etcdBy(t *testing.T, c store.Credentials) *clientv3.Client {
	t.Helper()
	secure, err := c.TLS()
	if err != nil {
		t.Fatal(err)
	}
	transport, err := c.Transport()
	if err != nil {
		t.Fatal(err)
	}
	etcd, err := clientv3.New(clientv3.Config{
		Endpoints: c.Endpoints(), TLS: secure, Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(transport)},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { etcd.Close() })
	return etcd
}

// code returns the gRPC code of an error. etcd's client uses its own error type for some errors.
func code(err error) codes.Code {
	var e rpctypes.EtcdError
	if errors.As(err, &e) {
		return e.Code()
	}
	return status.Code(err)
}

const keys = "/sluice/v1/identity"

func (p *proc) reason(err error, want codes.Code, reason storev1.ErrorReason) {
	p.t.Helper()
	err = reasontest.Note(err) // each client of the enrolment has its own connection
	if status.Code(err) != want || !rpcerr.Is(err, reason) {
		p.t.Errorf("%v (%s), want %s %s", err, status.Code(err), want, reason)
	}
}

// TestKernelStoreOfOneMachine: a member without an address only has a unix socket, on which the kernel reports the
// user.
func TestKernelStoreOfOneMachine(t *testing.T) {
	m := machines(t, "n1")[0]
	m.address = ""
	if err := os.Chmod(filepath.Join(m.Dir, "run"), 0o755); err != nil {
		t.Fatal(err)
	}
	p := m.start()
	p.Serving()
	if err := os.Chmod(m.socket(), 0o666); err != nil { // only the user that the kernel reports decides below
		t.Fatal(err)
	}
	st := p.status()
	if len(st.GetMembers()) != 1 || !st.GetMembers()[0].GetLeader() || st.GetEpoch() != 1 ||
		len(st.GetNodes()) != 1 || st.GetNodes()[0].GetName() != "n1" || len(st.GetService().GetProblems()) != 0 {
		t.Errorf("status: %v", st)
	}
	ctx := servicetest.Context(t)
	node := m.etcdAs(int(instance.IdentityID))
	for _, key := range []string{"/alive/n1", "/ip/n1/node", "/ref/n1/256", "/id/256", "/ipam", "/collector"} {
		if _, err := node.Put(ctx, keys+key, "x"); err != nil {
			t.Errorf("the node of this machine writes %s: %v", key, err)
		}
	}
	for _, key := range []string{"/alive/n2", "/ip/n2/node", "/layout", "/ip/.assigned/of/n1"} {
		if _, err := node.Put(ctx, keys+key, "x"); code(err) != codes.PermissionDenied {
			t.Errorf("the node of this machine writes %s: %v", key, err)
		}
	}
	if r, err := m.etcdAs(0).Get(ctx, keys+"/layout"); err != nil || len(r.Kvs) != 1 || string(r.Kvs[0].Value) != "2" {
		t.Errorf("root reads the layout: %v, %v", r, err)
	}
	short, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if _, err := m.etcdAs(int(instance.PolicyID)).Get(short, keys+"/layout"); err == nil {
		t.Error("sluice-policy reads etcd")
	}
	_, err := p.CreateJoinToken(ctx, &storev1.CreateJoinTokenRequest{})
	p.reason(err, codes.FailedPrecondition, storev1.ErrorReason_ERROR_REASON_NO_ADDRESS)

	// After a restart, also after a crash, the data are the same.
	p.Kill()
	p = m.start()
	p.Serving()
	if err := os.Chmod(m.socket(), 0o666); err != nil {
		t.Fatal(err)
	}
	if r, err := m.etcdAs(int(instance.IdentityID)).Get(ctx, keys+"/ip/n1/node"); err != nil || len(r.Kvs) != 1 {
		t.Errorf("after a restart: %v, %v", r, err)
	}
	if again := p.status(); again.GetClusterId() != st.GetClusterId() {
		t.Errorf("cluster %s after a restart, %s before", again.GetClusterId(), st.GetClusterId())
	}
	if code := p.Stop(); code != 0 {
		t.Errorf("exit code %d after SIGTERM\n%s", code, p.Log())
	}
}

// TestKernelMakesItsDirectoriesInAPod: kubelet mounts directories to which every user may write. In them the process
// makes its own.
func TestKernelMakesItsDirectoriesInAPod(t *testing.T) {
	m := machines(t, "n1")[0]
	m.address = ""
	run := filepath.Dir(m.socket())
	for _, dir := range []string{run, m.state()} {
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(m.Dir, 0o777); err != nil {
		t.Fatal(err)
	}
	p := m.start()
	p.Serving()
	for dir, want := range map[string]os.FileMode{run: 0o750, m.state(): 0o700} {
		if fi, err := os.Stat(dir); err != nil || fi.Mode().Perm() != want {
			t.Errorf("%s: %v, %v, want the mode %#o", dir, fi, err, want)
		}
	}
}

// TestKernelSnapshotIsForRootAndTheStore: in a pod, commands run as the user of the store.
func TestKernelSnapshotIsForRootAndTheStore(t *testing.T) {
	m := machines(t, "n1")[0]
	m.address = ""
	p := m.start()
	p.Serving()
	socket := filepath.Join(m.Dir, "run", "store.sock")
	for _, open := range []struct {
		path string
		mode os.FileMode
	}{{filepath.Dir(socket), 0o755}, {socket, 0o666}} { // so that only the user decides below
		if err := os.Chmod(open.path, open.mode); err != nil {
			t.Fatal(err)
		}
	}
	for uid, want := range map[uint32]codes.Code{
		0: codes.OK, instance.StoreID: codes.OK, instance.IdentityID: codes.PermissionDenied,
	} {
		conn, err := grpc.NewClient("passthrough:///store", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return dialAs(int(uid), socket) }))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		by, request := storev1.NewStoreServiceClient(conn), &storev1.SaveSnapshotRequest{}
		stream, err := by.SaveSnapshot(servicetest.Context(t), request)
		if err == nil {
			_, err = stream.Recv()
		}
		if status.Code(err) != want {
			t.Errorf("a snapshot for uid %d: %v, want %s", uid, err, want)
		}
	}
}

// TestKernelLostAndCorruptStateIsNotReplaced: with an empty cluster, all nodes would seem to have lost their numbers.
func TestKernelLostAndCorruptStateIsNotReplaced(t *testing.T) {
	m := machines(t, "n1")[0]
	p := m.start()
	p.Serving()
	p.Stop()
	file, data := filepath.Join(m.state(), "member.json"), filepath.Join(m.state(), "etcd")
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	write := func(b []byte) {
		t.Helper()
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	refused := func(what string, want ...string) {
		t.Helper()
		p := m.start()
		if code := p.Exit(); code != 2 {
			t.Errorf("%s: exit code %d", what, code)
		}
		for _, w := range want {
			if !strings.Contains(p.Log(), w) {
				t.Errorf("%s: the log does not name %q:\n%s", what, w, p.Log())
			}
		}
	}
	write(good[:len(good)/2])
	refused("half a state file", file, "join again")
	flipped := slices.Clone(good)
	flipped[len(flipped)/2] ^= 1
	write(flipped)
	refused("a flipped bit", file)
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	refused("no state file", file, "restore a snapshot")
	write(good)
	if err := os.Chown(file, int(instance.StoreID), int(instance.GroupID)); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(data, data+".away"); err != nil {
		t.Fatal(err)
	}
	refused("no data", data, "restore a snapshot")
	if err := os.Rename(data+".away", data); err != nil {
		t.Fatal(err)
	}
	p = m.start()
	p.Serving()
	p.Stop()
}

// TestKernelJoinTokens: one token is valid for one machine.
func TestKernelJoinTokens(t *testing.T) {
	m := machines(t, "n1")[0]
	p := m.start()
	p.Serving()
	ctx := servicetest.Context(t)

	token := p.token(&storev1.CreateJoinTokenRequest{})
	r, err := store.NewRequest()
	if err != nil {
		t.Fatal(err)
	}
	first, err := store.Enrol(ctx, token, "a", r)
	if err != nil {
		t.Fatal(err)
	}
	// The answer was lost: the same machine repeats its call.
	if _, err := store.Enrol(ctx, token, "a", r); err != nil {
		t.Errorf("the same machine again: %v", err)
	}
	_, err = enrolWith(t, token, "a")
	p.reason(err, codes.Unauthenticated, storev1.ErrorReason_ERROR_REASON_TOKEN_REFUSED)
	_, err = enrolWith(t, token, "b")
	p.reason(err, codes.Unauthenticated, storev1.ErrorReason_ERROR_REASON_TOKEN_REFUSED)
	if err == nil || !strings.Contains(err.Error(), "it has been used, for the node a") {
		t.Errorf("a used token: %v", err)
	}

	wrong := p.token(&storev1.CreateJoinTokenRequest{})
	_, err = enrolWith(t, wrong, "a")
	p.reason(err, codes.AlreadyExists, storev1.ErrorReason_ERROR_REASON_NODE_EXISTS)
	_, err = enrolWith(t, wrong, "n1")
	p.reason(err, codes.AlreadyExists, storev1.ErrorReason_ERROR_REASON_NODE_EXISTS)
	for _, name := range []string{"", "x/y", ".assigned", "a b", "a\x1b[2J", "a\u202eb", strings.Repeat("n", 254)} {
		_, err = enrolWith(t, wrong, name)
		p.reason(err, codes.InvalidArgument, storev1.ErrorReason_ERROR_REASON_INVALID_NAME)
	}
	for what, signing := range map[string][]byte{
		"nothing": nil, "no request": []byte("x"), "too much": make([]byte, 8193),
	} {
		_, err := enrolBy(t, wrong.Addresses[0]).Enrol(ctx, &storev1.EnrolRequest{
			Secret: wrong.Secret, Node: "b", SigningRequest: signing,
		})
		t.Logf("%s: %v", what, err)
		p.reason(err, codes.InvalidArgument, storev1.ErrorReason_ERROR_REASON_INVALID_SIGNING_REQUEST)
	}
	if _, err := store.EnrolMember(ctx, wrong, "a", m.address+":23800"); status.Code(err) != codes.Unauthenticated {
		t.Errorf("a node's token makes a member: %v", err)
	}
	lying := p.token(&storev1.CreateJoinTokenRequest{Member: true})
	for _, name := range []string{"x=https://192.0.2.9:1", "x,y", "", "a/b"} {
		if _, err := store.EnrolMember(ctx, lying, name, m.address+":23800"); status.Code(err) != codes.InvalidArgument {
			t.Errorf("a member called %q: %v", name, err)
		}
	}
	// A member that claims the name or the address of another member.
	_, err = store.EnrolMember(ctx, lying, "n1", "192.0.2.9:23800")
	p.reason(err, codes.FailedPrecondition, storev1.ErrorReason_ERROR_REASON_MEMBERS_NOT_CHANGED)
	_, err = store.EnrolMember(ctx, lying, "n9", m.address+":23800")
	p.reason(err, codes.FailedPrecondition, storev1.ErrorReason_ERROR_REASON_MEMBERS_NOT_CHANGED)
	_, err = enrolWith(t, p.token(&storev1.CreateJoinTokenRequest{Member: true}), "b")
	if status.Code(err) != codes.Unauthenticated {
		t.Errorf("a member's token makes a node: %v", err)
	}
	_, err = enrolWith(t, p.token(&storev1.CreateJoinTokenRequest{Node: "b"}), "c")
	if status.Code(err) != codes.Unauthenticated {
		t.Errorf("the token of another node: %v", err)
	}
	brief := p.token(&storev1.CreateJoinTokenRequest{ValidFor: durationpb.New(time.Second)})
	servicetest.Eventually(t, "the end of a token", func() bool {
		_, err := enrolWith(t, brief, "d") // until it expires, the token is refused because another key has used it
		return err != nil && strings.Contains(err.Error(), "it expired at")
	})
	guessed := token
	guessed.Secret = strings.Repeat("A", len(token.Secret))
	_, err = enrolWith(t, guessed, "e")
	p.reason(err, codes.Unauthenticated, storev1.ErrorReason_ERROR_REASON_TOKEN_REFUSED)

	// A server of another store does not receive the token's secret.
	other := machines(t, "n1")[0]
	q := other.start()
	q.Serving()
	strange := p.token(&storev1.CreateJoinTokenRequest{})
	strange.Addresses = q.token(&storev1.CreateJoinTokenRequest{}).Addresses
	if _, err := enrolWith(t, strange, "f"); err == nil || !strings.Contains(err.Error(), "is not of the store") {
		t.Errorf("a server of another store: %v", err)
	}

	// A machine that replaces another machine gets its name, and the former machine loses the name.
	if _, err := etcdBy(t, first).Put(ctx, keys+"/alive/a", "x"); err != nil {
		t.Fatal(err)
	}
	second, err := enrolWith(t, p.token(&storev1.CreateJoinTokenRequest{Node: "a"}), "a")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := etcdBy(t, second).Put(ctx, keys+"/alive/a", "x"); err != nil {
		t.Errorf("the machine that replaces another: %v", err)
	}
	if _, err := store.Renew(ctx, first); status.Code(err) != codes.Unauthenticated {
		t.Errorf("the replaced machine renews: %v", err)
	}
	refused(t, "the replaced machine", first)
}

// refused fails the test unless etcd refuses the connection.
func refused(t *testing.T, who string, c store.Credentials) {
	t.Helper()
	ctx, cancel := context.WithTimeout(servicetest.Context(t), 2*time.Second)
	defer cancel()
	if r, err := etcdBy(t, c).Get(ctx, keys+"/layout"); err == nil {
		t.Errorf("%s reads %v", who, r.Kvs)
	}
}

// TestKernelNodeWithTheRightsOfAnotherWritesNothing shows that the compromised node a cannot change the keys of node
// b, the settings of the cluster, or etcd itself.
func TestKernelNodeWithTheRightsOfAnotherWritesNothing(t *testing.T) {
	m := machines(t, "n1")[0]
	p := m.start()
	p.Serving()
	ctx := t.Context() // many calls
	a, b := etcdBy(t, p.join("a")), etcdBy(t, p.join("b"))
	lease, err := b.Grant(ctx, 600)
	if err != nil {
		t.Fatal(err)
	}
	victims := []string{
		"/ip/b/node", "/ip/b/range/ipv4-0", "/ip/b/ep/10.0.1.1", "/ref/b/256", "/alive/b", "/report/b/confirmed",
	}
	for _, key := range victims {
		if _, err := b.Put(ctx, keys+key, "b's", clientv3.WithLease(lease.ID)); err != nil {
			t.Fatalf("b writes %s: %v", key, err)
		}
	}
	before := dump(t, p, m)

	targets := append(slices.Clone(victims),
		"/ip/.assigned/of/a", "/ip/.assigned/all", "/ip/c/node", "/layout", "/ipam", "/restored", "/other", "/ip",
		"/ip/", "/alive/aa", "/ip/a")
	for i := range targets {
		targets[i] = keys + targets[i]
	}
	targets = append(targets, "/sluice/v1/store/nodes/a", "/sluice/v1/store/nodes/b", "/sluice/v1/store/tokens/x",
		"/sluice/v1/store/epoch", "x", "\x00")
	own := keys + "/ip/a/node"
	attempts := 0
	denied := func(what string, err error) {
		t.Helper()
		attempts++
		if code(err) != codes.PermissionDenied {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, key := range targets {
		put, del := clientv3.OpPut(key, "a's"), clientv3.OpDelete(key)
		_, err := a.Do(ctx, put)
		denied("put "+key, err)
		_, err = a.Do(ctx, del)
		denied("delete "+key, err)
		_, err = a.Put(ctx, key, "", clientv3.WithIgnoreValue())
		denied("detach "+key, err)
		for _, op := range []clientv3.Op{put, del} {
			for i, ops := range [][]clientv3.Op{
				{op},
				{clientv3.OpPut(own, "x"), op},
				{clientv3.OpTxn(nil, []clientv3.Op{op}, nil)},
				{clientv3.OpTxn(nil, nil, []clientv3.Op{op})},
				{clientv3.OpTxn(nil, []clientv3.Op{clientv3.OpTxn(nil, []clientv3.Op{op}, nil)}, nil)},
			} {
				_, err = a.Txn(ctx).Then(ops...).Commit()
				denied(fmt.Sprintf("transaction %d on %s", i, key), err)
				_, err = a.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(own), ">", 0)).Else(ops...).Commit()
				denied(fmt.Sprintf("the other branch of transaction %d on %s", i, key), err)
			}
		}
	}
	for what, end := range map[string]string{
		keys + "/alive/a": keys + "/alive/c", keys + "/ip/a/": keys + "/ip/c", keys + "/": keys + "0", "\x00": "\x00",
		keys + "/id/": keys + "/j", "a": "\x00",
	} {
		_, err := a.Delete(ctx, what, clientv3.WithRange(end))
		denied("delete from "+what+" to "+end, err)
		_, err = a.Delete(ctx, what, clientv3.WithRange(end), clientv3.WithPrevKV())
		denied("delete from "+what+" to "+end+" and read", err)
	}
	for _, secret := range []string{"/sluice/v1/store/", "\x00", "/"} {
		_, err := a.Get(ctx, secret, clientv3.WithFromKey())
		denied("read from "+secret, err)
		_, err = a.Get(ctx, secret)
		denied("read "+secret, err)
	}
	_, err = a.Put(ctx, own, "x", clientv3.WithLease(lease.ID))
	denied("attach a key to b's lease", err)
	_, err = a.Txn(ctx).Then(clientv3.OpPut(own, "x", clientv3.WithLease(lease.ID))).Commit()
	denied("attach a key to b's lease in a transaction", err)
	for what, options := range map[string][]clientv3.OpOption{
		"\x00": {clientv3.WithFromKey()}, "/sluice/v1/store/": {clientv3.WithPrefix()},
		keys + "/": {clientv3.WithFromKey()}, "/sluice/v1/store/nodes/b": nil,
	} {
		ended, cancel := context.WithTimeout(ctx, 30*time.Second)
		r := <-a.Watch(ended, what, append(options, clientv3.WithRev(1), clientv3.WithCreatedNotify())...)
		cancel()
		if attempts++; !r.Canceled || len(r.Events) > 0 || !strings.Contains(fmt.Sprint(r.Err()), "permission denied") {
			t.Errorf("watch from %q: %v, %d events", what, r.Err(), len(r.Events))
		}
	}
	_, err = a.Revoke(ctx, lease.ID)
	denied("revoke b's lease", err)
	_, err = a.KeepAliveOnce(ctx, lease.ID)
	denied("renew b's lease", err)
	if r, err := b.KeepAliveOnce(ctx, lease.ID); err != nil || r.TTL != 600 {
		t.Errorf("b renews its lease: %v, %v", r, err)
	}

	// Calls that no node needs.
	calls := map[string]func() error{
		"compact":         func() error { _, err := a.Compact(ctx, 2); return err },
		"list leases":     func() error { _, err := a.Leases(ctx); return err },
		"add a user":      func() error { _, err := a.UserAdd(ctx, "x", "y"); return err },
		"grant a role":    func() error { _, err := a.UserGrantRole(ctx, "node:a", "root"); return err },
		"grant a right":   func() error { _, err := a.RoleGrantPermission(ctx, "nodes", "\x00", "\x00", 2); return err },
		"disable users":   func() error { _, err := a.AuthDisable(ctx); return err },
		"become root":     func() error { _, err := a.Authenticate(ctx, "root", ""); return err },
		"list members":    func() error { _, err := a.MemberList(ctx); return err },
		"add a member":    func() error { _, err := a.MemberAdd(ctx, []string{"https://192.0.2.1:2380"}); return err },
		"remove a member": func() error { _, err := a.MemberRemove(ctx, 1); return err },
		"defragment":      func() error { _, err := a.Defragment(ctx, a.Endpoints()[0]); return err },
		"end alarms":      func() error { _, err := a.AlarmDisarm(ctx, &clientv3.AlarmMember{}); return err },
		"move the leader": func() error { _, err := a.MoveLeader(ctx, 1); return err },
		"downgrade":       func() error { _, err := a.Downgrade(ctx, clientv3.DowngradeValidate, "3.5.0"); return err },
		"take a snapshot": func() error {
			r, err := a.Snapshot(ctx)
			if err != nil {
				return err
			}
			defer r.Close()
			_, err = io.ReadAll(r)
			return err
		},
	}
	for what, do := range calls {
		denied(what, do())
	}
	if after := dump(t, p, m); after != before {
		t.Errorf("the store changed from\n%s\nto\n%s", before, after)
	}
	t.Logf("%d attempts", attempts)
	if attempts < 400 {
		t.Errorf("only %d attempts", attempts)
	}
	// The keys of node a are still writable.
	if _, err := a.Put(ctx, own, "x"); err != nil {
		t.Error(err)
	}
}

// dump returns all of etcd as root, except the times of the certificates.
func dump(t *testing.T, p *proc, m *machine) string {
	t.Helper()
	r, err := m.etcdAs(0).Get(t.Context(), "\x00", clientv3.WithFromKey())
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, kv := range r.Kvs {
		fmt.Fprintf(&b, "%s=%s at %d, lease %x\n", kv.Key, kv.Value, kv.ModRevision, kv.Lease)
	}
	for _, n := range p.status().GetMembers() {
		fmt.Fprintln(&b, n)
	}
	return b.String()
}

// TestKernelRevokedNodeIsDisconnected: etcd disconnects a revoked node at once, because its user no longer exists.
func TestKernelRevokedNodeIsDisconnected(t *testing.T) {
	m := machines(t, "n1")[0]
	p := m.start()
	p.Serving()
	ctx := servicetest.Context(t)
	c := p.join("a")
	etcd := etcdBy(t, c)
	watch := etcd.Watch(ctx, keys+"/", clientv3.WithPrefix(), clientv3.WithCreatedNotify())
	if r := <-watch; r.Err() != nil {
		t.Fatal(r.Err())
	}
	if r, err := p.RevokeNode(ctx, &storev1.RevokeNodeRequest{Node: "a"}); err != nil || !r.GetRevoked() {
		t.Fatalf("revoke: %v, %v", r, err)
	}
	short, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if _, err := etcd.Put(short, keys+"/alive/a", "x"); err == nil {
		t.Error("a revoked node writes")
	}
	servicetest.Eventually(t, "the end of the connection", func() bool {
		return strings.Contains(p.Log(), "closing the connection of a node")
	})
	refused(t, "a revoked node", c)
	_, err := store.Renew(ctx, c)
	p.reason(err, codes.Unauthenticated, storev1.ErrorReason_ERROR_REASON_CREDENTIALS_REFUSED)
	if r, err := p.RevokeNode(ctx, &storev1.RevokeNodeRequest{Node: "a"}); err != nil || r.GetRevoked() {
		t.Errorf("revoke again: %v, %v", r, err)
	}
	// The name is free for another machine.
	if _, err := etcdBy(t, p.join("a")).Put(ctx, keys+"/alive/a", "x"); err != nil {
		t.Error(err)
	}
	refused(t, "the revoked node, after another one joined", c)
}

// TestKernelCertificateIsRenewedByItself: with a valid certificate, a node gets the next one without a token.
func TestKernelCertificateIsRenewedByItself(t *testing.T) {
	m := machines(t, "n1")[0]
	p := m.start()
	p.Serving()
	ctx := servicetest.Context(t)
	old := p.join("a")
	renewed, err := store.Renew(ctx, old)
	if err != nil {
		t.Fatal(err)
	}
	if renewed.Certificate == old.Certificate || renewed.Key == old.Key || renewed.Node != "a" {
		t.Error("the certificate or the key is the former one")
	}
	if _, err := etcdBy(t, renewed).Put(ctx, keys+"/alive/a", "x"); err != nil {
		t.Error(err)
	}
	if located, err := store.Locate(ctx, renewed); err != nil || len(located.Clients) != 1 || located.Epoch != 1 {
		t.Errorf("members: %v, %v", located.Clients, err)
	}
	// A member whose epoch is earlier than the epoch that the node knows.
	later := renewed
	later.Epoch = 2
	if _, err := store.Locate(ctx, later); err == nil || !strings.Contains(err.Error(), "this node knows epoch 2") {
		t.Errorf("a member of an earlier epoch: %v", err)
	}
	refused(t, "a node that knows a later epoch", later)
}

// TestKernelThreeMembers: a store grows from one member to three, loses one and replaces it, while a client of a node
// keeps working.
func TestKernelThreeMembers(t *testing.T) {
	all := machines(t, "n1", "n2", "n3", "n4")
	p := all[0].start()
	p.Serving()
	ctx := servicetest.Context(t)
	c := p.join("a")
	procs := map[string]*proc{"n1": p}
	add := func(by *proc, m *machine) *proc {
		t.Helper()
		procs[m.name] = m.joinBy(by)
		return procs[m.name]
	}
	voting := func(p *proc) (names []string) {
		for _, x := range p.status().GetMembers() {
			if x.GetVoting() {
				names = append(names, x.GetName())
			}
		}
		return names
	}
	add(p, all[1])
	servicetest.Eventually(t, "the second member started", func() bool {
		for _, x := range p.status().GetMembers() {
			if x.GetName() == "n2" {
				return true
			}
		}
		return false
	})
	if got := voting(p); len(got) != 1 {
		t.Errorf("%q have a vote with two members", got)
	}
	// The token does not give the keys to a machine that says the same.
	_, err := store.EnrolMember(ctx, all[1].token, "n2", all[1].peer)
	p.reason(err, codes.FailedPrecondition, storev1.ErrorReason_ERROR_REASON_MEMBERS_NOT_CHANGED)
	add(p, all[2])
	servicetest.Eventually(t, "three members have a vote", func() bool { return len(voting(p)) == 3 })
	procs["n2"].Serving()
	procs["n3"].Serving()
	if c2, err := store.Locate(ctx, c); err != nil || len(c2.Clients) != 3 {
		t.Fatalf("addresses %v, %v", c2.Clients, err)
	} else {
		c = c2
	}
	etcd := etcdBy(t, c)
	put := func(what string) {
		t.Helper()
		servicetest.Eventually(t, what, func() bool {
			short, cancel := context.WithTimeout(ctx, 2*time.Second)
			defer cancel()
			_, err := etcd.Put(short, keys+"/ip/a/node", what)
			return err == nil
		})
	}
	put("with three members")

	// One member is lost, with its disk.
	procs["n1"].Kill()
	put("with two of three members")
	p = procs["n2"]
	servicetest.Eventually(t, "the lost member is removed", func() bool {
		_, err := p.RemoveMember(ctx, &storev1.RemoveMemberRequest{Name: "n1"})
		return err == nil
	})
	_, err = p.RemoveMember(ctx, &storev1.RemoveMemberRequest{Name: "n2"})
	p.reason(err, codes.FailedPrecondition, storev1.ErrorReason_ERROR_REASON_MEMBERS_NOT_CHANGED)
	_, err = p.RemoveMember(ctx, &storev1.RemoveMemberRequest{Name: "n1"})
	p.reason(err, codes.NotFound, storev1.ErrorReason_ERROR_REASON_MEMBER_NOT_FOUND)
	add(p, all[3])
	servicetest.Eventually(t, "its replacement has a vote", func() bool {
		return slices.Contains(voting(p), "n4") && len(voting(p)) == 3
	})
	put("with the replacement")

	// The removed member does not become a member again.
	removed := all[0].start()
	servicetest.Eventually(t, "the removed member ends or does not serve", func() bool {
		return strings.Contains(removed.Log(), "removed") || strings.Contains(removed.Log(), "stopped")
	})

	// Without a quorum the members refuse writes, and the status names the reason.
	procs["n3"].Kill()
	procs["n4"].Kill()
	short, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if _, err := etcd.Put(short, keys+"/ip/a/node", "x"); err == nil {
		t.Error("a write without a quorum succeeds")
	}
	servicetest.Eventually(t, "the status without a quorum", func() bool {
		problems := p.status().GetService().GetProblems()
		return len(problems) > 0 && strings.Contains(problems[0].GetText(), "no leader")
	})
	_, err = p.CreateJoinToken(ctx, &storev1.CreateJoinTokenRequest{})
	p.reason(err, codes.Unavailable, storev1.ErrorReason_ERROR_REASON_NO_QUORUM)
	all[2].start()
	put("the quorum is back")
}

// TestKernelRestoredSnapshotIsANewEpoch: the store has the data of the snapshot, but its tokens are not valid again.
// Nodes that know the new epoch do not use a member of the former epoch.
func TestKernelRestoredSnapshotIsANewEpoch(t *testing.T) {
	m := machines(t, "n1")[0]
	p := m.start()
	p.Serving()
	ctx := servicetest.Context(t)
	c := p.join("a")
	if _, err := etcdBy(t, c).Put(ctx, keys+"/ip/a/node", "old"); err != nil {
		t.Fatal(err)
	}
	unused := p.token(&storev1.CreateJoinTokenRequest{})
	used := p.token(&storev1.CreateJoinTokenRequest{})
	snapshot := p.snapshot()
	former := p.status()
	if pause := restoredFor(t, m); pause != 0 {
		t.Errorf("in a new store, new allocations wait %d s", pause)
	}
	if _, err := enrolWith(t, used, "b"); err != nil {
		t.Fatal(err)
	}
	r, err := etcdBy(t, c).Put(ctx, keys+"/ip/a/node", "new")
	if err != nil {
		t.Fatal(err)
	}
	if code := p.Stop(); code != 0 {
		t.Fatalf("exit code %d", code)
	}

	m.restore(snapshot)
	p = m.start()
	p.Serving()
	st := p.status()
	if st.GetEpoch() != 2 || st.GetClusterId() == former.GetClusterId() || len(st.GetMembers()) != 1 {
		t.Errorf("after the restore: %v", st)
	}
	located, err := store.Locate(ctx, c)
	if err != nil || located.Epoch != 2 {
		t.Fatalf("a node of the former epoch finds epoch %d, %v", located.Epoch, err)
	}
	got, err := etcdBy(t, located).Get(ctx, keys+"/ip/a/node")
	if err != nil || len(got.Kvs) != 1 || string(got.Kvs[0].Value) != "old" {
		t.Fatalf("restored: %v, %v", got, err)
	}
	if got.Header.Revision <= r.Header.Revision {
		t.Errorf("revision %d after the restore, %d before: a client would take it for known",
			got.Header.Revision, r.Header.Revision)
	}
	// For a minute, nodes allocate nothing new, and claim what they hold.
	if pause := restoredFor(t, m); pause <= 0 || pause > 60 {
		t.Errorf("after the restore, new allocations wait %d s", pause)
	}
	if _, err := etcdBy(t, located).Delete(ctx, keys+"/restored"); code(err) != codes.PermissionDenied {
		t.Errorf("a node ends the time of claims: %v", err)
	}
	watch := etcdBy(t, located).Watch(ctx, keys+"/", clientv3.WithPrefix(), clientv3.WithRev(r.Header.Revision))
	if w := <-watch; !errors.Is(w.Err(), rpctypes.ErrCompacted) {
		t.Errorf("a watch from a revision of the former epoch: %v", w.Err())
	}
	for what, token := range map[string]store.Token{"unused": unused, "used": used} {
		_, err = enrolWith(t, token, "c-"+what)
		p.reason(err, codes.Unauthenticated, storev1.ErrorReason_ERROR_REASON_TOKEN_REFUSED)
	}
	if _, err := os.Stat(filepath.Join(m.state(), "etcd.epoch-1")); err != nil {
		t.Errorf("the former data: %v", err)
	}
	refused(t, "a node that knows epoch 1 only", c) // until it has located the members
	p.Stop()

	// The restored store restarts without another restore.
	p = m.start()
	p.Serving()
	if r, err := m.etcdAs(0).Get(ctx, keys+"/restored"); err != nil || len(r.Kvs) > 0 && r.Kvs[0].Version > 1 {
		t.Errorf("another start began the time of claims again: %v, %v", r, err)
	}
	if again := p.status(); again.GetEpoch() != 2 || again.GetClusterId() != st.GetClusterId() {
		t.Errorf("after another start: %v", again)
	}
}

// TestKernelStoreThatIsRestoredTwiceHasALaterEpoch: all data are lost, and the only copy of member.json is from the
// first epoch.
func TestKernelStoreThatIsRestoredTwiceHasALaterEpoch(t *testing.T) {
	m := machines(t, "n1")[0]
	p := m.start()
	p.Serving()
	snapshot := p.snapshot()
	p.Stop()
	copied, err := os.ReadFile(filepath.Join(m.state(), store.MemberFile))
	if err != nil {
		t.Fatal(err)
	}
	m.restore(snapshot)
	p = m.start()
	p.Serving()
	token := p.token(&storev1.CreateJoinTokenRequest{})
	snapshot = p.snapshot()
	if _, err := enrolWith(t, token, "a"); err != nil {
		t.Fatal(err)
	}
	p.Stop()

	files, err := os.ReadDir(m.state())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if err := os.RemoveAll(filepath.Join(m.state(), f.Name())); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(m.state(), store.MemberFile), copied, 0o600); err != nil {
		t.Fatal(err)
	}
	m.restore(snapshot)
	m.own(store.MemberFile, store.LockFile)
	p = m.start()
	p.Serving()
	if st := p.status(); st.GetEpoch() != 3 {
		t.Errorf("epoch %d after the epochs 1 and 2", st.GetEpoch())
	}
	if pause := restoredFor(t, m); pause <= 0 {
		t.Error("after the restore, new allocations do not wait")
	}
	_, err = enrolWith(t, token, "b")
	p.reason(err, codes.Unauthenticated, storev1.ErrorReason_ERROR_REASON_TOKEN_REFUSED)
}

// restoredFor returns for how many seconds nodes do not allocate because the store was restored.
func restoredFor(t *testing.T, m *machine) int64 {
	t.Helper()
	root := m.etcdAs(0)
	r, err := root.Get(t.Context(), keys+"/restored")
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Kvs) == 0 {
		return 0
	}
	lease, err := root.TimeToLive(t.Context(), clientv3.LeaseID(r.Kvs[0].Lease))
	if err != nil {
		t.Fatal(err)
	}
	return lease.TTL
}

// TestKernelCorruptSnapshotIsNotRestored: the error of the process contains the file, and the data stay unchanged.
func TestKernelCorruptSnapshotIsNotRestored(t *testing.T) {
	m := machines(t, "n1")[0]
	p := m.start()
	p.Serving()
	snapshot := p.snapshot()
	cluster := p.status().GetClusterId()
	p.Stop()
	flipped := slices.Clone(snapshot)
	flipped[len(flipped)/2] ^= 1
	for what, bad := range map[string][]byte{
		"a flipped bit": flipped, "half": snapshot[:len(snapshot)/2], "empty": {}, "no database": []byte("x"),
	} {
		m.restore(bad)
		p = m.start()
		if code := p.Exit(); code != 2 || !strings.Contains(p.Log(), store.RestoreFile) {
			t.Errorf("%s: exit code %d\n%s", what, code, p.Log())
		}
	}
	if err := os.Remove(filepath.Join(m.state(), store.RestoreFile)); err != nil {
		t.Fatal(err)
	}
	p = m.start()
	p.Serving()
	if st := p.status(); st.GetEpoch() != 1 || st.GetClusterId() != cluster {
		t.Errorf("after refused snapshots: %v", st)
	}
}

// TestKernelRestoreContinuesAfterEachStep: the process was killed while it exchanged the data.
func TestKernelRestoreContinuesAfterEachStep(t *testing.T) {
	m := machines(t, "n1")[0]
	p := m.start()
	p.Serving()
	p.Stop()
	request := filepath.Join(m.state(), store.RestoreFile)
	data := filepath.Join(m.state(), "etcd")
	for epoch := uint64(2); epoch <= 4; epoch++ {
		m.restore(nil)
		saved, err := os.ReadFile(request)
		if err != nil {
			t.Fatal(err)
		}
		p = m.start()
		p.Serving()
		p.Stop()
		// As after the state was written, before the exchange or in the middle of it, or before the request was removed.
		if err := os.WriteFile(request, saved, 0o600); err != nil {
			t.Fatal(err)
		}
		m.own(store.RestoreFile)
		if epoch < 4 {
			if err := os.Rename(data, data+".restored"); err != nil {
				t.Fatal(err)
			}
		}
		if former := fmt.Sprintf("%s.epoch-%d", data, epoch-1); epoch == 2 {
			if err := os.Rename(former, data); err != nil {
				t.Fatal(err)
			}
		}
		p = m.start()
		p.Serving()
		if st := p.status(); st.GetEpoch() != epoch {
			t.Errorf("epoch %d, want %d", st.GetEpoch(), epoch)
		}
		if _, err := os.Stat(request); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the request of epoch %d is still there: %v", epoch, err)
		}
		p.Stop()
	}
}

// TestKernelRebuildFromOneMember: two of three members are lost, and the third continues with its data.
func TestKernelRebuildFromOneMember(t *testing.T) {
	all := machines(t, "n1", "n2", "n3")
	p := all[0].start()
	p.Serving()
	ctx := servicetest.Context(t)
	c := p.join("a")
	others := []*proc{all[1].joinBy(p), all[2].joinBy(p)} // the second waits until the first has started
	servicetest.Eventually(t, "three members have a vote", func() bool {
		voting := 0
		for _, x := range p.status().GetMembers() {
			if x.GetVoting() {
				voting++
			}
		}
		return voting == 3
	})
	c, err := store.Locate(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "a write", func() bool {
		_, err := etcdBy(t, c).Put(ctx, keys+"/ip/a/node", "kept")
		return err == nil
	})
	p.Stop()
	all[0].restore(nil)
	p = all[0].start()
	p.Serving()
	// The two other members still run, with a quorum. A node that knows the new epoch does not use them.
	located, err := store.Locate(ctx, c)
	if err != nil || located.Epoch != 2 || len(located.Clients) != 1 {
		t.Fatalf("addresses %v of epoch %d, %v", located.Clients, located.Epoch, err)
	}
	got, err := etcdBy(t, located).Get(ctx, keys+"/ip/a/node")
	if err != nil || len(got.Kvs) != 1 || string(got.Kvs[0].Value) != "kept" {
		t.Errorf("after the rebuild: %v, %v", got, err)
	}
	behind := located
	behind.Clients = c.Clients[1:]
	refused(t, "a node of epoch 2, at members of epoch 1,", behind)
	for _, q := range others {
		q.Kill()
	}
	if st := p.status(); len(st.GetMembers()) != 1 || len(st.GetService().GetProblems()) != 0 {
		t.Errorf("after the rebuild: %v", st)
	}
}

// TestKernelAcknowledgedWritesSurviveSIGKILL: the process is killed in the middle of a series of writes.
func TestKernelAcknowledgedWritesSurviveSIGKILL(t *testing.T) {
	m := machines(t, "n1")[0]
	p := m.start()
	p.Serving()
	c := p.join("a")
	acknowledged := 0
	for round := range 4 {
		etcd, ended := etcdBy(t, c), make(chan int)
		go func() {
			n := acknowledged
			for {
				_, err := etcd.Put(t.Context(), fmt.Sprintf("%s/ip/a/%06d", keys, n), "x")
				if err != nil {
					ended <- n
					return
				}
				n++
			}
		}()
		servicetest.Eventually(t, "some writes", func() bool {
			r, err := etcd.Get(t.Context(), keys+"/ip/a/", clientv3.WithPrefix(), clientv3.WithCountOnly())
			return err == nil && r.Count > int64(acknowledged+20*(round+1))
		})
		p.Kill()
		etcd.Close()
		acknowledged = <-ended
		p = m.start()
		p.Serving()
		r, err := etcdBy(t, c).Get(t.Context(), keys+"/ip/a/", clientv3.WithPrefix(), clientv3.WithKeysOnly())
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Kvs) < acknowledged {
			t.Fatalf("%d keys after a kill, %d were acknowledged", len(r.Kvs), acknowledged)
		}
		for i := range acknowledged {
			if want := fmt.Sprintf("%s/ip/a/%06d", keys, i); string(r.Kvs[i].Key) != want {
				t.Fatalf("key %d is %s, want %s", i, r.Kvs[i].Key, want)
			}
		}
	}
}

// TestKernelCorruptDatabaseIsNotServed: the process ends, and its log refers to the page that describes how to recover.
func TestKernelCorruptDatabaseIsNotServed(t *testing.T) {
	m := machines(t, "n1")[0]
	p := m.start()
	p.Serving()
	c := p.join("a")
	if _, err := etcdBy(t, c).Put(t.Context(), keys+"/ip/a/node", strings.Repeat("x", 1000)); err != nil {
		t.Fatal(err)
	}
	used := p.status().GetDatabaseBytes() // the end of the file may be unused
	p.Stop()
	for name, damage := range map[string]func([]byte) []byte{
		"empty": func([]byte) []byte { return nil },
		"half":  func(b []byte) []byte { return b[:used/2] },
		"zeros": func(b []byte) []byte { return make([]byte, len(b)) },
		"noise": func(b []byte) []byte {
			for i := range b {
				b[i] ^= byte(i*7 + 1)
			}
			return b
		},
	} {
		file := filepath.Join(m.state(), "etcd", "member", "snap", "db")
		good, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, damage(slices.Clone(good)), 0o600); err != nil {
			t.Fatal(err)
		}
		p := m.start()
		if name == "empty" { // etcd creates the file again from its log, which contains all data here
			p.Serving()
			r, err := etcdBy(t, c).Get(t.Context(), keys+"/ip/a/node")
			if err != nil || len(r.Kvs) != 1 || len(r.Kvs[0].Value) != 1000 {
				t.Errorf("after an empty database: %v, %v", r, err)
			}
			p.Stop()
			continue
		}
		if code := p.Exit(); code != 2 {
			t.Errorf("%s: exit code %d", name, code)
		}
		if !strings.Contains(p.Log(), "docs/store.md") {
			t.Errorf("%s: the log names no way out:\n%s", name, p.Log())
		}
		if err := os.WriteFile(file, good, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p = m.start()
	p.Serving()
}

// TestKernelFullStoreRecovers: a node fills the database. Others can still read and remove keys, and once there is
// space, they can write.
func TestKernelFullStoreRecovers(t *testing.T) {
	m := machines(t, "n1")[0]
	p := m.start("--quota", "16MiB")
	p.Serving()
	ctx := t.Context()
	a, b := etcdBy(t, p.join("a")), etcdBy(t, p.join("b"))
	lease, err := b.Grant(ctx, 600)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Put(ctx, keys+"/alive/b", "b", clientv3.WithLease(lease.ID)); err != nil {
		t.Fatal(err)
	}
	big := strings.Repeat("x", 1<<20)
	filled := 0
	for ; err == nil; filled++ {
		if filled > 100 {
			t.Fatal("100 MiB were accepted")
		}
		_, err = a.Put(ctx, fmt.Sprintf("%s/ip/a/%d", keys, filled), big)
	}
	if !errors.Is(err, rpctypes.ErrNoSpace) {
		t.Fatalf("write to a full store: %v", err)
	}
	servicetest.Eventually(t, "the problem in the status", func() bool {
		problems := p.status().GetService().GetProblems()
		return len(problems) == 1 && strings.Contains(problems[0].GetText(), "raise the setting quota")
	})
	_, err = p.CreateJoinToken(ctx, &storev1.CreateJoinTokenRequest{})
	p.reason(err, codes.ResourceExhausted, storev1.ErrorReason_ERROR_REASON_NO_SPACE)
	if _, err := b.KeepAliveOnce(ctx, lease.ID); err != nil {
		t.Errorf("renew a lease in a full store: %v", err)
	}
	if r, err := b.Get(ctx, keys+"/alive/b"); err != nil || len(r.Kvs) != 1 {
		t.Errorf("read in a full store: %v, %v", r, err)
	}
	// The administrator removes the node that filled the database, and the history with the node's keys.
	if _, err := p.RevokeNode(ctx, &storev1.RevokeNodeRequest{Node: "a"}); err != nil {
		t.Errorf("revoke in a full store: %v", err)
	}
	root := m.etcdAs(0)
	r, err := root.Delete(ctx, keys+"/ip/a/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := root.Compact(ctx, r.Header.Revision); err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "a write after there is space", func() bool {
		_, err := b.Put(ctx, keys+"/ip/b/node", "b")
		return err == nil
	})
}

// TestKernelFullDiskEndsTheProcess, and loses no acknowledged write.
func TestKernelFullDiskEndsTheProcess(t *testing.T) {
	m := machines(t, "n1")[0]
	if err := os.MkdirAll(m.state(), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", m.state(), "tmpfs", 0, "size=160m,mode=0700"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(m.state(), unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	m.own("")
	p := m.start()
	p.Serving()
	c := p.join("a")
	etcd := etcdBy(t, c)
	if err := fill(filepath.Join(m.state(), "filler")); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	acknowledged := 0
	value := strings.Repeat("x", 1<<20)
	for ; acknowledged < 200; acknowledged++ {
		short, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		_, err := etcd.Put(short, fmt.Sprintf("%s/ip/a/%06d", keys, acknowledged), value)
		cancel()
		if err != nil {
			break
		}
	}
	if acknowledged == 200 {
		t.Fatal("200 MiB fit into a full disk")
	}
	if code := p.Exit(); code == 0 || !strings.Contains(p.Log(), "no space left on device") {
		t.Errorf("exit code %d\n%s", code, p.Log())
	}
	if err := os.Remove(filepath.Join(m.state(), "filler")); err != nil {
		t.Fatal(err)
	}
	p = m.start()
	p.Serving()
	r, err := etcdBy(t, c).Get(t.Context(), keys+"/ip/a/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil || r.Count < int64(acknowledged) {
		t.Errorf("%d keys after a full disk, %d were acknowledged, %v", r.Count, acknowledged, err)
	}
}

// fill writes a file until the disk is full.
func fill(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	for block := make([]byte, 1<<20); err == nil; {
		_, err = f.Write(block)
	}
	return err
}
