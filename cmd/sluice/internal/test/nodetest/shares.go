// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetest

import (
	"google.golang.org/grpc"

	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// tenants returns the limits of one process, the first limit in two messages.
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
	if t.process != "datapath" {
		return nil
	}
	return stream.Send(&sharesv1.ListSharesResponse{
		Limit: &sharesv1.Limit{Name: "translations-ipv4", Size: 14336, Asked: 7200, Used: 7200, ByEndpoint: true},
		Endpoints: []*sharesv1.EndpointShare{
			{
				Kind:  sharesv1.EndpointKind_ENDPOINT_KIND_CONTAINER,
				Owner: &workloadv1.Owner{ContainerId: "0123456789abcdef", InterfaceName: "eth0"},
				Pod:   &workloadv1.PodReference{Namespace: "shop", Name: "web", Uid: "5"},
				Used:  7168, Guarantee: 3584, Most: 7168, Refused: 12,
			},
			{
				Kind:  sharesv1.EndpointKind_ENDPOINT_KIND_CONTAINER,
				Owner: &workloadv1.Owner{ContainerId: "fedcba9876543210", InterfaceName: "eth0"},
				Used:  32, Guarantee: 3584, Most: 3584,
			},
			{Kind: sharesv1.EndpointKind_ENDPOINT_KIND_OUTSIDE, Used: 40, Most: 16384},
		},
	})
}
