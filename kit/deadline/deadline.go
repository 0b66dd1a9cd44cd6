// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package deadline keeps a part of a caller's time for the answer to it.
package deadline

import (
	"context"
	"time"
)

// answerTime is what of a caller's time is left for the answer, at most: when the
// caller's deadline has passed, nobody reads what was waited for.
const answerTime = 500 * time.Millisecond

// Answerable ends a little before the deadline of ctx: half a second, or an eighth of
// what is left if that is less. What a service waits for ends with it, so that the
// caller reads what that was and not that its time has passed.
func Answerable(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline.Add(-min(answerTime, time.Until(deadline)/8)))
}
