// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package wire

import (
	"slices"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/model/shares"
	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
)

// tenantsPerMessage is the maximum number of tenants in one message of ListShares.
const tenantsPerMessage = 1000

var tenantKinds = map[shares.Kind]sharesv1.TenantKind{
	shares.KindSystem:     sharesv1.TenantKind_TENANT_KIND_SYSTEM,
	shares.KindLabelled:   sharesv1.TenantKind_TENANT_KIND_LABELLED,
	shares.KindNamespace:  sharesv1.TenantKind_TENANT_KIND_NAMESPACE,
	shares.KindUnlabelled: sharesv1.TenantKind_TENANT_KIND_UNLABELLED,
}

// Tenant writes a tenant with its guarantee in percent; nil for no tenant.
func Tenant(t shares.Tenant, guarantee int) *sharesv1.Tenant {
	if t == (shares.Tenant{}) {
		return nil
	}
	return &sharesv1.Tenant{Kind: tenantKinds[t.Kind()], Name: t.Name(), Guarantee: uint32(max(0, guarantee))}
}

// ReadTenant reads a tenant. A tenant without a known kind is the namespace without a name.
func ReadTenant(t *sharesv1.Tenant) (tenant shares.Tenant, guarantee int) {
	for kind, sent := range tenantKinds {
		if sent == t.GetKind() {
			return shares.TenantOf(kind, t.GetName()), int(min(t.GetGuarantee(), shares.MaxGuarantees))
		}
	}
	return shares.Namespace(""), 0
}

// SendEndpointShares sends a limit with the shares of endpoints.
func SendEndpointShares(
	limit *sharesv1.Limit, all []*sharesv1.EndpointShare, stream grpc.ServerStreamingServer[sharesv1.ListSharesResponse],
) error {
	if len(all) == 0 {
		return stream.Send(&sharesv1.ListSharesResponse{Limit: limit})
	}
	for some := range slices.Chunk(all, tenantsPerMessage) {
		if err := stream.Send(&sharesv1.ListSharesResponse{Limit: limit, Endpoints: some}); err != nil {
			return err
		}
	}
	return nil
}

// SendShares answers ListShares with the shares of tenants in the limits of a process.
func SendShares(
	all []shares.Usage, req *sharesv1.ListSharesRequest, stream grpc.ServerStreamingServer[sharesv1.ListSharesResponse],
) error {
	for _, u := range all {
		limit := &sharesv1.Limit{
			Name: u.Limit.Name, Size: uint64(max(0, u.Limit.Size)), Asked: uint64(u.Asked), Used: uint64(u.Used),
		}
		var tenants []*sharesv1.TenantShare
		for _, t := range u.Tenants {
			if req.GetTenant() == "" || t.Tenant.Name() == req.GetTenant() {
				tenants = append(tenants, &sharesv1.TenantShare{
					Kind: tenantKinds[t.Tenant.Kind()], Name: t.Tenant.Name(), Asked: uint64(t.Asked),
					Admitted: uint64(t.Admitted), Guarantee: uint64(t.Guarantee), Allotment: uint64(t.Allotment),
				})
			}
		}
		if len(tenants) == 0 {
			if err := stream.Send(&sharesv1.ListSharesResponse{Limit: limit}); err != nil {
				return err
			}
		}
		for some := range slices.Chunk(tenants, tenantsPerMessage) {
			if err := stream.Send(&sharesv1.ListSharesResponse{Limit: limit, Tenants: some}); err != nil {
				return err
			}
		}
	}
	return nil
}
