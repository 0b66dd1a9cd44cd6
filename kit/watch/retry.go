// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package watch

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/sluice-net/sluice/kit/rpc/client"
)

// absentPause is the longest pause while the server's socket refuses connections.
const absentPause = 100 * time.Millisecond

// Retry calls attempt, which follows a server, again and again until ctx ends, and then returns nil. It calls failed
// with the error of each attempt; an error of failed ends Retry.
//
// The pause after an attempt is random. Its bound is first least and doubles up to most. After an attempt that lasted
// longer than most, the bound is least again. While the server's socket refuses connections, the pause is at most
// absentPause, because an attempt costs only one system call.
func Retry(
	ctx context.Context, least, most time.Duration, attempt func(context.Context) error, failed func(error) error,
) error {
	pause := least
	for {
		began := time.Now()
		err := attempt(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err := failed(err); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		if time.Since(began) > most {
			pause = least
		}
		if absent := (*client.AbsentError)(nil); errors.As(err, &absent) {
			pause = min(pause, absentPause)
		}
		select {
		case <-time.After(pause/2 + rand.N(pause/2+1)):
		case <-ctx.Done():
			return nil
		}
		pause = min(2*pause, most)
	}
}
