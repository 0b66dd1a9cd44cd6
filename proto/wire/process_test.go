// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package wire

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
)

// level is a LogLevel whose configured level is info.
type level struct{ slog.LevelVar }

func (l *level) String() string { return strings.ToLower(l.Level().String()) }

func (l *level) Set(text string, dryRun bool) (before, after string, err error) {
	before = l.String()
	if text == "" {
		text = "info"
	}
	if dryRun {
		return before, text, nil
	}
	err = l.UnmarshalText([]byte(text))
	return before, l.String(), err
}

func TestProcessWithoutAStatusSaysItsVersion(t *testing.T) {
	var l level
	began := time.Unix(1_700_000_000, 0)
	without := NewProcess("", "", nil, func(func(key, value, source string)) {}, &l, slog.New(slog.DiscardHandler))
	with := without.Started("v1", began)
	for _, c := range []struct {
		Process
		version string
		start   *timestamppb.Timestamp
	}{{without, "", nil}, {with, "v1", timestamppb.New(began)}} {
		r, err := c.GetConfig(t.Context(), &statusv1.GetConfigRequest{})
		if err != nil || r.GetVersion() != c.version || !proto.Equal(r.GetStartTime(), c.start) {
			t.Errorf("%v, %v, want the version %q", r, err, c.version)
		}
	}
}

// TestSetLogLevelChangesTheLevelAndLogsIt: the change is logged if the level before or after the change includes the
// line.
func TestSetLogLevelChangesTheLevelAndLogsIt(t *testing.T) {
	var out bytes.Buffer
	var l level
	p := NewProcess("", "", nil, func(func(key, value, source string)) {}, &l,
		slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: &l})))
	for _, step := range []struct {
		set, previous, level statusv1.LogLevel
		lines                int
	}{
		{statusv1.LogLevel_LOG_LEVEL_DEBUG, statusv1.LogLevel_LOG_LEVEL_INFO, statusv1.LogLevel_LOG_LEVEL_DEBUG, 1},
		{statusv1.LogLevel_LOG_LEVEL_ERROR, statusv1.LogLevel_LOG_LEVEL_DEBUG, statusv1.LogLevel_LOG_LEVEL_ERROR, 1},
		{statusv1.LogLevel_LOG_LEVEL_ERROR, statusv1.LogLevel_LOG_LEVEL_ERROR, statusv1.LogLevel_LOG_LEVEL_ERROR, 0},
		{0, statusv1.LogLevel_LOG_LEVEL_ERROR, statusv1.LogLevel_LOG_LEVEL_INFO, 1}, // the configured level
	} {
		out.Reset()
		tried, err := p.SetLogLevel(t.Context(), &statusv1.SetLogLevelRequest{Level: step.set, ValidateOnly: true})
		if err != nil || tried.GetPrevious() != step.previous || tried.GetLevel() != step.level || out.Len() > 0 {
			t.Errorf("%s as a dry run: %v, %v, %s", step.set, tried, err, out.String())
		}
		r, err := p.SetLogLevel(t.Context(), &statusv1.SetLogLevelRequest{Level: step.set})
		if err != nil || r.GetPrevious() != step.previous || r.GetLevel() != step.level {
			t.Errorf("%s: %v, %v", step.set, r, err)
		}
		if got := strings.Count(out.String(), "log level is set"); got != step.lines {
			t.Errorf("%s: %d lines, want %d: %s", step.set, got, step.lines, out.String())
		}
		c, err := p.GetConfig(t.Context(), &statusv1.GetConfigRequest{})
		if err != nil || c.GetLogLevel() != step.level {
			t.Errorf("%s: GetConfig has %s, %v", step.set, c.GetLogLevel(), err)
		}
	}
	_, err := Process{}.SetLogLevel(t.Context(), &statusv1.SetLogLevelRequest{})
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("without a log: %v", err)
	}
}
