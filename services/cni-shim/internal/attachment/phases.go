// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package attachment

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/cni-shim/internal/cni"
)

// phases are the consecutive parts of an invocation's duration.
type phases struct {
	start time.Time // of the process
	name  string    // of the phase that is under way
	since time.Time
	ended []slog.Attr
}

// begin ends the phase that is under way.
func (p *phases) begin(name string) {
	now := time.Now()
	p.ended = append(p.ended, slog.Float64(p.name, milliseconds(now.Sub(p.since))))
	p.name, p.since = name, now
}

// milliseconds, to a microsecond.
func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// outcome is the result of a verb, for its line in the log; zero: it did nothing.
type outcome struct {
	msg   string
	attrs []slog.Attr
}

// did sets the outcome.
func (p *Plugin) did(msg string, attrs ...slog.Attr) { p.outcome = outcome{msg, attrs} }

// Report writes the one log line of an invocation, if it changed or refused something: its outcome, its duration and
// the durations of its phases.
func (p *Plugin) Report(ctx context.Context, err error) {
	p.phases.begin("")
	level, msg, attrs := slog.LevelInfo, p.outcome.msg, p.outcome.attrs
	var refused *cni.Error
	switch {
	case errors.As(err, &refused):
		level, msg = slog.LevelWarn, "refused"
		attrs = []slog.Attr{slog.Uint64(log.KeyCode, uint64(refused.Code)), slog.String(log.KeyError, refused.Error())}
	case msg == "":
		level, msg = slog.LevelDebug, "done"
	}
	attrs = append(attrs, slog.String(log.KeyDuration, p.phases.since.Sub(p.phases.start).String()),
		slog.Attr{Key: "phases_ms", Value: slog.GroupValue(p.phases.ended...)})
	if p.waits.total > 0 {
		attrs = append(attrs, slog.Float64("waited_ms", milliseconds(p.waits.total)), slog.Int("repeated", p.waits.repeated))
	}
	p.log.LogAttrs(ctx, level, msg, attrs...) //nolint:sloglint // one of the constants given to did
}
