// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	rpcclient "github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/shares"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/dns/internal/exchange"
	"github.com/sluice-net/sluice/services/dns/internal/names"
	"github.com/sluice-net/sluice/services/dns/internal/pods"
	"github.com/sluice-net/sluice/services/dns/internal/rules"
)

// node simulates the services that this package calls.
type node struct {
	policyv1.UnimplementedPolicyServiceServer
	identityv1.UnimplementedClusterServiceServer
	err     error
	learned *policyv1.LearnNamesRequest
	forgot  *policyv1.ForgetNamesRequest
	mapping *identityv1.GetIPMappingResponse
	streams chan []*policyv1.WatchRuleSetsResponse // messages to send; nil: the stream ends, its token is lost

	endpoints endpoints
}

// endpoints is sluice-datapath.
type endpoints struct {
	datapathv1.UnimplementedDatapathServiceServer
	lists chan []*datapathv1.WatchEndpointsResponse // as node.streams
}

func (n *endpoints) WatchEndpoints(
	r *datapathv1.WatchEndpointsRequest, stream grpc.ServerStreamingServer[datapathv1.WatchEndpointsResponse],
) error {
	if len(r.GetResumeToken()) > 0 {
		return status.Error(codes.OutOfRange, "the token is of another run")
	}
	for {
		select {
		case list := <-n.lists:
			if list == nil {
				return status.Error(codes.Unavailable, "stopping")
			}
			for _, m := range list {
				if err := stream.Send(m); err != nil {
					return err
				}
			}
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func (n *node) WatchRuleSets(
	r *policyv1.WatchRuleSetsRequest, stream grpc.ServerStreamingServer[policyv1.WatchRuleSetsResponse],
) error {
	if len(r.GetResumeToken()) > 0 {
		return status.Error(codes.OutOfRange, "the token is of another run")
	}
	for {
		select {
		case list := <-n.streams:
			if list == nil {
				return status.Error(codes.Unavailable, "stopping")
			}
			for _, m := range list {
				if err := stream.Send(m); err != nil {
					return err
				}
			}
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func (n *node) LearnNames(_ context.Context, r *policyv1.LearnNamesRequest) (*policyv1.LearnNamesResponse, error) {
	n.learned = r
	return &policyv1.LearnNamesResponse{}, n.err
}

func (n *node) ForgetNames(_ context.Context, r *policyv1.ForgetNamesRequest) (*policyv1.ForgetNamesResponse, error) {
	n.forgot = r
	return &policyv1.ForgetNamesResponse{}, n.err
}

func (n *node) GetIPMapping(
	context.Context, *identityv1.GetIPMappingRequest,
) (*identityv1.GetIPMappingResponse, error) {
	return n.mapping, n.err
}

func start(t *testing.T) (*node, *grpc.ClientConn) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	n, s := &node{}, grpc.NewServer()
	policyv1.RegisterPolicyServiceServer(s, n)
	identityv1.RegisterClusterServiceServer(s, n)
	datapathv1.RegisterDatapathServiceServer(s, &n.endpoints)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	conn, err := rpcclient.Dial(path, rpcclient.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Stop()
		if err := errors.Join(conn.Close(), <-served); err != nil {
			t.Error(err)
		}
	})
	return n, conn
}

var addr = netip.MustParseAddr("192.0.2.7")

// named returns a logger that fails the test if a line lacks the source.
func named(t *testing.T) *slog.Logger { return slog.New(sourceHandler{t, false}) }

type sourceHandler struct {
	t   *testing.T
	has bool
}

func (h sourceHandler) Enabled(context.Context, slog.Level) bool { return true }

func (h sourceHandler) Handle(_ context.Context, r slog.Record) error {
	if !h.has {
		h.t.Errorf("the line %q does not name its source", r.Message)
	}
	return nil
}

func (h sourceHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	h.has = h.has || slices.ContainsFunc(attrs, func(a slog.Attr) bool { return a.Key == "source" })
	return h
}

func (h sourceHandler) WithGroup(string) slog.Handler { return h }

func TestNamesArePassedToSluicePolicy(t *testing.T) {
	n, conn := start(t)
	p, by := New(conn), names.Asker{Endpoint: 7, Tenant: "namespace shop"}
	err := p.Learn(t.Context(), by, "a.example.", []netip.Addr{addr, netip.MustParseAddr("2001:db8::7")}, 90*time.Second)
	if err != nil || n.learned.GetName() != "a.example." || n.learned.GetTtl().AsDuration() != 90*time.Second ||
		strings.Join(n.learned.GetAddresses(), " ") != "192.0.2.7 2001:db8::7" ||
		n.learned.GetAsker().GetEndpoint() != 7 || n.learned.GetAsker().GetTenant() != "namespace shop" {
		t.Errorf("%v, %v", err, n.learned)
	}
	if err := p.Forget(t.Context(), "a.example.", "shop", addr); err != nil || n.forgot.GetPattern() != "a.example." ||
		n.forgot.GetAddress() != "192.0.2.7" {
		t.Errorf("%v, %v", err, n.forgot)
	}
	n.err = status.Error(codes.ResourceExhausted, "full")
	if err := p.Learn(t.Context(), by, "a.", []netip.Addr{addr}, time.Minute); !errors.Is(err, exchange.ErrNoCapacity) {
		t.Errorf("full: %v", err)
	}
	n.err = status.Error(codes.Unavailable, "stopping")
	err = p.Learn(t.Context(), by, "a.", []netip.Addr{addr}, time.Minute)
	if err == nil || errors.Is(err, exchange.ErrNoCapacity) {
		t.Errorf("stopping: %v", err)
	}
}

func TestAddressesOfTheClusterAreThoseOfSluiceIdentity(t *testing.T) {
	n, conn := start(t)
	c := NewCluster(conn)
	for what, x := range map[string]struct {
		mapping *identityv1.GetIPMappingResponse
		err     error
		want    bool
		unknown bool
	}{
		"pod, node or API server": {
			&identityv1.GetIPMappingResponse{Mapping: &identityv1.IPMapping{Identity: 6}},
			nil, true, false,
		},
		"range of a node":          {&identityv1.GetIPMappingResponse{RangeNode: "node-b"}, nil, true, false},
		"outside":                  {nil, status.Error(codes.NotFound, "no mapping"), false, false},
		"refused mapping":          {&identityv1.GetIPMappingResponse{}, nil, false, false},
		"identity is not complete": {nil, status.Error(codes.Unavailable, "starting"), false, true},
	} {
		n.mapping, n.err = x.mapping, x.err
		if got, err := c.Has(t.Context(), addr); got != x.want || (err != nil) != x.unknown {
			t.Errorf("%s: %t, %v", what, got, err)
		}
	}
}

// TestRulesFollowSluicePolicy: the rules equal the rule sets of sluice-policy after a listing, after changes, and
// after a restart of sluice-policy.
func TestRulesFollowSluicePolicy(t *testing.T) {
	n, conn := start(t)
	n.streams = make(chan []*policyv1.WatchRuleSetsResponse)
	r := rules.New()
	var listings atomic.Int32
	s := NewRuleSets(conn, r, func() { listings.Add(1) }, named(t))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	if s.Err() == nil {
		t.Error("complete before the listing")
	}
	upsert := func(number uint32, proxy netv1.Proxy, names ...string) *policyv1.WatchRuleSetsResponse {
		return &policyv1.WatchRuleSetsResponse{Event: &policyv1.WatchRuleSetsResponse_Upsert{
			Upsert: &policyv1.RuleSet{Number: number, Proxy: proxy, DnsNames: names},
		}}
	}
	wanted := func(all bool, names ...string) *policyv1.WatchRuleSetsResponse {
		return &policyv1.WatchRuleSetsResponse{Event: &policyv1.WatchRuleSetsResponse_WantedNames{
			WantedNames: &policyv1.WantedNames{All: all, DnsNames: names},
		}}
	}
	bookmark := &policyv1.WatchRuleSetsResponse{
		ResumeToken: []byte("1"), Event: &policyv1.WatchRuleSetsResponse_Bookmark{
			Bookmark: &policyv1.RuleSetBookmark{SnapshotComplete: true, Revision: 1},
		},
	}
	const dns, http = netv1.Proxy_PROXY_DNS, netv1.Proxy_PROXY_HTTP
	decides := func(want map[uint16]rules.Verdict) bool {
		for number, v := range want {
			if r.Decide(rules.Tag{Egress: number}, "a.example.") != (rules.Decision{Verdict: v, Set: map[bool]uint16{
				false: number,
			}[v == rules.Allowed]}) {
				return false
			}
		}
		return s.Err() == nil
	}
	await := func(what string, ok func() bool) {
		t.Helper()
		for deadline := time.Now().Add(servicetest.Patience); !ok(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: not reached; the watch says %v", what, s.Err())
			}
		}
	}
	n.streams <- []*policyv1.WatchRuleSetsResponse{
		upsert(1, dns, "a.example."), upsert(2, dns, "b.example."), upsert(3, http), upsert(4, dns, "a.example."),
		upsert(5, dns, "a b"), upsert(70_000, dns), wanted(false, "a.example."), bookmark,
	}
	await("listing", func() bool {
		return r.Len() == 3 && !r.Wants("b.example.") && decides(map[uint16]rules.Verdict{
			1: rules.Allowed, 2: rules.Refused, 3: rules.Unknown, 4: rules.Allowed, 5: rules.Unknown,
		})
	})
	n.streams <- []*policyv1.WatchRuleSetsResponse{
		upsert(2, dns, "*"), upsert(1, http), {Event: &policyv1.WatchRuleSetsResponse_Delete{Delete: 4}}, wanted(true),
	}
	await("changes", func() bool {
		return r.Wants("b.example.") && decides(map[uint16]rules.Verdict{
			1: rules.Unknown, 2: rules.Allowed, 4: rules.Unknown,
		})
	})
	n.streams <- nil // the stream ends: sluice-policy restarts
	n.streams <- []*policyv1.WatchRuleSetsResponse{upsert(6, dns, "a.example."), wanted(false), bookmark}
	await("second listing", func() bool {
		return r.Len() == 1 && !r.Wants("a.example.") && decides(map[uint16]rules.Verdict{
			2: rules.Unknown, 6: rules.Allowed,
		})
	})
	if n := listings.Load(); n != 2 {
		t.Errorf("%d listings were reported, want 2: each time, sluice-policy may have forgotten what it had learned", n)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestEndpointsAreFollowed(t *testing.T) {
	n, conn := start(t)
	n.endpoints.lists = make(chan []*datapathv1.WatchEndpointsResponse)
	left := make(chan uint16, 10)
	p := pods.New(shares.Settings{}, func(endpoint uint16) { left <- endpoint })
	e := NewEndpoints(conn, p, "example.com/tenant", named(t))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	upsert := func(container string, id uint32, namespace string) *datapathv1.WatchEndpointsResponse {
		e := &datapathv1.Endpoint{
			Owner: &workloadv1.Owner{ContainerId: container, InterfaceName: "eth0"}, EndpointIndex: id,
			Identity: 300, Labels: []*workloadv1.Label{
				{Source: "k8s", Key: "io.kubernetes.pod.namespace", Value: namespace}, {Source: "cni", Key: "a", Value: "b"},
			},
		}
		if namespace == "acme-1" {
			e.Labels = append(e.Labels, &workloadv1.Label{
				Source: "k8s", Key: "io.cilium.k8s.namespace.labels.example.com/tenant", Value: "acme",
			})
		}
		return &datapathv1.WatchEndpointsResponse{Event: &datapathv1.WatchEndpointsResponse_Upsert{Upsert: e}}
	}
	complete := &datapathv1.WatchEndpointsResponse{
		ResumeToken: []byte("1"),
		Event:       &datapathv1.WatchEndpointsResponse_Bookmark{Bookmark: &datapathv1.Bookmark{SnapshotComplete: true}},
	}
	tenant := func(id uint16, want string) {
		t.Helper()
		for began := time.Now(); p.Get(id).Asker.Tenant != want; time.Sleep(time.Millisecond) {
			if time.Since(began) > time.Minute {
				t.Fatalf("endpoint %d: tenant %q, want %q", id, p.Get(id).Asker.Tenant, want)
			}
		}
	}
	n.endpoints.lists <- []*datapathv1.WatchEndpointsResponse{upsert("a", 5, "shop"), upsert("b", 6, "bank"), complete}
	tenant(5, "namespace shop")
	tenant(6, "namespace bank")
	if got := p.Get(5).Asker.Namespace; got != "shop" {
		t.Errorf("namespace %q", got)
	}
	n.endpoints.lists <- []*datapathv1.WatchEndpointsResponse{upsert("d", 7, "acme-1")}
	tenant(7, "tenant acme")
	without := upsert("d", 7, "acme-1")
	without.GetUpsert().Identity = 0 // the labels of the endpoint are not known yet
	n.endpoints.lists <- []*datapathv1.WatchEndpointsResponse{without}
	tenant(7, pods.Unknown.Tenant)
	if id := <-left; id != 7 {
		t.Errorf("endpoint %d left", id)
	}
	a := &workloadv1.Owner{ContainerId: "a", InterfaceName: "eth0"}
	n.endpoints.lists <- []*datapathv1.WatchEndpointsResponse{
		{Event: &datapathv1.WatchEndpointsResponse_Delete{Delete: a}},
		upsert("c", 5, "mail"),
	}
	tenant(5, "namespace mail")
	n.endpoints.lists <- nil // the watch lists again, without b
	n.endpoints.lists <- []*datapathv1.WatchEndpointsResponse{upsert("c", 5, "mail"), complete}
	tenant(6, pods.Unknown.Tenant)
	if a, b := <-left, <-left; a != 5 || b != 6 || len(left) != 0 {
		t.Errorf("left %d, %d and %d more", a, b, len(left))
	}
	if e.Err() != nil {
		t.Error(e.Err())
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
