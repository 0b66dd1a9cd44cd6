// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
	"github.com/sluice-net/sluice/services/identity/internal/refusals"
)

// ReportRefusals implements the service.
func (c *Cluster) ReportRefusals(ctx context.Context,
	req *identityv1.ReportRefusalsRequest,
) (*identityv1.ReportRefusalsResponse, error) {
	r := refusals.Report{Omitted: req.GetOmitted(), OmittedReasons: req.GetOmittedReasons()}
	for _, x := range req.GetRefusals() {
		r.Refusals = append(r.Refusals, refusals.Refusal{
			Kind: x.GetKind(), Namespace: x.GetNamespace(), Name: x.GetName(), Reason: x.GetReason(),
		})
	}
	err := c.Refusals.ReportRefusals(ctx, r)
	switch {
	case errors.Is(err, refusals.ErrTooLarge):
		return nil, invalid("refusals", err)
	case err != nil:
		return nil, statusOf(err)
	}
	return &identityv1.ReportRefusalsResponse{}, nil
}

// errRelisted ends a watch whose reports are sent again.
var errRelisted = errors.New("the reports were listed again")

// WatchRefusals implements the service.
func (c *Cluster) WatchRefusals(_ *identityv1.WatchRefusalsRequest,
	stream grpc.ServerStreamingServer[identityv1.WatchRefusalsResponse],
) error {
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	complete := false
	send := func(m *identityv1.WatchRefusalsResponse) {
		if ctx.Err() != nil {
			return
		}
		if err := stream.Send(m); err != nil {
			cancel(err)
		}
	}
	err := c.Refusals.FollowRefusals(ctx, refusals.Sink{
		Begin: func() {
			if complete { // removals in between were not sent: the caller starts again
				cancel(errRelisted)
			}
		},
		Node: func(node string, r refusals.Report) {
			m := &identityv1.WatchRefusalsResponse{
				Node: node, Omitted: r.Omitted, OmittedReasons: r.OmittedReasons, Unreadable: r.Corrupt,
			}
			if r.Corrupt {
				m.Omitted = 1 // for controllers that do not know unreadable
			}
			for _, x := range r.Refusals {
				m.Refusals = append(m.Refusals, &identityv1.PolicyRefusal{
					Kind: x.Kind, Namespace: x.Namespace, Name: x.Name, Reason: x.Reason,
				})
			}
			send(m)
		},
		Complete: func() {
			complete = true
			send(&identityv1.WatchRefusalsResponse{Complete: true})
		},
	})
	if stream.Context().Err() != nil {
		return status.FromContextError(stream.Context().Err()).Err()
	}
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, errRelisted) {
		return cause
	}
	if err == nil || ctx.Err() != nil {
		err = cluster.ErrUnavailable
	}
	return statusOf(err)
}
