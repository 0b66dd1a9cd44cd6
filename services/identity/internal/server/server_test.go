// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/rpc/reasontest"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
	"github.com/sluice-net/sluice/services/identity/internal/labels"
	"github.com/sluice-net/sluice/services/identity/internal/pods"
	"github.com/sluice-net/sluice/services/identity/internal/refusals"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
	"github.com/sluice-net/sluice/services/identity/internal/snapshot"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

func TestMain(m *testing.M) {
	if socket := os.Getenv(childSocket); socket != "" {
		os.Exit(childCalls(socket))
	}
	run := func() int { return leaktest.Run(m) }
	os.Exit(reasontest.Run(run, identityv1.ErrorReason_ERROR_REASON_UNSPECIFIED, map[string]string{
		// TestEverySentinelHasItsCodeAndReason shows these to the table.
		"INVALID_REFERENCE": "the rules of the proto file refuse what the core would",
		"NUMBERS_EXHAUSTED": "it takes 65,280 identities; package allocator has them",
		"STORAGE_FAILED":    "it takes a full disk",
		"POD_NOT_FOUND":     "it takes an API server without the pod; package pods has one",
		"ADDRESS_RESTING":   "it takes a mapping that etcd still has; package registry has one",
	}))
}

// service is the real server on a real socket over the store in memory.
type service struct {
	identityv1.IdentityServiceClient
	cluster identityv1.ClusterServiceClient
	shares  sharesv1.SharesServiceClient
	reg     *registry.Registry
	store   *nodeStore
	t       *testing.T
	fake    *storetest.Fake
	claims  *claims
	alloc   *allocator.Allocator
	hub     *Hub
	impl    *Server
	socket  string
}

type option func(*allocator.Config, *rpc.Options)

func serve(t *testing.T, opts ...option) *service {
	t.Helper()
	dir, err := os.MkdirTemp("", "identity-") // short enough for the path of a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	files, err := snapshot.Open(dir, "n1")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { files.Close() })
	if _, err := files.Load(); err != nil {
		t.Fatal(err)
	}
	filter, err := labels.NewFilter(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	nodeFilter, err := labels.NewNodeFilter(nil, []string{"left."})
	if err != nil {
		t.Fatal(err)
	}
	s := &service{t: t, fake: storetest.NewFake(), hub: NewHub(), socket: filepath.Join(dir, "s")}
	s.claims = &claims{Store: s.fake.Node("n1")}
	cfg := allocator.Config{
		Quota: 3, StoreTimeout: 200 * time.Millisecond, Heartbeat: 10 * time.Millisecond, Reconcile: 10 * time.Millisecond,
		Grace: time.Hour, Quarantine: time.Hour, KnownDelay: time.Millisecond, RetryMin: time.Millisecond,
		RetryMax: 10 * time.Millisecond,
		Log:      log.Discard(),
	}
	nodes := NewClusterHub()
	s.store = &nodeStore{assigned: map[string]registry.Assignment{}}
	s.reg = registry.New(registry.Config{
		Node: "n1", Incarnation: "i", Version: "test", Timeout: time.Second, Pause: time.Millisecond,
		RetryMin: time.Millisecond,
		RetryMax: 10 * time.Millisecond, RetryRanges: time.Hour, HoldLosses: time.Hour,
		StaleMappings: time.Hour, Log: log.Discard(),
	}, s.store, files, nodes, registry.Registration{})
	impl := &Server{
		Cluster: &Cluster{
			Registry: s.reg, Hub: nodes, Node: "n1", NodeFilter: nodeFilter, Connected: func() bool { return true },
			Kinds: kindsBoard(t), Refusals: &refusalsStore{reports: map[string]refusals.Report{}},
		},
		Hub: s.hub, Endpoints: NewEndpointHub(), Filter: filter, Node: "n1", Version: "test", Started: time.Now(),
	}
	ro := rpc.Options{Register: impl.Register, Methods: Methods(), AlsoRoot: []uint32{uint32(os.Getuid())}}
	for _, o := range opts {
		o(&cfg, &ro)
	}
	if s.alloc, err = allocator.New(cfg, s.claims, files, s.hub, EndpointPublisher{impl.Endpoints, s.reg},
		allocator.Holds{},
		allocator.Known{}, false); err != nil {
		t.Fatal(err)
	}
	impl.Allocator, s.impl = s.alloc, impl
	srv, err := rpc.NewServer(ro)
	if err != nil {
		t.Fatal(err)
	}
	l, err := rpc.Listen(s.socket, rpc.ListenOptions{Mode: 0o666})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { s.alloc.Run(ctx) })                  //nolint:errcheck // nil
	wg.Go(func() { s.reg.Run(ctx, s.alloc.Connected) }) //nolint:errcheck // nil
	wg.Go(func() {
		if err := srv.Serve(l); err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	conn, err := client.Dial(s.socket, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	s.IdentityServiceClient = identityv1.NewIdentityServiceClient(reasontest.Record(conn))
	s.cluster = identityv1.NewClusterServiceClient(reasontest.Record(conn))
	s.shares = sharesv1.NewSharesServiceClient(conn)
	t.Cleanup(func() {
		conn.Close()
		srv.Stop()
		cancel()
		wg.Wait()
	})
	servicetest.Eventually(t, "the session", func() bool { return s.alloc.Summary().Connected })
	return s
}

func owner(container string) *workloadv1.Owner {
	return &workloadv1.Owner{ContainerId: container, InterfaceName: "eth0"}
}

func newLabel(source, key, value string) *workloadv1.Label {
	return &workloadv1.Label{Source: source, Key: key, Value: value}
}

func (s *service) resolve(container string, labels ...*workloadv1.Label) *identityv1.Identity {
	s.t.Helper()
	resp, err := s.ResolveEndpoint(s.t.Context(), &identityv1.ResolveEndpointRequest{
		Owner:  owner(container),
		Labels: labels,
	})
	if err != nil {
		s.t.Fatalf("resolve %s: %v", container, err)
	}
	return resp.GetIdentity()
}

// TestGetIdentityDescribesTheEndpointsThatHoldIt, with the descriptions that ResolveEndpoint received.
func TestGetIdentityDescribesTheEndpointsThatHoldIt(t *testing.T) {
	s := serve(t)
	req := &identityv1.ResolveEndpointRequest{
		Owner: owner("c1"), Labels: []*workloadv1.Label{newLabel("k8s", "app", "web")}, Manager: "cni", Network: "sluice",
		Pod:       &workloadv1.PodReference{Namespace: "prod", Name: "web-0", Uid: "u1"},
		Addresses: []string{"10.0.0.2", "fd00::2"},
	}
	resp, err := s.ResolveEndpoint(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	s.resolve("c2", newLabel("k8s", "app", "web")) // by a caller that does not describe its workload
	got, err := s.GetIdentity(t.Context(), &identityv1.GetIdentityRequest{Number: resp.GetIdentity().GetNumber()})
	if err != nil {
		t.Fatal(err)
	}
	want := &identityv1.HoldingEndpoint{Owner: req.GetOwner(), Manager: "cni", Network: "sluice", Pod: req.GetPod(), Addresses: req.GetAddresses()}
	other := &identityv1.HoldingEndpoint{Owner: owner("c2")}
	if all := got.GetEndpoints(); len(got.GetReferences()) != 0 || len(all) != 2 ||
		!proto.Equal(all[0], want) || !proto.Equal(all[1], other) {
		t.Errorf("got %v, want %v and %v", got, want, other)
	}
	for _, text := range []string{"10.0.0", "fd00::2%eth0", "::ffff:10.0.0.2", ""} {
		req.Addresses = []string{text}
		if _, err := s.ResolveEndpoint(t.Context(), req); status.Code(err) != codes.InvalidArgument {
			t.Errorf("address %q: %v, want INVALID_ARGUMENT", text, err)
		}
	}
}

func TestValidateOnlyHoldsNothing(t *testing.T) {
	s := serve(t)
	web := []*workloadv1.Label{newLabel("k8s", "app", "web")}
	allocate := func(scope identityv1.Scope, validateOnly bool) *identityv1.Identity {
		t.Helper()
		resp, err := s.AllocateIdentity(t.Context(), &identityv1.AllocateIdentityRequest{
			Reference: "r" + scope.String(), Labels: web, Scope: scope, ValidateOnly: validateOnly,
		})
		if err != nil {
			t.Fatal(err)
		}
		return resp.GetIdentity()
	}
	resolve := func(labels ...*workloadv1.Label) (*identityv1.Identity, error) {
		resp, err := s.ResolveEndpoint(t.Context(), &identityv1.ResolveEndpointRequest{
			Owner: owner("c1"), Labels: labels, ValidateOnly: true,
		})
		return resp.GetIdentity(), err
	}
	for _, scope := range []identityv1.Scope{identityv1.Scope_SCOPE_CLUSTER, identityv1.Scope_SCOPE_NODE_LOCAL} {
		if id := allocate(scope, true); id.GetNumber() != 0 || !proto.Equal(id.GetLabels()[0], web[0]) {
			t.Errorf("%s: %v before anybody held it, want no number and its labels", scope, id)
		}
		if held := allocate(scope, false); allocate(scope, true).GetNumber() != held.GetNumber() {
			t.Errorf("%s: another number than %d", scope, held.GetNumber())
		}
	}
	if id, err := resolve(web...); err != nil || id.GetNumber() < 256 {
		t.Errorf("resolved %v, %v, want the number of the set", id, err)
	}
	if _, err := resolve(newLabel("reserved", "host", "")); status.Code(err) != codes.InvalidArgument {
		t.Errorf("reserved label: %v, want INVALID_ARGUMENT", err)
	}
	if _, err := resolve(newLabel("k8s", "app", "new")); err != nil {
		t.Error(err)
	}
	st, err := s.GetStatus(t.Context(), &identityv1.GetStatusRequest{})
	if err != nil || st.GetHeldIdentities() != 1 {
		t.Errorf("%d identities are held, %v, want the cluster's", st.GetHeldIdentities(), err)
	}
	n, err := s.ReleaseIdentity(t.Context(), &identityv1.ReleaseIdentityRequest{
		Holder: &identityv1.ReleaseIdentityRequest_Owner{Owner: owner("c1")},
	})
	if err != nil || n.GetReleasedNumber() != 0 {
		t.Errorf("the owner held %v, %v, want nothing", n, err)
	}
}

func TestResolveFiltersSortsAndAddsPorts(t *testing.T) {
	s := serve(t)
	resp, err := s.ResolveEndpoint(t.Context(), &identityv1.ResolveEndpointRequest{
		Owner: owner("c1"),
		Labels: []*workloadv1.Label{
			newLabel("k8s", "pod-template-hash", "5d"), newLabel("k8s", "app", "web"),
			newLabel("cni", "zone", "a"),
		},
		NamedPorts: []*workloadv1.NamedPort{{Name: "http", Port: 80, Protocol: netv1.Protocol_PROTOCOL_TCP}},
	})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, l := range resp.GetIdentity().GetLabels() {
		got = append(got, l.GetSource()+":"+l.GetKey()+"="+l.GetValue())
	}
	want := []string{"cni:zone=a", "generated:named-ports=http.TCP.80", "k8s:app=web"}
	if !slices.Equal(got, want) || resp.GetIdentity().GetScope() != identityv1.Scope_SCOPE_CLUSTER {
		t.Errorf("identity %v, want the labels %v", resp.GetIdentity(), want)
	}
	plain := s.resolve("c2", newLabel("k8s", "app", "web"), newLabel("cni", "zone", "a"))
	if plain.GetNumber() == resp.GetIdentity().GetNumber() {
		t.Error("other ports, same number")
	}
	none := s.resolve("c3")
	if none.GetNumber() < 256 || len(none.GetLabels()) != 1 || none.GetLabels()[0].GetKey() != "no-labels" {
		t.Errorf("without labels: %v, want an ordinary number with the hidden label", none)
	}
}

func TestLifeOfAReference(t *testing.T) {
	s := serve(t)
	alloc := func(scope identityv1.Scope) *identityv1.Identity {
		t.Helper()
		resp, err := s.AllocateIdentity(t.Context(), &identityv1.AllocateIdentityRequest{
			Reference: "ref-" + scope.String(), Labels: []*workloadv1.Label{newLabel("cni", "app", "web")}, Scope: scope,
		})
		if err != nil {
			t.Fatal(err)
		}
		return resp.GetIdentity()
	}
	cluster, local := alloc(identityv1.Scope_SCOPE_CLUSTER), alloc(identityv1.Scope_SCOPE_NODE_LOCAL)
	if cluster.GetScope() != identityv1.Scope_SCOPE_CLUSTER || local.GetScope() != identityv1.Scope_SCOPE_NODE_LOCAL ||
		local.GetNumber() != 0xFF0000 {
		t.Errorf("identities %v and %v", cluster, local)
	}
	if same := alloc(identityv1.Scope_SCOPE_UNSPECIFIED); same.GetNumber() != cluster.GetNumber() {
		t.Errorf("unspecified scope gives %v, want %v", same, cluster)
	}
	got, err := s.GetIdentity(t.Context(), &identityv1.GetIdentityRequest{Number: cluster.GetNumber()})
	if err != nil || !slices.Equal(got.GetReferences(), []string{
		"ref-SCOPE_CLUSTER",
		"ref-SCOPE_UNSPECIFIED",
	}) {
		t.Errorf("get: %v, %v", got, err)
	}
	for _, want := range []uint32{local.GetNumber(), 0} {
		resp, err := s.ReleaseIdentity(t.Context(),
			&identityv1.ReleaseIdentityRequest{Holder: &identityv1.ReleaseIdentityRequest_Reference{Reference: "ref-SCOPE_NODE_LOCAL"}})
		if err != nil || resp.GetReleasedNumber() != want {
			t.Errorf("release: %v, %v, want %d", resp, err, want)
		}
	}
}

func TestListIsSortedAndFiltered(t *testing.T) {
	s := serve(t)
	web := s.resolve("c1", newLabel("cni", "app", "web"))
	s.resolve("c2", newLabel("cni", "app", "web"))
	list := func(scopes ...identityv1.Scope) (numbers, counts []uint32) {
		t.Helper()
		stream, err := s.ListIdentities(t.Context(), &identityv1.ListIdentitiesRequest{Scopes: scopes})
		if err != nil {
			t.Fatal(err)
		}
		for {
			m, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return numbers, counts
			}
			if err != nil {
				t.Fatal(err)
			}
			numbers, counts = append(numbers, m.GetIdentity().GetNumber()), append(counts, m.GetReferenceCount())
		}
	}
	all, _ := list()
	if want := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 255, web.GetNumber()}; !slices.Equal(all, want) {
		t.Errorf("list %v, want %v", all, want)
	}
	if cluster, counts := list(identityv1.Scope_SCOPE_CLUSTER); !slices.Equal(cluster, []uint32{web.GetNumber()}) ||
		counts[0] != 2 {
		t.Errorf("cluster list %v %v, want %d with 2 references", cluster, counts, web.GetNumber())
	}
}

func TestWatchResumesAfterTheToken(t *testing.T) {
	s := serve(t)
	web := s.resolve("c1", newLabel("cni", "app", "web"))
	next := func(w grpc.ServerStreamingClient[identityv1.WatchIdentitiesResponse]) *identityv1.WatchIdentitiesResponse {
		t.Helper()
		m, err := w.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w, err := s.WatchIdentities(ctx, &identityv1.WatchIdentitiesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var numbers []uint32
	var token []byte
	var store *identityv1.StoreRevision
	for token == nil {
		m := next(w)
		if complete := m.GetBookmark().GetSnapshotComplete(); (m.GetRevision() != 0) != complete ||
			(m.GetStoreRevision() != nil) != complete || len(m.GetIncarnation()) != 8 {
			t.Errorf("revision %d of %x, and the snapshot is complete: %t", m.GetRevision(), m.GetIncarnation(), complete)
		}
		if u := m.GetUpsert(); u != nil {
			numbers = append(numbers, u.GetNumber())
		}
		if m.GetBookmark().GetSnapshotComplete() {
			token, store = m.GetResumeToken(), m.GetStoreRevision()
		}
	}
	if len(numbers) != 12 || !slices.Contains(numbers, web.GetNumber()) {
		t.Errorf("listing %v, want the reserved ones and %d", numbers, web.GetNumber())
	}
	cancel()
	db := s.resolve("c2", newLabel("cni", "app", "db"))
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	if w, err = s.WatchIdentities(ctx, &identityv1.WatchIdentitiesRequest{ResumeToken: token}); err != nil {
		t.Fatal(err)
	}
	m := next(w)
	if len(m.GetIncarnation()) != 8 || m.GetRevision() != s.hub.Revision() {
		t.Errorf("the change is at revision %d of %x, want %d, the last", m.GetRevision(), m.GetIncarnation(),
			s.hub.Revision())
	}
	if m.GetUpsert().GetNumber() != db.GetNumber() || len(m.GetResumeToken()) == 0 {
		t.Errorf("first after the token: %v, want %d", m, db.GetNumber())
	}
	for m.GetStoreRevision().GetRevision() <= store.GetRevision() { // the identity is a change of the store
		m = next(w)
	}
	if id := m.GetStoreRevision().GetClusterId(); id != store.GetClusterId() || id == 0 {
		t.Errorf("revision of store %x, and before of %x", id, store.GetClusterId())
	}
	if w, err = s.WatchIdentities(t.Context(),
		&identityv1.WatchIdentitiesRequest{ResumeToken: []byte("of another run")}); err == nil {
		_, err = w.Recv()
	}
	if status.Code(err) != codes.OutOfRange {
		t.Errorf("foreign token: %v, want OUT_OF_RANGE", err)
	}
}

// TestWatchEndpointsTellsEveryMoveAndRelease: WatchEndpoints reports every move and release of an owner, including
// moves by ResolveEndpoint.
func TestWatchEndpointsTellsEveryMoveAndRelease(t *testing.T) {
	s := serve(t)
	first, err := s.ResolveEndpoint(t.Context(), &identityv1.ResolveEndpointRequest{
		Owner: owner("c1"), Labels: []*workloadv1.Label{newLabel("cni", "app", "web")},
		NamedPorts: []*workloadv1.NamedPort{{Name: "http", Port: 80, Protocol: 6}},
		Pod:        &workloadv1.PodReference{Namespace: "prod", Name: "web-0", Uid: "u1"},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.AllocateIdentity(t.Context(), &identityv1.AllocateIdentityRequest{
		Reference: "r", Labels: []*workloadv1.Label{newLabel("cni", "app", "web")},
	}); err != nil {
		t.Fatal(err)
	}
	w, err := s.WatchEndpoints(t.Context(), &identityv1.WatchEndpointsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	next := func() *identityv1.WatchEndpointsResponse {
		t.Helper()
		m, err := w.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	u := next().GetUpsert()
	if u.GetOwner().GetContainerId() != "c1" || u.GetIdentity().GetNumber() != first.GetIdentity().GetNumber() ||
		u.GetPod().GetUid() != "u1" || len(u.GetNamedPorts()) != 1 || u.GetNamedPorts()[0].GetName() != "http" ||
		len(first.GetNamedPorts()) != 1 || u.GetConfirm() {
		t.Errorf("listing begins with %v, want c1 with %v", u, first)
	}
	if m := next(); !m.GetBookmark().GetSnapshotComplete() {
		t.Errorf("after the only endpoint comes %v, want that it was everything", m)
	}
	db := s.resolve("c1", newLabel("cni", "app", "db"))
	if u := next().GetUpsert(); u.GetIdentity().GetNumber() != db.GetNumber() || u.GetConfirm() ||
		len(u.GetNamedPorts()) != 0 {
		t.Errorf("after the move comes %v, want %d, without a pending confirmation", u, db.GetNumber())
	}
	other, err := label.Canonicalize(label.Kubernetes("app", "new"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.alloc.Relabel(t.Context(), allocator.EndpointHolder("c1", "eth0"), other); err != nil {
		t.Fatal(err)
	}
	u = next().GetUpsert()
	if u.GetIdentity().GetNumber() == db.GetNumber() || !u.GetConfirm() {
		t.Errorf("after new labels comes %v, want another number than %d to confirm", u, db.GetNumber())
	}
	if _, err := s.ConfirmEndpoint(t.Context(), &identityv1.ConfirmEndpointRequest{
		Owner: owner("c1"), Number: u.GetIdentity().GetNumber(),
	}); err != nil {
		t.Fatal(err)
	}
	number := u.GetIdentity().GetNumber()
	if again := next().GetUpsert(); again.GetIdentity().GetNumber() != number || again.GetConfirm() {
		t.Errorf("after the confirmation comes %v, want %d, without a pending confirmation", again, number)
	}
	if _, err := s.ReleaseIdentity(t.Context(), &identityv1.ReleaseIdentityRequest{
		Holder: &identityv1.ReleaseIdentityRequest_Owner{Owner: owner("c1")},
	}); err != nil {
		t.Fatal(err)
	}
	if m := next(); m.GetDelete().GetContainerId() != "c1" || m.GetDelete().GetInterfaceName() != "eth0" {
		t.Errorf("after the release comes %v", m)
	}
}

// followNothing follows an API that does not answer, and returns when that is known.
func followNothing(t *testing.T, set *pods.Set) {
	t.Helper()
	gone := httptest.NewTLSServer(nil)
	gone.Close()
	dir := t.TempDir()
	settings := kube.Settings{
		API: []string{gone.URL}, Token: filepath.Join(dir, "token"), CA: filepath.Join(dir, "ca.crt"),
	}
	certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: gone.Certificate().Raw})
	if err := errors.Join(os.WriteFile(settings.Token, []byte("t"), 0o600), os.WriteFile(settings.CA, certificate, 0o600)); err != nil {
		t.Fatal(err)
	}
	client, err := kube.New(settings, kube.Options{Name: "test", StateFile: filepath.Join(dir, "state"), Log: log.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- set.Follow(ctx, client, log.Discard()) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	servicetest.Eventually(t, "the failure of both kinds", func() bool {
		err := set.Problem()
		return strings.Count(err.Error(), "connection refused") == 2
	})
}

// TestPodReferenceOverridesTheLabelsOfTheRequest: if a Kubernetes API is configured, labels come from the pod and not
// from the request. If the service already has an endpoint of the pod, it does not need the API.
func TestPodReferenceOverridesTheLabelsOfTheRequest(t *testing.T) {
	s := serve(t)
	req := &identityv1.ResolveEndpointRequest{
		Owner: owner("c1"), Labels: []*workloadv1.Label{newLabel("k8s", "app", "mine")},
		Pod: &workloadv1.PodReference{Namespace: "prod", Name: "web-0", Uid: "u1"},
	}
	own, err := s.ResolveEndpoint(t.Context(), req)
	if err != nil || own.GetFromPod() {
		t.Fatalf("without Kubernetes: %v, %v", own, err)
	}
	if own.GetTenant() != nil {
		t.Errorf("without Kubernetes, the tenant is %v", own.GetTenant())
	}
	s.impl.Pods = pods.New("n1", "here", s.impl.Filter)
	s.impl.Relabeler = pods.NewRelabeler(s.impl.Pods, s.alloc, s.impl.Endpoints, log.Discard())
	short, cancel := context.WithTimeout(t.Context(), pods.Margin+10*time.Millisecond)
	defer cancel()
	req.Owner, req.Pod.Uid = owner("c2"), "u2"
	if _, err := s.ResolveEndpoint(short, req); status.Code(err) != codes.Unavailable {
		t.Errorf("a pod that is not known: %v, want UNAVAILABLE", err)
	}
	followNothing(t, s.impl.Pods)
	short, cancel = context.WithTimeout(t.Context(), pods.Margin+10*time.Millisecond)
	defer cancel()
	_, err = s.ResolveEndpoint(short, req)
	reason, _ := rpcerr.ReasonIn(err)
	if reason != rpcerr.Of(identityv1.ErrorReason_ERROR_REASON_KUBERNETES_UNAVAILABLE) {
		t.Errorf("a pod that is not known, without API: %v", err)
	}
	req.Pod.Uid = "u1"
	again, err := s.ResolveEndpoint(t.Context(), req)
	if err != nil || !again.GetFromPod() || again.GetIdentity().GetNumber() != own.GetIdentity().GetNumber() {
		t.Errorf("another endpoint of the pod, without API: %v, %v; want %v", again, err, own.GetIdentity())
	}
	if x := again.GetTenant(); x.GetKind() != sharesv1.TenantKind_TENANT_KIND_NAMESPACE || x.GetName() != "prod" {
		t.Errorf("the tenant of a pod in a namespace without the label is %v", x)
	}
	req.Pod.Uid = ""
	req.Labels[0].Value = "other"
	named, err := s.ResolveEndpoint(t.Context(), req)
	if err != nil || named.GetFromPod() || named.GetIdentity().GetLabels()[0].GetValue() != "other" {
		t.Errorf("a reference without UID: %v, %v", named, err)
	}
	st, err := s.GetStatus(t.Context(), &identityv1.GetStatusRequest{})
	if problems := st.GetService().GetProblems(); err != nil || len(problems) != 1 ||
		!strings.Contains(problems[0].GetText(), "connection refused") {
		t.Errorf("status %v, %v; want why Kubernetes says nothing", st, err)
	}
}

func TestStatusTellsWhatIsWrong(t *testing.T) {
	s := serve(t)
	s.resolve("c1", newLabel("cni", "app", "web"))
	s.resolve("c2", newLabel("cni", "app", "db"))
	get := func() *identityv1.GetStatusResponse {
		t.Helper()
		st, err := s.GetStatus(t.Context(), &identityv1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return st
	}
	st := get()
	if !st.GetStoreConnected() || st.GetStoreError() != "" || st.GetHeldIdentities() != 2 ||
		st.GetClusterIdentities() != 2 || st.GetStoreRevision().GetRevision() == 0 ||
		st.GetNodeName() != "n1" || st.GetService().GetVersion() != "test" {
		t.Errorf("status %v", st)
	}
	if k := st.GetTopLabelKeys(); len(k) != 1 || k[0].GetKey() != "cni:app" || k[0].GetDistinctValues() != 2 {
		t.Errorf("top label keys %v", k)
	}
	s.fake.Down()
	servicetest.Eventually(t, "the loss", func() bool { return !s.alloc.Summary().Connected })
	if st := get(); st.GetStoreConnected() || st.GetStoreError() == "" {
		t.Errorf("status without store: %v", st)
	}
}

func TestEveryFailureHasItsCode(t *testing.T) {
	s := serve(t)
	web := []*workloadv1.Label{newLabel("cni", "app", "web")}
	allocate := func(ref string, labels ...*workloadv1.Label) error {
		_, err := s.AllocateIdentity(t.Context(), &identityv1.AllocateIdentityRequest{Reference: ref, Labels: labels})
		return err
	}
	resolve := func(req *identityv1.ResolveEndpointRequest) error {
		_, err := s.ResolveEndpoint(t.Context(), req)
		return err
	}
	s.resolve("c1", web...)
	many := make([]*workloadv1.Label, 300)
	for i := range many {
		many[i] = newLabel("k8s", fmt.Sprint("key", i), "v")
	}
	ports := make([]*workloadv1.NamedPort, 200)
	for i := range ports {
		name := fmt.Sprintf("port-of-the-%03d", i)
		ports[i] = &workloadv1.NamedPort{Name: name, Port: uint32(10_000 + i), Protocol: netv1.Protocol_PROTOCOL_SCTP}
	}
	for _, c := range []struct {
		name  string
		err   error
		code  codes.Code
		words string
	}{
		{"no owner", resolve(&identityv1.ResolveEndpointRequest{}), codes.InvalidArgument, "owner"},
		{"bad owner", resolve(&identityv1.ResolveEndpointRequest{Owner: owner("-x")}), codes.InvalidArgument, "container_id"},
		{"reserved source", resolve(&identityv1.ResolveEndpointRequest{
			Owner:  owner("c9"),
			Labels: []*workloadv1.Label{web[0], newLabel("reserved", "host", "")},
		}), codes.InvalidArgument, "labels[1].source"},
		{"generated source", resolve(&identityv1.ResolveEndpointRequest{
			Owner:  owner("c9"),
			Labels: []*workloadv1.Label{newLabel("generated", "named-ports", "x")},
		}), codes.InvalidArgument, "labels[0].source"},
		{
			"two values", allocate("r", newLabel("k8s", "a", "1"), newLabel("k8s", "a", "2")), codes.InvalidArgument,
			"labels[1].key",
		},
		{"control character", allocate("r", newLabel("k8s", "a", "\x01")), codes.InvalidArgument, "labels[0].value"},
		{
			"too many", resolve(&identityv1.ResolveEndpointRequest{Owner: owner("c9"), Labels: many}), codes.InvalidArgument,
			"300",
		},
		{
			"no port", resolve(&identityv1.ResolveEndpointRequest{
				Owner:      owner("c9"),
				NamedPorts: []*workloadv1.NamedPort{{Name: "http", Protocol: netv1.Protocol_PROTOCOL_TCP}},
			}),
			codes.InvalidArgument, "port",
		},
		{"names of ports that are too long together", resolve(&identityv1.ResolveEndpointRequest{
			Owner: owner("c9"), NamedPorts: ports,
		}), codes.InvalidArgument, "bytes together"},
		{"no labels", allocate("r"), codes.InvalidArgument, "labels"},
		{"no reference", allocate("", web...), codes.InvalidArgument, "reference"},
		{"reserved scope", func() error {
			_, err := s.AllocateIdentity(t.Context(), &identityv1.AllocateIdentityRequest{
				Reference: "r", Labels: web,
				Scope: identityv1.Scope_SCOPE_RESERVED,
			})
			return err
		}(), codes.InvalidArgument, "scope"},
		{"no holder", func() error {
			_, err := s.ReleaseIdentity(t.Context(), &identityv1.ReleaseIdentityRequest{})
			return err
		}(), codes.InvalidArgument, "holder"},
		{"unknown number", func() error {
			_, err := s.GetIdentity(t.Context(), &identityv1.GetIdentityRequest{Number: 65_000})
			return err
		}(), codes.NotFound, "65000"},
		{"number of no scope", func() error {
			_, err := s.GetIdentity(t.Context(), &identityv1.GetIdentityRequest{Number: 100_000})
			return err
		}(), codes.NotFound, "100000"},
		{"other set", func() error {
			if err := allocate("r1", web...); err != nil {
				return err
			}
			return allocate("r1", newLabel("cni", "app", "db"))
		}(), codes.AlreadyExists, "reference:r1"},
	} {
		if status.Code(c.err) != c.code || !strings.Contains(c.err.Error(), c.words) {
			t.Errorf("%s: %v, want %s with %q", c.name, c.err, c.code, c.words)
		}
	}
	s.resolve("q1", newLabel("cni", "app", "q1"))
	s.resolve("q2", newLabel("cni", "app", "q2"))
	err := allocate("q3", newLabel("cni", "app", "q3"))
	if status.Code(err) != codes.ResourceExhausted || detail[*errdetails.QuotaFailure](err) == nil ||
		!strings.Contains(err.Error(), "cni:app (3)") {
		t.Errorf("over quota: %v, want RESOURCE_EXHAUSTED that names cni:app", err)
	}
	if _, err := s.ReleaseIdentity(t.Context(),
		&identityv1.ReleaseIdentityRequest{Holder: &identityv1.ReleaseIdentityRequest_Owner{Owner: owner("q1")}}); err != nil {
		t.Fatal(err)
	}
	s.fake.Down()
	servicetest.Eventually(t, "the loss", func() bool { return !s.alloc.Summary().Connected })
	err = allocate("q3", newLabel("cni", "app", "q3"))
	if status.Code(err) != codes.Unavailable || detail[*errdetails.RetryInfo](err) == nil ||
		!strings.Contains(err.Error(), "fake://cluster") {
		t.Errorf("new set without store: %v, want UNAVAILABLE that names the endpoints", err)
	}
}

// claims is a store whose claims fail with an error while it has one.
type claims struct {
	allocator.Store

	err atomic.Pointer[error]
}

func (c *claims) Claim(
	ctx context.Context, l label.Canonical, known, candidate identity.Numeric,
) (allocator.Claim, error) {
	if err := c.err.Load(); err != nil {
		return allocator.Claim{}, *err
	}
	return c.Store.Claim(ctx, l, known, candidate)
}

// TestWhyAClaimFailsReachesTheCaller: the error of the store is returned although the allocator wraps it in its own
// error.
func TestWhyAClaimFailsReachesTheCaller(t *testing.T) {
	of := errors.New("of etcd")
	for name, c := range map[string]struct {
		err    error
		code   codes.Code
		reason identityv1.ErrorReason
	}{
		"every number is taken meanwhile": {
			allocator.ErrOccupied, codes.Aborted, identityv1.ErrorReason_ERROR_REASON_CONTENDED,
		},
		"a full store": {
			fmt.Errorf("claim: %w: %w", cluster.ErrNoSpace, of), codes.Unavailable,
			identityv1.ErrorReason_ERROR_REASON_STORE_FULL,
		},
		"another node with the name": {
			&cluster.NameError{Node: "n1", Incarnation: "j", Boot: "b", Wait: time.Minute}, codes.Unavailable,
			identityv1.ErrorReason_ERROR_REASON_NODE_NAME_TAKEN,
		},
		"a key that is corrupt": {
			fmt.Errorf("/id/7: %w: %w", allocator.ErrCorrupt, of), codes.Internal,
			identityv1.ErrorReason_ERROR_REASON_STORE_CORRUPT,
		},
		"a session that ends each time": {
			fmt.Errorf("claim: %w: %w", cluster.ErrSessionLost, of), codes.Unavailable,
			identityv1.ErrorReason_ERROR_REASON_SESSION_LOST,
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t)
			s.claims.err.Store(&c.err)
			_, err := s.AllocateIdentity(t.Context(), &identityv1.AllocateIdentityRequest{
				Reference: "r", Labels: []*workloadv1.Label{newLabel("cni", "app", "web")},
			})
			if status.Code(err) != c.code || !rpcerr.Is(err, c.reason) {
				t.Errorf("%v, want %s %s", err, c.code, c.reason)
			}
			s.claims.err.Store(nil)
		})
	}
}

func detail[T any](err error) any {
	for _, d := range status.Convert(err).Details() {
		if _, ok := d.(T); ok {
			return d
		}
	}
	return nil
}

// TestEverySentinelHasItsCodeAndReason: statusOf converts every error of the core as documented in the API, and each
// reason of the API occurs.
func TestEverySentinelHasItsCodeAndReason(t *testing.T) {
	given := map[identityv1.ErrorReason]bool{0: true}
	for _, c := range []struct {
		err    error
		code   codes.Code
		reason identityv1.ErrorReason // unspecified: the answer has no reason
	}{
		{label.ErrInvalid, codes.InvalidArgument, identityv1.ErrorReason_ERROR_REASON_INVALID_LABEL},
		{&label.Error{Index: 1}, codes.InvalidArgument, identityv1.ErrorReason_ERROR_REASON_INVALID_LABEL},
		{workload.ErrNamedPort, codes.InvalidArgument, identityv1.ErrorReason_ERROR_REASON_INVALID_NAMED_PORT},
		{allocator.ErrHolder, codes.InvalidArgument, identityv1.ErrorReason_ERROR_REASON_INVALID_REFERENCE},
		{
			&allocator.QuotaError{Kind: allocator.ErrQuota}, codes.ResourceExhausted,
			identityv1.ErrorReason_ERROR_REASON_QUOTA_EXHAUSTED,
		},
		{
			&allocator.QuotaError{Kind: allocator.ErrExhausted}, codes.ResourceExhausted,
			identityv1.ErrorReason_ERROR_REASON_NUMBERS_EXHAUSTED,
		},
		{allocator.ErrHeldOther, codes.AlreadyExists, identityv1.ErrorReason_ERROR_REASON_REFERENCE_HAS_OTHER_LABELS},
		{allocator.ErrNotFound, codes.NotFound, identityv1.ErrorReason_ERROR_REASON_IDENTITY_NOT_FOUND},
		{allocator.ErrContended, codes.Aborted, identityv1.ErrorReason_ERROR_REASON_CONTENDED},
		{allocator.ErrUnavailable, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_STORE_UNAVAILABLE},
		{&allocator.StoreError{}, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_STORE_UNAVAILABLE},
		{&allocator.StaleError{}, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_STORE_UNAVAILABLE},
		{&allocator.StoreError{Err: allocator.ErrNoSpace}, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_STORE_FULL},
		{
			&allocator.StoreError{Err: &cluster.NameError{}}, codes.Unavailable,
			identityv1.ErrorReason_ERROR_REASON_NODE_NAME_TAKEN,
		},
		{allocator.ErrSessionLost, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_SESSION_LOST},
		{allocator.ErrRecords, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_STORAGE_FAILED},
		{registry.ErrRecords, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_STORAGE_FAILED},
		{registry.ErrUnlisted, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_STORE_UNAVAILABLE},
		{registry.ErrNoNode, codes.NotFound, identityv1.ErrorReason_ERROR_REASON_NODE_NOT_FOUND},
		{registry.ErrAlive, codes.FailedPrecondition, identityv1.ErrorReason_ERROR_REASON_NODE_ALIVE},
		{registry.ErrIPAMDiffers, codes.FailedPrecondition, identityv1.ErrorReason_ERROR_REASON_IPAM_SETTINGS_DIFFER},
		{&registry.FullError{}, codes.ResourceExhausted, identityv1.ErrorReason_ERROR_REASON_NO_FREE_RANGE},
		{registry.ErrResting, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_ADDRESS_RESTING},
		{registry.ErrMaxRanges, codes.ResourceExhausted, identityv1.ErrorReason_ERROR_REASON_NO_FREE_RANGE},
		{registry.ErrLastRange, codes.FailedPrecondition, identityv1.ErrorReason_ERROR_REASON_LAST_RANGE},
		{registry.ErrNoMapping, codes.NotFound, identityv1.ErrorReason_ERROR_REASON_ADDRESS_UNKNOWN},
		{allocator.ErrCorrupt, codes.Internal, identityv1.ErrorReason_ERROR_REASON_STORE_CORRUPT},
		{pods.ErrNotFound, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_POD_NOT_FOUND},
		{pods.ErrUnavailable, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_KUBERNETES_UNAVAILABLE},
		{context.Canceled, codes.Canceled, 0},
		{context.DeadlineExceeded, codes.DeadlineExceeded, 0},
		{errors.New("unforeseen"), codes.Internal, identityv1.ErrorReason_ERROR_REASON_INTERNAL},
	} {
		given[c.reason] = true
		got := statusOf(fmt.Errorf("outer: %w", c.err))
		if reason, has := rpcerr.ReasonIn(got); status.Code(got) != c.code || has != (c.reason != 0) || has &&
			reason != rpcerr.Of(c.reason) {
			t.Errorf("%v is answered with %s, %v; want %s, %v", c.err, status.Code(got), reason, c.code, c.reason)
		}
	}
	for number, name := range identityv1.ErrorReason_name {
		if !given[identityv1.ErrorReason(number)] {
			t.Errorf("%s is promised and never given", name)
		}
	}
	if statusOf(nil) != nil {
		t.Error("no error has a status")
	}
}

// collector returns the service's metrics, of a store that was listed once.
func (s *service) collector() Collector {
	return Collector{Allocator: s.alloc, Registry: s.reg, Listings: func() uint64 { return 1 }}
}

func TestMetricsHaveTheConventionsNames(t *testing.T) {
	s := serve(t)
	s.resolve("c1", newLabel("cni", "app", "web"))
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(s.collector()); err != nil {
		t.Fatal(err)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		m := f.GetMetric()[0]
		got[f.GetName()] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		if strings.HasSuffix(f.GetName(), "_total") != (m.GetCounter() != nil) {
			t.Errorf("%s: the name does not fit its kind", f.GetName())
		}
	}
	for name, want := range map[string]float64{
		"sluice_identity_cluster_identities": 1, "sluice_identity_held_identities": 1, "sluice_identity_store_connected": 1,
		"sluice_identity_allocated_identities_total": 1, "sluice_identity_conflicts_total": 0,
		"sluice_identity_pending_store_writes": 0,
	} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s is %v (there: %t), want %v", name, v, ok, want)
		}
	}
}

func TestMetricsAreThoseOfTheDocumentation(t *testing.T) {
	doc, err := os.ReadFile("../../../../docs/reference/identity.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]bool{}
	for _, m := range regexp.MustCompile("`(sluice_identity_[a-z_]+)`").FindAllStringSubmatch(string(doc), -1) {
		documented[m[1]] = true
	}
	ch := make(chan *prometheus.Desc)
	go func() {
		defer close(ch)
		Collector{}.Describe(ch)
	}()
	for d := range ch {
		name := regexp.MustCompile(`sluice_identity_[a-z_]+`).FindString(d.String())
		if !documented[name] {
			t.Errorf("%s is not in docs/reference/identity.md", name)
		}
		delete(documented, name)
	}
	for name := range documented {
		t.Errorf("docs/reference/identity.md has %s, the service does not", name)
	}
}

func TestTheOwnersTimeIsCountedByOperation(t *testing.T) {
	s := serve(t)
	counts := func() map[string]uint64 {
		r := prometheus.NewPedanticRegistry()
		if err := r.Register(s.collector()); err != nil {
			t.Fatal(err)
		}
		families, err := r.Gather()
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]uint64{}
		for _, f := range families {
			for _, m := range f.GetMetric() {
				if f.GetName() == "sluice_identity_owner_busy_seconds" {
					out[m.GetLabel()[0].GetValue()] = m.GetHistogram().GetSampleCount()
				}
			}
		}
		return out
	}
	before := counts()
	s.resolve("c1", newLabel("cni", "app", "web"))
	after := counts()
	for _, operation := range []string{"hold", "choose a number", "take over an update", "copy for the disk", "read"} {
		if after[operation] <= before[operation] {
			t.Errorf("%q was counted %d times before and %d after an identity was resolved", operation, before[operation],
				after[operation])
		}
	}
	for _, b := range s.alloc.Busy() {
		if b.Longest > b.Sum || b.Sum <= 0 || b.Count == 0 {
			t.Errorf("got %+v", b)
		}
	}
}

func TestSharesAreThoseOfTheNamespaces(t *testing.T) {
	s := serve(t)
	for i, namespace := range []string{"shop", "shop", "bank"} {
		s.resolve(fmt.Sprint("c", i), newLabel("k8s", label.KeyNamespace, namespace), newLabel("k8s", "app", fmt.Sprint(i)))
	}
	for tenant, want := range map[string]map[string]uint64{
		"": {"shop": 2, "bank": 1}, "bank": {"bank": 1}, "none": {},
	} {
		stream, err := s.shares.ListShares(t.Context(), &sharesv1.ListSharesRequest{Tenant: tenant})
		if err != nil {
			t.Fatal(err)
		}
		m, err := stream.Recv()
		if l := m.GetLimit(); err != nil || l.GetName() != "numbers" || l.GetSize() != 65_280 || l.GetUsed() != 3 {
			t.Fatalf("tenant %q: %v, %v", tenant, m, err)
		}
		got := map[string]uint64{}
		for _, share := range m.GetTenants() {
			got[share.GetName()] = share.GetAdmitted()
		}
		if !maps.Equal(got, want) {
			t.Errorf("tenant %q: %v, want %v", tenant, got, want)
		}
	}
}
