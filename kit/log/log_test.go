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
