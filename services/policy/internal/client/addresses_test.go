// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/model/identity"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
)

// mappings is the identity service of a cluster.
type mappings struct {
	identityv1.UnimplementedClusterServiceServer
}

func (mappings) GetIPMapping(
	_ context.Context, r *identityv1.GetIPMappingRequest,
) (*identityv1.GetIPMappingResponse, error) {
	switch r.GetAddress() {
	case "10.244.1.2":
		return &identityv1.GetIPMappingResponse{
			Mapping: &identityv1.IPMapping{Identity: 300, Node: "b"}, Range: "10.244.1.0/24", RangeNode: "b",
		}, nil
	case "10.244.1.9":
		return &identityv1.GetIPMappingResponse{Range: "10.244.1.0/24", RangeNode: "b"}, nil
	case "10.9.0.1":
		return &identityv1.GetIPMappingResponse{Refused: []*identityv1.RefusedMapping{{Reason: "in no range"}}}, nil
	case "192.0.2.1":
		return nil, status.Error(codes.NotFound, "the address is unknown")
	}
	return nil, status.Error(codes.Unavailable, "the addresses of the cluster are not known yet")
}

func TestAddressesHaveTheIdentityThatTheClusterKnows(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv, done := grpc.NewServer(), make(chan error, 1)
	identityv1.RegisterClusterServiceServer(srv, mappings{})
	go func() { done <- srv.Serve(l) }()
	conn, err := client.Dial(socket, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); srv.Stop(); <-done })
	a := NewAddresses(conn)
	for text, want := range map[string]identity.Numeric{
		"10.244.1.2": 300, "10.244.1.9": identity.UnknownInCluster, "10.9.0.1": 0, "192.0.2.1": 0,
	} {
		if got, err := a.IdentityOf(t.Context(), netip.MustParseAddr(text)); err != nil || got != want {
			t.Errorf("%s: %d, %v; want %d", text, got, err, want)
		}
	}
	if n, err := a.IdentityOf(t.Context(), netip.MustParseAddr("10.0.0.1")); !errors.Is(err, peer.ErrUnresolved) {
		t.Errorf("while the service does not know the addresses: %d, %v", n, err)
	}
	srv.Stop()
	if n, err := a.IdentityOf(t.Context(), netip.MustParseAddr("192.0.2.1")); !errors.Is(err, peer.ErrUnresolved) {
		t.Errorf("while the service is down: %d, %v", n, err)
	}
}
