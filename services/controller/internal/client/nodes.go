// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package client calls the identity service of this machine, which passes cluster-wide facts on to all nodes.
package client

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/controller/internal/nodegc"
)

// Times of calls.
const (
	forgetTimeout    = 10 * time.Second
	podCIDRsTimeout  = 30 * time.Second // the first call may write thousands of Nodes
	unimplementedFor = "sluice-identity of this node is an earlier version: restart it; until then the ranges that " +
		"nodes claim are not compared with podCIDRs"
)

// Nodes implements nodegc.Registry and podcidrs.Publisher with the identity service of this machine.
type Nodes struct {
	client identityv1.ClusterServiceClient
}

// NewNodes returns Nodes that use a connection to the identity service's socket.
func NewNodes(cc grpc.ClientConnInterface) Nodes {
	return Nodes{identityv1.NewClusterServiceClient(cc)}
}

// Forget implements nodegc.Registry.
func (n Nodes) Forget(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, forgetTimeout)
	defer cancel()
	_, err := n.client.ForgetNode(ctx, &identityv1.ForgetNodeRequest{Name: name})
	switch status.Code(err) {
	case codes.NotFound:
		return fmt.Errorf("%w: %w", nodegc.ErrUnknown, err)
	case codes.FailedPrecondition:
		return fmt.Errorf("%w: %w", nodegc.ErrAlive, err)
	default:
		return err
	}
}

// PublishPodCIDRs implements podcidrs.Publisher.
func (n Nodes) PublishPodCIDRs(ctx context.Context, nodes map[string][]netip.Prefix) error {
	ctx, cancel := context.WithTimeout(ctx, podCIDRsTimeout)
	defer cancel()
	req := &identityv1.PublishPodCIDRsRequest{}
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		of := &identityv1.NodePodCIDRs{Name: name}
		for _, p := range nodes[name] {
			of.PodCidrs = append(of.PodCidrs, p.String())
		}
		req.Nodes = append(req.Nodes, of)
	}
	_, err := n.client.PublishPodCIDRs(ctx, req)
	if status.Code(err) == codes.Unimplemented {
		return fmt.Errorf("%s: %w", unimplementedFor, err)
	}
	return err
}
