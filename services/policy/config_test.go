// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/process"
)

func TestSettingsAreThoseOfTheDocumentation(t *testing.T) {
	want, err := process.Reference("policy", defaults)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("../../docs/policy.md")
	if err != nil {
		t.Fatal(err)
	}
	// What every service takes is documented once, elsewhere.
	_, own, ok := strings.Cut(want, "\n| `stateDir`")
	if own = "| `stateDir`" + strings.TrimSpace(own); !ok || !strings.Contains(string(doc), own) {
		t.Errorf("docs/policy.md does not have these rows:\n%s", own)
	}
}
