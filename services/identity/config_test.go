// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/process"
)

func TestSettingsAreThoseOfTheDocumentation(t *testing.T) {
	want, err := process.Reference("identity", func(p instance.Paths) Config {
		c := defaults(p)
		c.Node = "the host's name"
		return c
	})
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("../../docs/reference/identity.md")
	if err != nil {
		t.Fatal(err)
	}
	// Settings that all services share are documented once, elsewhere.
	_, own, ok := strings.Cut(want, "\n| `node`")
	if own = "| `node`" + strings.TrimSpace(own); !ok || !strings.Contains(string(doc), own) {
		t.Errorf("docs/reference/identity.md does not have these rows:\n%s", own)
	}
}
