// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kube"
	identities "github.com/sluice-net/sluice/services/policy/internal/client"
	"github.com/sluice-net/sluice/services/policy/internal/departed"
	nodeapi "github.com/sluice-net/sluice/services/policy/internal/departed/kubernetes"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/podcidrs"
	"github.com/sluice-net/sluice/services/policy/internal/server"
	"github.com/sluice-net/sluice/services/policy/internal/shortage"
	"github.com/sluice-net/sluice/services/policy/internal/source/kubernetes"
	"github.com/sluice-net/sluice/services/policy/internal/statuswriter"
	statuses "github.com/sluice-net/sluice/services/policy/internal/statuswriter/kubernetes"
)

// writeStatus has the process write the status of policies, make Events on Nodes without
// addresses, publish the podCIDRs of Nodes, and forget nodes whose Node was deleted, while it is elected. It
// returns the source of the objects, which every process follows, so that the next
// one that is elected knows them all.
func writeStatus(
	p *process.Process, cfg Config, api *kube.Client, conn grpc.ClientConnInterface, o *owner.Objects,
) (*kubernetes.Source, error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("the name of a candidate for the lease: %w", err)
	}
	election, err := api.Election(cfg.Kubernetes.Status.Namespace, cfg.Kubernetes.Status.Lease, host+"_"+rand.Text())
	if err != nil {
		return nil, err
	}
	edge, err := statuses.New(api.Config, host, p.Log)
	if err != nil {
		return nil, err
	}
	w := statuswriter.New(o, edge, p.Log)
	if err := p.Metrics.Register(server.StatusCollector{Figures: w.Figures}); err != nil {
		return nil, err
	}
	nodes, err := nodeapi.New(api)
	if err != nil {
		return nil, err
	}
	gone, err := departed.New(filepath.Join(cfg.StateDir, "nodes.json"), nodes, identities.NewNodes(conn), p.Log)
	if err != nil {
		return nil, err
	}
	short := shortage.New(edge, p.Log)
	ranges := podcidrs.New(identities.NewNodes(conn), p.Log)
	source := kubernetes.New(api, w, p.Log)
	source.Records, source.Kinds = true, identities.NewKinds(conn, p.Log)
	p.Go("refused policies", func(ctx context.Context) error {
		return followRefusals(ctx, identities.NewRefusals(conn, p.Log), api.Nodes, w.SetRefused, short.SetStorage)
	})
	p.Go("names of nodes", gone.Run)
	p.Go("nodes", func(ctx context.Context) error { return nodes.Follow(ctx, gone, short, ranges, p.Log) })
	p.Go("status", func(ctx context.Context) error {
		return election.Run(ctx, func(ctx context.Context) {
			var parts sync.WaitGroup
			parts.Go(func() { gone.Lead(ctx) })
			parts.Go(func() { short.Lead(ctx) })
			parts.Go(func() { ranges.Lead(ctx) })
			parts.Go(func() { source.Lead(ctx) })
			w.Lead(ctx)
			parts.Wait()
		})
	})
	return source, nil
}
