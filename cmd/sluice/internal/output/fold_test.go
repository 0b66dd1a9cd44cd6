// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package output

import (
	"strings"
	"testing"
)

func TestFoldBreaksAtColumnsThenClausesThenWords(t *testing.T) {
	word, list := strings.Repeat("x", 60), strings.Repeat("key=value,", 15)
	for _, tt := range []struct{ line, want string }{
		{"short  line", "short  line"},
		{word + "  " + "a b " + word, word + "\n    a b " + word},
		{word + ": said; or " + word, word + ": said;\n    or " + word},
		{word + " " + word, word + "\n    " + word},
		{strings.Repeat("y", 100), strings.Repeat("y", 100)},
		{strings.Repeat("y", 100) + " z", strings.Repeat("y", 100) + "\n    z"},
		{strings.Repeat("y", 130) + " z", strings.Repeat("y", 130) + "\n    z"},
		{strings.Repeat("y", 130), strings.Repeat("y", 130)},
		{strings.Repeat("ü", 100), strings.Repeat("ü", 100)},
		{list, list[:100] + "\n    " + list[100:]},
		// One column that is followed by a long one does not stand alone.
		{"a  " + list[:len(list)-1], "a  key=value," + list[10:90] + "\n    " + list[90:len(list)-1]},
	} {
		if got := Fold(tt.line); got != tt.want {
			t.Errorf("%q:\n%q, want\n%q", tt.line, got, tt.want)
		}
	}
}
