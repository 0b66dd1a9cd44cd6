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

// phases measures the consecutive parts of an invocation.
type phases struct {
	start time.Time // start of the process
	name  string    // name of the current phase
	since time.Time
	ended []slog.Attr
}

// begin ends the current phase and begins the next one.
func (p *phases) begin(name string) {
	now := time.Now()
	p.ended = append(p.ended, slog.Float64(p.name, milliseconds(now.Sub(p.since))))
	p.name, p.since = name, now
}

// milliseconds converts a duration, with a resolution of a microsecond.
func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// outcome is the result of a verb for the log line; zero if the verb did nothing.
type outcome struct {
	msg   string
	attrs []slog.Attr
}

// did sets the outcome.
func (p *Plugin) did(msg string, attrs ...slog.Attr) { p.outcome = outcome{msg, attrs} }

// Report writes the log line of an invocation, with the outcome, the duration and the durations of the phases. It
// writes no line if the invocation neither changed nor refused anything.
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
