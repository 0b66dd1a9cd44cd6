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
	want, err := process.Reference(service, defaults)
	if err != nil {
		t.Fatal(err)
	}
	const file = "../../docs/endpoints.md"
	doc, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	// What every service takes is documented once, elsewhere.
	_, own, ok := strings.Cut(want, "\n| `stateDir`")
	own = "| `stateDir`" + strings.TrimSpace(own)
	if ok && strings.Contains(string(doc), own) {
		return
	}
	t.Errorf("docs/endpoints.md does not have these rows:\n%s", own)
}
