// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package podrange

import (
	"strings"
	"testing"
	"time"
)

func TestNoteIsReadAsItWasWritten(t *testing.T) {
	at := time.Date(2026, 11, 27, 12, 0, 5, 700, time.FixedZone("east", 3600))
	n := Note{State: Exhausted, Since: at, Message: `10.1.0.0/29 "is" full`}
	const want = `{"state":"exhausted","since":"2026-11-27T11:00:05Z","message":"10.1.0.0/29 \"is\" full"}`
	if got := n.String(); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	got, err := Parse(n.String())
	if err != nil || got.String() != want || !got.Since.Equal(at.Truncate(time.Second)) {
		t.Errorf("read as %+v, %v", got, err)
	}
}

func TestNotesOfOthersAreRefused(t *testing.T) {
	const since = `"since":"2026-11-27T11:00:05Z"`
	for name, text := range map[string]string{
		"nothing":       ``,
		"no JSON":       `full`,
		"another state": `{"state":"odd",` + since + `}`,
		"no state":      `{` + since + `}`,
		"no time":       `{"state":"exhausted"}`,
		"too long":      `{"state":"exhausted",` + since + `,"message":"` + strings.Repeat("x", maxText) + `"}`,
	} {
		if got, err := Parse(text); err == nil {
			t.Errorf("%s: read as %+v", name, got)
		}
	}
}
