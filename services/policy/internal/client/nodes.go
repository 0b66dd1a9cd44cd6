// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/policy/internal/departed"
)

// forgetTimeout is of one call.
const forgetTimeout = 10 * time.Second

// Nodes is a departed.Registry: the identity service of this machine.
type Nodes struct {
	client identityv1.ClusterServiceClient
}

// NewNodes uses a connection to the identity service's socket.
func NewNodes(cc grpc.ClientConnInterface) Nodes {
	return Nodes{identityv1.NewClusterServiceClient(cc)}
}

// Forget implements departed.Registry.
func (n Nodes) Forget(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, forgetTimeout)
	defer cancel()
	_, err := n.client.ForgetNode(ctx, &identityv1.ForgetNodeRequest{Name: name})
	switch status.Code(err) {
	case codes.NotFound:
		return fmt.Errorf("%w: %w", departed.ErrUnknown, err)
	case codes.FailedPrecondition:
		return fmt.Errorf("%w: %w", departed.ErrAlive, err)
	default:
		return err
	}
}
