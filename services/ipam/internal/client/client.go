// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package client registers the ranges and labels of this node with the identity service, which exchanges them with the
// other nodes.
package client

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/ipam/internal/cluster"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
)

// Identity implements cluster.Registry.
type Identity struct {
	client   identityv1.ClusterServiceClient
	settings *identityv1.IPAMSettings
	labels   Labels
}

// Labels returns the labels of this node, by key; ok is false while they are unknown.
type Labels func() (labels map[string]string, ok bool)

var modes = map[cluster.Mode]identityv1.IPAMMode{
	cluster.Static:     identityv1.IPAMMode_IPAM_MODE_STATIC,
	cluster.Kubernetes: identityv1.IPAMMode_IPAM_MODE_KUBERNETES,
	cluster.Pool:       identityv1.IPAMMode_IPAM_MODE_POOL,
}

// New returns an Identity that uses a connection to the identity service's socket. labels is nil if the labels of this
// node are never known.
func New(cc grpc.ClientConnInterface, s cluster.Settings, labels Labels) *Identity {
	i := &Identity{
		labels: labels,
		client: identityv1.NewClusterServiceClient(cc),
		settings: &identityv1.IPAMSettings{
			Mode: modes[s.Mode], MaxBlocks: uint32(s.MaxBlocks), //nolint:gosec // checked
		},
	}
	for _, p := range s.Prefixes {
		i.settings.PoolPrefixes = append(i.settings.PoolPrefixes, p.String())
		if p.Addr().Is4() {
			i.settings.Ipv4BlockLength = uint32(s.IPv4Block) //nolint:gosec // checked
		} else {
			i.settings.Ipv6BlockLength = uint32(s.IPv6Block) //nolint:gosec // checked
		}
	}
	return i
}

// Register implements cluster.Registry.
func (i *Identity) Register(ctx context.Context, ranges []netip.Prefix) (a cluster.Answer, err error) {
	req := &identityv1.RegisterNodeRequest{
		PodRanges: &identityv1.PodRanges{Prefixes: texts(ranges)}, Ipam: i.settings,
	}
	if i.labels != nil {
		if labels, ok := i.labels(); ok {
			req.Labels = &identityv1.NodeLabels{Labels: labels}
		}
	}
	resp, err := i.client.RegisterNode(ctx, req)
	if err != nil {
		return a, failed("register the ranges of this node", err)
	}
	a.Registered, a.Connected = resp.GetRegistered(), resp.GetStoreConnected()
	for _, r := range resp.GetNode().GetRefusedRanges() {
		p, err := netip.ParsePrefix(r.GetPrefix())
		if err != nil {
			return a, fmt.Errorf("a refused range: %w", err)
		}
		a.Refused = append(a.Refused, ipam.Refusal{Prefix: p, Reason: r.GetReason(), Kept: r.GetKept()})
		if r.GetHolder() != "" {
			a.Taken = append(a.Taken, p)
		}
	}
	return a, nil
}

// Claim implements cluster.Registry.
func (i *Identity) Claim(ctx context.Context, family ipam.Family, known []netip.Prefix) (netip.Prefix, error) {
	resp, err := i.client.ClaimRange(ctx, &identityv1.ClaimRangeRequest{
		Settings: i.settings, Ipv6: family == ipam.IPv6, KnownRanges: texts(known),
	})
	if err != nil {
		return netip.Prefix{}, failed("claim a block", err)
	}
	return netip.ParsePrefix(resp.GetRange())
}

// Return implements cluster.Registry.
func (i *Identity) Return(ctx context.Context, p netip.Prefix) error {
	_, err := i.client.ReturnRange(ctx, &identityv1.ReturnRangeRequest{Range: p.String()})
	if err != nil {
		return failed("return "+p.String(), err)
	}
	return nil
}

// CheckReuse implements cluster.Registry.
func (i *Identity) CheckReuse(ctx context.Context, addresses []netip.Addr, scarce bool) (out cluster.Reuse, err error) {
	req := &identityv1.CheckReuseRequest{Scarce: scarce}
	for _, a := range addresses {
		req.Addresses = append(req.Addresses, a.String())
	}
	resp, err := i.client.CheckReuse(ctx, req)
	switch {
	case status.Code(err) == codes.Unimplemented:
		return out, nil // an earlier version of the service, without this check
	case err != nil:
		return out, failed("ask whether released addresses may be allocated again", err)
	}
	switch {
	case !resp.GetModeKnown():
		return cluster.Reuse{
			Asks: true, Unknown: true, Why: "the datapath has not registered its routing mode",
		}, nil
	case resp.GetMode() != identityv1.RoutingMode_ROUTING_MODE_NATIVE:
		return out, nil
	}
	out.Asks = true
	for j, r := range resp.GetAddresses() {
		if j >= len(addresses) {
			break
		}
		switch {
		case r.GetReusable():
			out.Free = append(out.Free, addresses[j])
		case out.Why == "":
			out.Why = r.GetReason()
		}
	}
	return out, nil
}

func texts(ranges []netip.Prefix) (out []string) {
	for _, p := range ranges {
		out = append(out, p.String())
	}
	return out
}

// failed adds the attempted action to an error. If the pool has no free block, the result also wraps ErrPoolFull.
func failed(what string, err error) error {
	s := status.Convert(err)
	if s.Code() == codes.ResourceExhausted {
		return fmt.Errorf("%s: %w: %s", what, cluster.ErrPoolFull, s.Message())
	}
	return fmt.Errorf("%s: %w", what, errors.New(s.Message()))
}
