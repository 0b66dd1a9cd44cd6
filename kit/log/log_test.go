// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package log

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"testing"

	"github.com/sluice-net/sluice/kit/requestid"
)

func TestRequestIDOfTheContextIsInEveryRecord(t *testing.T) {
	var out bytes.Buffer
	l := New(&out, slog.LevelInfo).With("a", 1).WithGroup("g")
	ctx := requestid.Into(t.Context(), "r1")
	l.DebugContext(ctx, "below the level")
	l.InfoContext(ctx, "with", Err(errors.New("boom")))
	l.Info("without")
	dec := json.NewDecoder(&out)
	var with, without map[string]any
	if err := errors.Join(dec.Decode(&with), dec.Decode(&without)); err != nil {
		t.Fatalf("%v in %s", err, out.String())
	}
	if dec.More() {
		t.Error("a record below the level was written")
	}
	g, _ := with["g"].(map[string]any)
	if with["msg"] != "with" || g["request_id"] != "r1" || g["error"] != "boom" || with["a"] != 1.0 {
		t.Errorf("record is %v", with)
	}
	if _, ok := without["g"]; ok || without["msg"] != "without" {
		t.Errorf("record without a context is %v", without)
	}
}

func TestLevelTextIsReadBack(t *testing.T) {
	for _, text := range []string{"debug", "info", "warn", "error"} {
		var l Level
		if err := l.UnmarshalText([]byte(text)); err != nil || l.String() != text {
			t.Errorf("%s reads as %s, %v", text, l, err)
		}
	}
	for _, bad := range []string{"", "INFO", "trace"} {
		if err := new(Level).UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
	Discard().Error("nowhere")
	if a := Err(nil); !a.Equal(slog.Attr{}) {
		t.Errorf("Err(nil) = %v", a)
	}
}

func TestSwitchChangesTheLevelOfARunningLog(t *testing.T) {
	var out bytes.Buffer
	s := NewSwitch(Level(slog.LevelWarn))
	l := New(&out, s).With("a", 1)
	for _, step := range []struct{ set, before, after, written string }{
		{"debug", "warn", "debug", "debug info warn "},
		{"error", "debug", "error", ""},
		{"", "error", "warn", "warn "},
	} {
		if before, after, err := s.Set(step.set, true); err != nil || before != step.before || after != step.after ||
			s.String() != step.before {
			t.Errorf("%q as a dry run: %s to %s, %v, now %s", step.set, before, after, err, s)
		}
		before, after, err := s.Set(step.set, false)
		if err != nil || before != step.before || after != step.after || s.String() != step.after {
			t.Errorf("%q: %s to %s, %v, now %s", step.set, before, after, err, s)
		}
		out.Reset()
		l.Debug("debug")
		l.Info("info")
		l.Warn("warn")
		written := ""
		for dec := json.NewDecoder(&out); dec.More(); {
			var line struct{ Msg string }
			if err := dec.Decode(&line); err != nil {
				t.Fatal(err)
			}
			written += line.Msg + " "
		}
		if written != step.written {
			t.Errorf("at %s the log has %q, want %q", step.after, written, step.written)
		}
	}
	if _, _, err := s.Set("trace", false); err == nil || s.String() != "warn" {
		t.Errorf("trace: %v, now %s", err, s)
	}
}
