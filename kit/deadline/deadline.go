// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package deadline reserves part of a caller's deadline for sending the answer.
package deadline

import (
	"context"
	"time"
)

// answerTime is the maximum time that is reserved for the answer: a caller stops reading at its deadline.
const answerTime = 500 * time.Millisecond

// Answerable returns a context that ends shortly before the deadline of ctx: half a second, or an
// eighth of the remaining time if that is less. A service waits under this context, so that its
// caller receives the specific error instead of DEADLINE_EXCEEDED.
func Answerable(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline.Add(-min(answerTime, time.Until(deadline)/8)))
}
