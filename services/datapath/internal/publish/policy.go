// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package publish

import (
	"context"
	"errors"
	"fmt"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/policysync"
	"github.com/sluice-net/sluice/services/datapath/internal/policytable"
)

// Judges implements endpoint.Policies.
type Judges struct {
	Policy *policysync.Applier
}

// Await implements endpoint.Policies.
func (j Judges) Await(ctx context.Context, identity uint32) error {
	return judgement(j.Policy.Await(ctx, identity))
}

// judgement gives the core's meaning to why nothing judges an endpoint.
func judgement(err error) error {
	switch {
	case errors.Is(err, policytable.ErrNoCapacity):
		return fmt.Errorf("%w: %w", endpoint.ErrFull, err)
	case errors.Is(err, policysync.ErrUnavailable):
		return fmt.Errorf("%w: %w", endpoint.ErrUnavailable, err)
	}
	return err
}

// Of implements endpoint.Policies.
func (j Judges) Of(slot uint16) (endpoint.Policy, bool) {
	p, ok := j.Policy.Of(slot)
	return endpoint.Policy{
		Revision: p.Revision, EgressTable: uint16(p.Egress), IngressTable: uint16(p.Ingress), Generation: p.Generation,
		Refusal: p.Refusal, Audit: p.Audit, Pending: p.Pending(),
	}, ok
}
