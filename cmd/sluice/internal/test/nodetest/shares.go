// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetest

import (
	"google.golang.org/grpc"

	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
)

// tenants answers with the limits of one process; in two messages for the first limit.
type tenants struct {
	sharesv1.UnimplementedSharesServiceServer
	process string
}

func (t tenants) ListShares(
	req *sharesv1.ListSharesRequest, stream grpc.ServerStreamingServer[sharesv1.ListSharesResponse],
) error {
	limit := &sharesv1.Limit{
		Name: map[string]string{
			"policy": "policies", "loadbalancer": "frontends", "identity": "numbers", "datapath": "tables",
		}[t.process],
		Size: 100, Asked: 140, Used: 90,
	}
	for _, s := range []*sharesv1.TenantShare{
		{Kind: sharesv1.TenantKind_TENANT_KIND_SYSTEM, Asked: 10, Admitted: 10, Allotment: 10},
		{Kind: sharesv1.TenantKind_TENANT_KIND_LABELLED, Name: "acme", Asked: 20, Admitted: 20, Guarantee: 10, Allotment: 20},
		{Kind: sharesv1.TenantKind_TENANT_KIND_NAMESPACE, Name: "shop", Asked: 110, Admitted: 60},
	} {
		if req.GetTenant() != "" && req.GetTenant() != s.GetName() {
			continue
		}
		if err := stream.Send(&sharesv1.ListSharesResponse{Limit: limit, Tenants: []*sharesv1.TenantShare{s}}); err != nil {
			return err
		}
	}
	return nil
}
