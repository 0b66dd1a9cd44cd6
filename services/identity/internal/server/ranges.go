// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// mayRegister checks whether the caller may set these parts of a registration.
func mayRegister(ctx context.Context, req *identityv1.RegisterNodeRequest) error {
	cred, ok := rpc.PeerCred(ctx)
	var part string
	switch {
	case !ok:
		return nil // the server rejects callers without credentials
	case cred.UID == instance.IPAMID && req.Underlay != nil:
		part = "underlay"
	case cred.UID == instance.DatapathID && req.PodRanges != nil:
		part = "pod_ranges"
	case cred.UID == instance.DatapathID && req.Ipam != nil:
		part = "ipam"
	case cred.UID == instance.DatapathID && req.Labels != nil:
		part = "labels"
	default:
		return nil
	}
	return forbidden(cred.UID, "register the "+part+" of the node")
}

var ipamModes = map[identityv1.IPAMMode]registry.IPAMMode{
	identityv1.IPAMMode_IPAM_MODE_UNSPECIFIED: registry.IPAMUnset,
	identityv1.IPAMMode_IPAM_MODE_STATIC:      registry.IPAMStatic,
	identityv1.IPAMMode_IPAM_MODE_KUBERNETES:  registry.IPAMKubernetes,
	identityv1.IPAMMode_IPAM_MODE_POOL:        registry.IPAMPool,
}

// fromIPAM converts settings in a field of a request; nil if they are not set.
func fromIPAM(field string, s *identityv1.IPAMSettings) (*registry.IPAM, error) {
	if s == nil {
		return nil, nil //nolint:nilnil // the request has no settings
	}
	if s.GetMode() == identityv1.IPAMMode_IPAM_MODE_UNSPECIFIED {
		return nil, invalid(field+".mode", errors.New("is not set"))
	}
	out := registry.IPAM{
		Mode: ipamModes[s.GetMode()], IPv4Block: int(s.GetIpv4BlockLength()), IPv6Block: int(s.GetIpv6BlockLength()),
		MaxBlocks: int(s.GetMaxBlocks()),
	}
	for i, text := range s.GetPoolPrefixes() {
		p, err := prefixOf(text)
		if err != nil {
			return nil, invalid(fmt.Sprintf("%s.pool_prefixes[%d]", field, i), err)
		}
		out.Pool = append(out.Pool, p)
	}
	if name, err := out.Check(); err != nil {
		return nil, invalid(field+"."+name, err)
	}
	slices.SortFunc(out.Pool, netip.Prefix.Compare)
	return &out, nil
}

// ClaimRange implements the service.
func (c *Cluster) ClaimRange(ctx context.Context, req *identityv1.ClaimRangeRequest) (*identityv1.ClaimRangeResponse,
	error,
) {
	settings, err := fromIPAM("settings", req.GetSettings())
	if err != nil {
		return nil, err
	}
	if settings.Blocks(req.GetIpv6()) == 0 {
		return nil, invalid("ipv6", errors.New("the pool has no prefix of that family"))
	}
	var known []netip.Prefix
	for i, text := range req.GetKnownRanges() {
		p, err := prefixOf(text)
		if err != nil {
			return nil, invalid(fmt.Sprintf("known_ranges[%d]", i), err)
		}
		known = append(known, p)
	}
	if req.GetValidateOnly() {
		return &identityv1.ClaimRangeResponse{}, statusOf(c.Registry.ValidateClaim(ctx, *settings))
	}
	p, err := c.Registry.ClaimRange(ctx, *settings, req.GetIpv6(), known)
	if err != nil {
		return nil, statusOf(err)
	}
	return &identityv1.ClaimRangeResponse{Range: p.String()}, nil
}

// ReturnRange implements the service.
func (c *Cluster) ReturnRange(ctx context.Context,
	req *identityv1.ReturnRangeRequest,
) (*identityv1.ReturnRangeResponse, error) {
	p, err := prefixOf(req.GetRange())
	if err != nil {
		return nil, invalid("range", err)
	}
	returned, err := c.Registry.ReturnRange(ctx, p, req.GetValidateOnly())
	if err != nil {
		return nil, statusOf(err)
	}
	return &identityv1.ReturnRangeResponse{Returned: returned}, nil
}

// CheckReuse implements the service.
func (c *Cluster) CheckReuse(_ context.Context, req *identityv1.CheckReuseRequest) (*identityv1.CheckReuseResponse,
	error,
) {
	var addresses []netip.Addr
	for i, text := range req.GetAddresses() {
		a, err := wire.AddressOf(text)
		if err != nil {
			return nil, invalid(fmt.Sprintf("addresses[%d]", i), err)
		}
		addresses = append(addresses, a)
	}
	mode, known, all := c.Registry.CheckReuse(addresses, req.GetScarce())
	out := &identityv1.CheckReuseResponse{Mode: toMode(mode), ModeKnown: known}
	for _, r := range all {
		m := &identityv1.AddressReuse{Address: r.Address.String(), Reusable: r.OK, Reason: r.Reason}
		if r.Wait > 0 {
			m.Wait = durationpb.New(r.Wait)
		}
		out.Addresses = append(out.Addresses, m)
	}
	return out, nil
}

// ConfirmMappings implements the service.
func (c *Cluster) ConfirmMappings(_ context.Context, req *identityv1.ConfirmMappingsRequest,
) (*identityv1.ConfirmMappingsResponse, error) {
	at := req.GetApplied()
	silence, ok := c.Registry.NoteApplied(cluster.Point{Cluster: at.GetClusterId(), Revision: at.GetRevision()})
	out := &identityv1.ConfirmMappingsResponse{StaleMappings: durationpb.New(c.Registry.StaleMappings())}
	if ok {
		out.Silence = durationpb.New(silence)
	}
	return out, nil
}

// PublishPodCIDRs implements the service.
func (c *Cluster) PublishPodCIDRs(ctx context.Context, req *identityv1.PublishPodCIDRsRequest,
) (*identityv1.PublishPodCIDRsResponse, error) {
	nodes := make(map[string][]netip.Prefix, len(req.GetNodes()))
	for i, n := range req.GetNodes() {
		field := fmt.Sprintf("nodes[%d]", i)
		if _, again := nodes[n.GetName()]; again {
			return nil, invalid(field+".name", fmt.Errorf("%q comes twice", n.GetName()))
		}
		var ranges []netip.Prefix
		for j, text := range n.GetPodCidrs() {
			p, err := prefixOf(text)
			if err != nil {
				return nil, invalid(fmt.Sprintf("%s.pod_cidrs[%d]", field, j), err)
			}
			ranges = append(ranges, p)
		}
		nodes[n.GetName()] = ranges
	}
	if err := c.Registry.Assign(ctx, nodes); err != nil {
		return nil, statusOf(err)
	}
	return &identityv1.PublishPodCIDRsResponse{}, nil
}
