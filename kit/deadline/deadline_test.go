// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package deadline_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/deadline"
)

func TestAnswerableLeavesAnEighthAndAtMostHalfASecond(t *testing.T) {
	for given, left := range map[time.Duration]time.Duration{
		80 * time.Millisecond: 10 * time.Millisecond,
		4 * time.Second:       500 * time.Millisecond,
		time.Minute:           500 * time.Millisecond,
	} {
		synctest.Test(t, func(t *testing.T) {
			caller, cancel := context.WithTimeout(t.Context(), given)
			defer cancel()
			ctx, cancel := deadline.Answerable(caller)
			defer cancel()
			<-ctx.Done()
			at, _ := caller.Deadline()
			if got := time.Until(at); got != left {
				t.Errorf("deadline in %s: the context ends in %s, want %s", given, got, left)
			}
		})
	}
}

func TestAnswerableEndsWithItsCaller(t *testing.T) {
	caller, leave := context.WithCancel(t.Context())
	ctx, cancel := deadline.Answerable(caller)
	defer cancel()
	if _, limited := ctx.Deadline(); limited || ctx.Err() != nil {
		t.Errorf("without a deadline: limited %t, %v", limited, ctx.Err())
	}
	leave()
	if ctx.Err() == nil {
		t.Error("the context continues after its parent was cancelled")
	}
}
