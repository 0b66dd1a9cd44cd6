// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"cmp"
	"slices"

	"google.golang.org/grpc"

	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
)

// Budgets reports the budgets of endpoints in the maps of connections; family 0 is IPv4.
type Budgets interface {
	// Use returns how many connections an endpoint, or conntrack.Outside, has and may have; most 0: no limit.
	Use(s endpointmap.ID, family int) (used, most int)
	// Capacity returns the maximum number of connections.
	Capacity(family int) int
}

// ListShares implements SharesService.
func (s *Server) ListShares(
	req *sharesv1.ListSharesRequest, stream grpc.ServerStreamingServer[sharesv1.ListSharesResponse],
) error {
	if s.policy != nil {
		if err := wire.SendShares(s.policy.Tables.Shares(), req, stream); err != nil {
			return err
		}
	}
	return s.sendEndpointShares(req.GetTenant(), stream)
}

// sharedLimit is a limit that endpoints share.
type sharedLimit struct {
	bound.Bound
	size, guarantee int
	use             func(endpointmap.ID) (used, most int)
}

// sharedLimits returns the limits in the order in which they are sent.
func (s *Server) sharedLimits() (all []sharedLimit) {
	if s.budgets != nil {
		for family, of := range [2]bound.Bound{bound.Connections4, bound.Connections6} {
			all = append(all, sharedLimit{of, s.budgets.Capacity(family), 0, func(slot endpointmap.ID) (used, most int) {
				return s.budgets.Use(slot, family)
			}})
		}
	}
	for _, of := range bound.Counted() {
		size := s.bounds.Size(of)
		if size == 0 {
			continue
		}
		all = append(all, sharedLimit{of, size, s.bounds.Guarantee(of), func(slot endpointmap.ID) (used, most int) {
			switch {
			case slot == conntrack.Outside:
				return s.bounds.Outside(of)
			case slot == endpointmap.HostID && of == bound.Events:
				return 0, 0 // not limited
			}
			return s.bounds.Held(of, slot), s.bounds.Most(of, slot)
		}})
	}
	for _, of := range []bound.Bound{bound.Answers, bound.TooBig} {
		rate := bound.Rate(of)
		all = append(all, sharedLimit{of, rate, 0, func(slot endpointmap.ID) (used, most int) {
			return s.bounds.Taken(of, slot), rate
		}})
	}
	return all
}

// sendEndpointShares sends the endpoints' usage of the programs' limits; if tenant is not empty, only for endpoints of
// that tenant.
func (s *Server) sendEndpointShares(
	tenant string, stream grpc.ServerStreamingServer[sharesv1.ListSharesResponse],
) error {
	if s.bounds == nil {
		return nil
	}
	endpoints := s.endpoints.Report.List()
	for _, l := range s.sharedLimits() {
		var all []*sharesv1.EndpointShare
		total := 0
		add := func(slot endpointmap.ID, kind sharesv1.EndpointKind, e endpoint.Endpoint, of string) {
			used, most := l.use(slot)
			x := &sharesv1.EndpointShare{
				Kind: kind, Used: uint64(used), Guarantee: uint64(l.guarantee), Most: uint64(most),
				Refused: s.bounds.Refusals(l.Bound, slot),
			}
			total += used
			if used == 0 && x.GetRefused() == 0 || tenant != "" && of != tenant {
				return
			}
			if kind == sharesv1.EndpointKind_ENDPOINT_KIND_CONTAINER {
				x.Owner, x.Pod = wire.Owner(e.Spec.Owner), wire.Pod(e.Spec.Pod)
			} else {
				x.Guarantee = 0
			}
			all = append(all, x)
		}
		for _, e := range endpoints {
			if e.Slot != 0 {
				add(e.Slot, sharesv1.EndpointKind_ENDPOINT_KIND_CONTAINER, e, e.Identity.Tenant.Name())
			}
		}
		inside := total
		add(endpointmap.HostID, sharesv1.EndpointKind_ENDPOINT_KIND_HOST, endpoint.Endpoint{}, "")
		add(conntrack.Outside, sharesv1.EndpointKind_ENDPOINT_KIND_OUTSIDE, endpoint.Endpoint{}, "")
		slices.SortStableFunc(all, func(a, b *sharesv1.EndpointShare) int { return cmp.Compare(b.GetUsed(), a.GetUsed()) })
		if l.Bound == bound.Connections4 || l.Bound == bound.Connections6 {
			inside = total // all share one map
		}
		limit := &sharesv1.Limit{
			Name: l.Bound.String(), Size: uint64(l.size), Asked: uint64(inside), Used: uint64(inside), ByEndpoint: true,
		}
		if err := wire.SendEndpointShares(limit, all, stream); err != nil {
			return err
		}
	}
	return nil
}
