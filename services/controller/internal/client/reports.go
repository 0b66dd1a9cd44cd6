// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/controller/internal/nodereports"
	"github.com/sluice-net/sluice/services/policy/evaluation"
)

// Reports follows the reports of all nodes of the cluster.
type Reports struct {
	client identityv1.ClusterServiceClient
	log    *slog.Logger
}

// NewReports returns Reports that use a connection to the identity service's socket.
func NewReports(cc grpc.ClientConnInterface, l *slog.Logger) *Reports {
	return &Reports{client: identityv1.NewClusterServiceClient(cc), log: l}
}

// Follow calls told with the reports of all nodes whenever they change, until ctx ends; it then returns nil. While
// the identity service is unreachable, the last reports remain.
func (r *Reports) Follow(ctx context.Context, told func(nodereports.Cluster)) error {
	for pause := watchRetry; ; {
		err := r.follow(ctx, func(all nodereports.Cluster) {
			pause = watchRetry
			told(all)
		})
		if ctx.Err() != nil {
			return nil
		}
		if status.Code(err) == codes.Unimplemented { // from an earlier version
			pause = watchRetryMax
		}
		r.log.Debug("cannot watch what nodes do not enforce as written, trying again", log.Err(err))
		select {
		case <-time.After(pause + rand.N(pause)):
		case <-ctx.Done():
			return nil
		}
		pause = min(2*pause, watchRetryMax)
	}
}

func (r *Reports) follow(ctx context.Context, told func(nodereports.Cluster)) error {
	stream, err := r.client.WatchRefusals(ctx, &identityv1.WatchRefusalsRequest{Services: true})
	if err != nil {
		return err
	}
	all, complete := nodereports.Cluster{Policies: make(nodereports.All), Services: make(nodereports.All)}, false
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		complete = complete || m.GetComplete()
		if node := m.GetNode(); node != "" {
			report := nodereports.Report{
				Omitted: int(m.GetOmitted()), Reasons: m.GetOmittedReasons(), Unreadable: m.GetUnreadable(),
			}
			for _, x := range m.GetRefusals() {
				k := evaluation.Key{Kind: x.GetKind(), Namespace: x.GetNamespace(), Name: x.GetName()}
				report.Refused = append(report.Refused, nodereports.Refused{Key: k, Reason: x.GetReason()})
			}
			of := all.Policies
			if m.GetSubject() == identityv1.RefusalSubject_REFUSAL_SUBJECT_SERVICES {
				of = all.Services
			}
			if of[node] = report; len(report.Refused)+report.Omitted == 0 && !report.Unreadable {
				delete(of, node)
			}
		}
		if complete {
			told(all)
		}
	}
}
