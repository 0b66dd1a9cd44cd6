// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"log/slog"

	"google.golang.org/grpc"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/proto/wire/reportwire"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
)

// Limits of the report of a node. Every node reports the same Services, and a tenant can change which ones they are.
const (
	maxReported    = 128
	maxReportBytes = 16 << 10
)

// newReporter returns the reporter of Services beyond the share of their tenant. nodes returns the number of nodes of
// the cluster.
func newReporter(cc grpc.ClientConnInterface, nodes func() int, l *slog.Logger) *reportwire.Reporter {
	return reportwire.New(identityv1.NewClusterServiceClient(cc), reportwire.Options{
		Subject: identityv1.RefusalSubject_REFUSAL_SUBJECT_SERVICES, MaxBytes: maxReportBytes, MaxObjects: maxReported,
		Nodes: nodes, Log: l,
	})
}

// beyondShare returns a function that lists the Services of the API server that exceed the share of their tenant. The
// tenants take turns, so a tenant with very many of them does not displace the Services of others from the report.
func beyondShare(r *owner.Reader) func(context.Context) ([]reportwire.Refused, error) {
	return func(ctx context.Context) ([]reportwire.Refused, error) {
		all, err := r.Exceeding(ctx, maxReported)
		out := make([]reportwire.Refused, len(all))
		for i, x := range all {
			out[i] = reportwire.Refused{
				Kind: "Service", Namespace: x.Name.Namespace, Name: x.Name.Name, Reason: x.Reason, Code: x.Limit,
			}
		}
		return out, err
	}
}
