// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package service

import (
	"context"
	"fmt"
	"slices"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/manifest"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
)

// sourceKubernetes is the only source whose Services can use selectors, because Kubernetes creates the endpoint slices.
const sourceKubernetes = "kubernetes"

// addHints adds notes about Services that are valid but probably not intended. The change is already made, so if a
// service of the node does not answer, notes that need it are omitted.
func addHints(ctx context.Context, inv *invocation.Invocation, changes []*lbv1.ObjectChange,
	docs []manifest.Document,
) {
	if len(docs) != len(changes) {
		return
	}
	for i, ch := range changes {
		key := ch.GetKey()
		if key.GetKind() != kindService {
			continue
		}
		r, err := invocation.Ask(ctx, inv, invocation.LoadBalancer, client.GetService,
			&lbv1.GetServiceRequest{Namespace: key.GetNamespace(), Name: key.GetName()})
		if err != nil {
			continue // not stored, or no answer
		}
		if docs[i].Selector && r.GetService().GetEndpoints() == 0 && !hasSlice(changes, docs, key) &&
			!withKubernetes(ctx, inv) {
			ch.Notes = append(ch.Notes, "its selector has no effect without Kubernetes: apply an EndpointSlice with the "+
				"label kubernetes.io/service-name: "+key.GetName())
		}
		for _, address := range r.GetService().GetAddresses() {
			m, err := invocation.Ask(ctx, inv, invocation.Cluster, identityv1.ClusterServiceClient.GetIPMapping,
				&identityv1.GetIPMappingRequest{Address: address})
			switch {
			case err != nil: // unassigned, or unknown
			case m.GetRangeNode() != "":
				ch.Notes = append(ch.Notes, fmt.Sprintf("its address %s is in the pod CIDR %s of node %s, so a pod may have "+
					"the same address", address, m.GetRange(), m.GetRangeNode()))
			}
		}
	}
}

// hasSlice reports whether the change contains an endpoint slice of the Service.
func hasSlice(changes []*lbv1.ObjectChange, docs []manifest.Document, service *lbv1.ObjectKey) bool {
	for i, ch := range changes {
		key := ch.GetKey()
		if key.GetKind() == kindSlice && key.GetNamespace() == service.GetNamespace() &&
			docs[i].Service == service.GetName() {
			return true
		}
	}
	return false
}

// withKubernetes reports whether the load balancer follows an API server. It returns true if the load balancer does not
// answer.
func withKubernetes(ctx context.Context, inv *invocation.Invocation) bool {
	r, err := invocation.Ask(ctx, inv, invocation.LoadBalancer, client.GetStatus, &lbv1.GetStatusRequest{})
	return err != nil || slices.ContainsFunc(r.GetSources(), func(s *lbv1.SourceStatus) bool {
		return s.GetName() == sourceKubernetes
	})
}
