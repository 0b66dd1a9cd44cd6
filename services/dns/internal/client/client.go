// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package client passes learned names to sluice-policy, and queries sluice-identity for the addresses of the cluster.
package client

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/dns/internal/exchange"
	"github.com/sluice-net/sluice/services/dns/internal/names"
)

// Policy is a client of sluice-policy. It implements exchange.Enforcer.
type Policy struct{ client policyv1.PolicyServiceClient }

// New returns the client of a connection.
func New(conn grpc.ClientConnInterface) *Policy {
	return &Policy{policyv1.NewPolicyServiceClient(conn)}
}

// Learn implements exchange.Enforcer.
func (p *Policy) Learn(ctx context.Context, by names.Asker, name string, addrs []netip.Addr, ttl time.Duration) error {
	req := &policyv1.LearnNamesRequest{Name: name, Ttl: durationpb.New(ttl)}
	if by.Endpoint != 0 {
		req.Asker = &policyv1.NameAsker{
			Endpoint: by.Endpoint, Tenant: by.Tenant, Namespace: &by.Namespace, Identity: by.Identity,
		}
	}
	for _, a := range addrs {
		req.Addresses = append(req.Addresses, a.String())
	}
	answer, err := p.client.LearnNames(ctx, req)
	switch {
	case status.Code(err) == codes.ResourceExhausted:
		return fmt.Errorf("%w: %w", exchange.ErrNoCapacity, err)
	case answer.GetNotSelected():
		return exchange.ErrNotSelected
	}
	return err
}

// Forget implements exchange.Enforcer.
func (p *Policy) Forget(ctx context.Context, name, namespace string, addr netip.Addr) error {
	_, err := p.client.ForgetNames(ctx, &policyv1.ForgetNamesRequest{
		Pattern: name, Address: addr.String(), Namespace: &namespace,
	})
	return err
}

// Cluster is a client of sluice-identity. It implements exchange.Cluster.
type Cluster struct {
	client identityv1.ClusterServiceClient
}

// NewCluster returns the client of a connection.
func NewCluster(conn grpc.ClientConnInterface) *Cluster {
	return &Cluster{identityv1.NewClusterServiceClient(conn)}
}

// Has implements exchange.Cluster.
func (c *Cluster) Has(ctx context.Context, addr netip.Addr) (bool, error) {
	r, err := c.client.GetIPMapping(ctx, &identityv1.GetIPMappingRequest{Address: addr.String()})
	if status.Code(err) == codes.NotFound {
		return false, nil
	}
	return r.GetMapping() != nil || r.GetRangeNode() != "", err
}
