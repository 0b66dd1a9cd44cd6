// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
	"github.com/sluice-net/sluice/services/identity/internal/refusals"
)

// ReportRefusals implements the service.
func (c *Cluster) ReportRefusals(ctx context.Context,
	req *identityv1.ReportRefusalsRequest,
) (*identityv1.ReportRefusalsResponse, error) {
	subject := subjectOf(req.GetSubject())
	if err := mayReport(ctx, subject); err != nil {
		return nil, err
	}
	r := refusals.Report{Omitted: req.GetOmitted(), OmittedReasons: req.GetOmittedReasons()}
	for _, x := range req.GetRefusals() {
		r.Refusals = append(r.Refusals, refusals.Refusal{
			Kind: x.GetKind(), Namespace: x.GetNamespace(), Name: x.GetName(), Reason: x.GetReason(),
		})
	}
	err := c.Refusals.ReportRefusals(ctx, subject, r)
	switch {
	case errors.Is(err, refusals.ErrTooLarge):
		return nil, invalid("refusals", err)
	case err != nil:
		return nil, statusOf(err)
	}
	return &identityv1.ReportRefusalsResponse{}, nil
}

// mayReport checks that one service of a node does not replace the report of another.
func mayReport(ctx context.Context, subject refusals.Subject) error {
	cred, _ := rpc.PeerCred(ctx) // a call without credentials has already been rejected
	of := map[uint32]refusals.Subject{instance.PolicyID: refusals.Policies, instance.LoadBalancerID: refusals.Services}
	if own, ok := of[cred.UID]; ok && own != subject {
		return rpcerr.New(codes.PermissionDenied, rpcerr.NotPermitted,
			fmt.Errorf("uid %d may only report what its own service does not enforce", cred.UID))
	}
	return nil
}

func subjectOf(s identityv1.RefusalSubject) refusals.Subject {
	if s == identityv1.RefusalSubject_REFUSAL_SUBJECT_SERVICES {
		return refusals.Services
	}
	return refusals.Policies
}

// errRelisted ends a watch whose reports are sent again.
var errRelisted = errors.New("the reports were listed again")

// WatchRefusals implements the service.
func (c *Cluster) WatchRefusals(req *identityv1.WatchRefusalsRequest,
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
		Node: func(node string, subject refusals.Subject, r refusals.Report) {
			if subject == refusals.Services && !req.GetServices() {
				return
			}
			m := &identityv1.WatchRefusalsResponse{
				Node: node, Omitted: r.Omitted, OmittedReasons: r.OmittedReasons, Unreadable: r.Corrupt,
			}
			if subject == refusals.Services {
				m.Subject = identityv1.RefusalSubject_REFUSAL_SUBJECT_SERVICES
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
