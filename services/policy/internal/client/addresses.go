// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/model/identity"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
)

// resolveTimeout limits one call.
const resolveTimeout = 5 * time.Second

// Addresses resolves addresses to identities through the identity service.
type Addresses struct {
	client identityv1.ClusterServiceClient
}

// NewAddresses returns Addresses that use a connection to the identity service's socket.
func NewAddresses(cc grpc.ClientConnInterface) Addresses {
	return Addresses{identityv1.NewClusterServiceClient(cc)}
}

// IdentityOf returns the identity of an address. It returns identity.UnknownInCluster if the address is in a node's
// range but has no endpoint, and 0 if it is outside of the cluster. It returns peer.ErrUnresolved if the identity
// service does not answer, or does not know the addresses of the cluster yet.
func (a Addresses) IdentityOf(ctx context.Context, addr netip.Addr) (identity.Numeric, error) {
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	r, err := a.client.GetIPMapping(ctx, &identityv1.GetIPMappingRequest{Address: addr.String()})
	switch {
	case status.Code(err) == codes.NotFound:
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("%w: %w", peer.ErrUnresolved, err)
	case r.GetMapping() != nil:
		return identity.Numeric(r.GetMapping().GetIdentity()), nil
	case r.GetRangeNode() != "":
		return identity.UnknownInCluster, nil
	}
	return 0, nil // outside of all ranges, or an ignored mapping
}
