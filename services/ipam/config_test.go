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
	want, err := process.Reference("ipam", defaults)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("../../docs/ipam.md")
	if err != nil {
		t.Fatal(err)
	}
	// What every service takes is documented once, elsewhere.
	own := strings.Index(want, "| `mode`")
	want, _, _ = strings.Cut(want, "| `kubernetes.node`") // its default is the machine's name
	if own < 0 || !strings.Contains(string(doc), strings.TrimSpace(want[own:])) {
		t.Errorf("docs/ipam.md does not have these rows:\n%s", want[max(own, 0):])
	}
}
