// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"

	"github.com/sluice-net/sluice/kit/desired/loop"
)

// Confirmation is the result of Confirm.
type Confirmation struct {
	Revision uint64
	Policies int
	Held     []string // subscribers that still enforced an earlier state, with the reason
}

// Confirm makes all subscribers enforce the current policies, including subscribers that hold an earlier state. With
// validateOnly it only returns which subscribers these are.
func (o *Owner) Confirm(ctx context.Context, validateOnly bool) (Confirmation, error) {
	return loop.Ask(ctx, o.loop, opOther, func() (Confirmation, error) {
		out := Confirmation{Revision: o.publisher.barrier.Policy, Policies: len(o.policies.all), Held: o.publisher.held()}
		if validateOnly {
			return out, nil
		}
		o.config.Log.Warn("policies confirmed: subscribers that hold an earlier state switch to them", "revision",
			out.Revision, "policies", out.Policies, "held", out.Held)
		o.publish() // earlier changes must not share a log entry with the confirmation
		o.publisher.confirm()
		o.sources.gate.Open()
		return out, nil
	})
}
