// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	rpcclient "github.com/sluice-net/sluice/kit/rpc/client"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/dns/internal/exchange"
	"github.com/sluice-net/sluice/services/dns/internal/names"
)

// node simulates the services that this package calls.
type node struct {
	policyv1.UnimplementedPolicyServiceServer
	identityv1.UnimplementedClusterServiceServer
	err     error
	learned *policyv1.LearnNamesRequest
	forgot  *policyv1.ForgetNamesRequest
	mapping *identityv1.GetIPMappingResponse
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
