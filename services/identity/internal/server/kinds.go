// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/identity/internal/kinds"
)

// PublishKinds implements the service.
func (c *Cluster) PublishKinds(ctx context.Context,
	req *identityv1.PublishKindsRequest,
) (*identityv1.PublishKindsResponse, error) {
	err := c.Kinds.Publish(ctx, req.GetKinds())
	switch {
	case errors.Is(err, kinds.ErrMalformed):
		return nil, invalid("kinds", err)
	case err != nil:
		return nil, statusOf(err)
	}
	return &identityv1.PublishKindsResponse{}, nil
}

// WatchKinds implements the service.
func (c *Cluster) WatchKinds(_ *identityv1.WatchKindsRequest,
	stream grpc.ServerStreamingServer[identityv1.WatchKindsResponse],
) error {
	for {
		state, read, changed := c.Kinds.State()
		if read {
			if err := stream.Send(&identityv1.WatchKindsResponse{Published: state.Published, Kinds: state.Kinds}); err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		}
	}
}
