// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"strings"
	"testing"
)

// TestPluginAnswersAPerson: a runtime passes no arguments, and whatever it passes is no question.
func TestPluginAnswersAPerson(t *testing.T) {
	for _, arg := range []string{"--version", "--help", "-h"} {
		if text, ok := about([]string{arg}); !ok || !strings.HasPrefix(text, "sluice-cni ") {
			t.Errorf("%s: %q, %v", arg, text, ok)
		}
	}
	for _, args := range [][]string{nil, {}, {"ADD"}, {"--version", "--help"}} {
		if text, ok := about(args); ok {
			t.Errorf("%q: %q", args, text)
		}
	}
}
