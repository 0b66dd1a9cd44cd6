// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernelmaps

import (
	"context"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policysync"
)

// Policies implements endpoint.Policies.
type Policies struct {
	Policy *policysync.Applier
}

// Await implements endpoint.Policies.
func (p Policies) Await(ctx context.Context, identity uint32) error {
	return translate(p.Policy.Await(ctx, identity))
}

// Prepare implements endpoint.Policies.
func (p Policies) Prepare(ctx context.Context, identity uint32) error {
	return translate(p.Policy.Prepare(ctx, identity))
}

// Of implements endpoint.Policies.
func (p Policies) Of(slot uint16) (endpoint.Policy, bool) {
	e, ok := p.Policy.Of(slot)
	return endpoint.Policy{
		Revision: e.Revision, EgressTable: uint16(e.Egress), IngressTable: uint16(e.Ingress), Epoch: e.Epoch,
		Refusal: e.Refusal, Audit: e.Audit, Pending: e.Pending(),
	}, ok
}
