// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	hubblev1 "github.com/sluice-net/sluice/proto/gen/sluice/hubble/v1"
	"github.com/sluice-net/sluice/services/hubble/internal/history"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/record"
)

// deletions implements the deletion of stored events.
type deletions struct {
	hubblev1.UnimplementedHistoryServiceServer
	history *history.History
}

// DeleteFlows implements the API.
func (s deletions) DeleteFlows(
	ctx context.Context, r *hubblev1.DeleteFlowsRequest,
) (*hubblev1.DeleteFlowsResponse, error) {
	d := history.Deletion{ValidateOnly: r.GetValidateOnly(), Rest: record.Rest}
	if r.GetBefore() != nil {
		if err := r.GetBefore().CheckValid(); err != nil {
			return nil, invalid("before", err)
		}
		d.Before = r.GetBefore().AsTime()
	}
	name := r.GetNamespace()
	d.Skip = func(x history.Index) bool {
		_, ok := x.Namespaces[name]
		return name != "" && !ok && !x.Many
	}
	d.Selects = func(f history.Facts) bool { return name == "" || slices.Contains(f.Namespaces, name) }
	n, err := s.history.Delete(ctx, d)
	if err != nil {
		if err := contextError(ctx); err != nil {
			return nil, err
		}
		return nil, status.Errorf(codes.Internal, "delete stored events: %v; %d were deleted", err, n)
	}
	return &hubblev1.DeleteFlowsResponse{DeletedCount: n}, nil
}
