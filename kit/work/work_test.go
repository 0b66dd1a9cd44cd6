// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package work_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/work"
)

// TestEveryGoesOnAfterAnError: errors are logged with the name of the work, and calls continue
// until the context ends.
func TestEveryGoesOnAfterAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lines bytes.Buffer
		ctx, cancel := context.WithCancel(t.Context())
		calls := 0
		err := work.Every(ctx, time.Minute, slog.New(slog.NewTextHandler(&lines, nil)), "count", func() error {
			calls++
			if calls == 3 {
				cancel()
			}
			return errors.New("no capacity")
		})
		if !errors.Is(err, context.Canceled) || calls != 3 {
			t.Errorf("ended with %v after %d calls", err, calls)
		}
		if n := strings.Count(lines.String(), "work=count"); n != 2 || !strings.Contains(lines.String(), "no capacity") {
			t.Errorf("the log has %d lines about it: %s", n, &lines)
		}
	})
}
