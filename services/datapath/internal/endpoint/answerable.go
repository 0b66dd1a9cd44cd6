// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"context"
	"time"
)

// answerTime is what of a caller's time is left for the answer, at most: when the
// caller's deadline has passed, nobody reads what was waited for.
const answerTime = 500 * time.Millisecond

// Answerable ends a little before the deadline of ctx.
func Answerable(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline.Add(-min(answerTime, time.Until(deadline)/8)))
}
