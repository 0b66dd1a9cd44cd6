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

func TestAddressForPeersCanBeReached(t *testing.T) {
	for want, l := range map[string]ListenConfig{
		"unix:///run/x.sock": {}, "10.0.0.1:4244": {Address: "10.0.0.1:4244"},
		"node-1:4245": {Address: ":4244", Advertise: "node-1:4245"},
	} {
		if got := l.advertised("/run/x.sock"); got != want {
			t.Errorf("%+v: %s, want %s", l, got, want)
		}
	}
	for _, address := range []string{":4244", "0.0.0.0:4244", "[::]:4244"} {
		if got := (ListenConfig{Address: address}).advertised("/x"); got != "unix:///x" {
			t.Errorf("%s: %s", address, got)
		}
	}
}

func TestWrongSettingsAreNamed(t *testing.T) {
	c := defaults(instance.Paths{RunDir: "/run/sluice", StateDir: "/var/lib/sluice"})
	if err := c.Validate(); err != nil {
		t.Fatalf("the defaults: %v", err)
	}
	c.StateDir, c.Datapath, c.Identity = "x", "y", "z"
	c.History.MaxSize, c.History.MaxAge = 1, 8*maxAge
	c.FlowMetrics.Enabled, c.Policy, c.Page.Address = []string{"http"}, "p", "0.0.0.0:4246"
	c.History.Export = ExportConfig{File: "e", Allow: "{", MaxSize: 1}
	c.Listen.Address, c.Listen.Key = "4244", "tls.key"
	err := c.Validate()
	for _, key := range []string{
		"stateDir", "datapath", "identity", "history.maxSize", "history.maxAge", "flowMetrics",
		"listen.address", "listen.cert", "listen.key", "listen.clientCA", "policy", "page.address",
		"history.export.file", "history.export: allow", "history.export.maxSize", "history.export.backups",
	} {
		if err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%v does not name %s", err, key)
		}
	}
}
