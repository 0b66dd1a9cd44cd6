// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nearest

import "testing"

func TestHintIsTheNearestWord(t *testing.T) {
	words := []string{"status", "endpoint", "dropped", "audited", "list", "label"}
	for text, want := range map[string]string{
		"stauts": "; did you mean status?", "lst": "; did you mean list?", "audted": "; did you mean audited?",
		"endpoin": "; did you mean endpoint?", "nonsense": "", "x": "", "": "",
	} {
		if got := Hint(text, words); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
