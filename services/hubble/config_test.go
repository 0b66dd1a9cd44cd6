// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/flowmetrics"
)

func TestSettingsAreThoseOfTheDocumentation(t *testing.T) {
	want, err := process.Reference("hubble", defaults)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("../../docs/reference/hubble.md")
	if err != nil {
		t.Fatal(err)
	}
	// Settings common to all services are documented once, elsewhere.
	own := strings.TrimSpace(want[strings.Index(want, "| `stateDir`"):])
	if !strings.Contains(string(doc), own) {
		t.Errorf("docs/reference/hubble.md does not have these rows:\n%s", own)
	}
	for _, name := range append(flowmetrics.Names, flowmetrics.Labels...) {
		if !strings.Contains(string(doc), "`"+name+"`") {
			t.Errorf("docs/reference/hubble.md does not name %s", name)
		}
	}
}

func TestWrongSettingsAreNamed(t *testing.T) {
	c := defaults(instance.Paths{RunDir: "/run/sluice", StateDir: "/var/lib/sluice"})
	if err := c.Validate(); err != nil {
		t.Fatalf("the defaults: %v", err)
	}
	c.StateDir, c.Datapath, c.Shares.TenantLabel = "x", "y", ""
	c.History.MaxSize, c.History.MaxAge = 1, 8*maxAge
	c.FlowMetrics.Enabled = []string{"dns"}
	err := c.Validate()
	for _, key := range []string{
		"stateDir", "datapath", "history.maxSize", "history.maxAge", "shares.tenantLabel", "flowMetrics",
	} {
		if err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%v does not name %s", err, key)
		}
	}
}
