// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"

	"github.com/sluice-net/sluice/kit/desired/loop"
)

// Confirmation is the answer of Confirm.
type Confirmation struct {
	Revision uint64
	Policies int
	Held     []string // subscribers that held an earlier state, with why
}

// Confirm says that what the owner has is what shall be enforced, whatever its
// subscribers enforced before. To validate changes nothing.
func (o *Owner) Confirm(ctx context.Context, validateOnly bool) (Confirmation, error) {
	return loop.Ask(ctx, o.loop, opOther, func() (Confirmation, error) {
		out := Confirmation{Revision: o.publisher.barrier.Policy, Policies: len(o.policies.all), Held: o.publisher.held()}
		if validateOnly {
			return out, nil
		}
		o.config.Log.Warn("policies confirmed: subscribers that hold an earlier state take them over", "revision", out.Revision, "policies", out.Policies, "held", out.Held)
		o.publish() // what was before has entries of its own
		o.publisher.confirm()
		o.sources.gate.Open()
		return out, nil
	})
}
