// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
)

func TestMain(m *testing.M) {
	servicetest.Main(main)
	leaktest.Main(m)
}

func TestSettingsAreThoseOfTheDocumentation(t *testing.T) {
	want, err := process.Reference("http", defaults)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("../../docs/reference/http.md")
	if err != nil {
		t.Fatal(err)
	}
	// Settings common to all services are documented once, elsewhere.
	own := strings.TrimSpace(want[strings.Index(want, "| `policy`"):])
	if !strings.Contains(string(doc), own) {
		t.Errorf("docs/reference/http.md does not have these rows:\n%s", own)
	}
}

func TestWrongSettingsAreNamed(t *testing.T) {
	c := defaults(instance.Paths{RunDir: "/run/sluice"})
	if err := c.Validate(); err != nil {
		t.Fatalf("the defaults: %v", err)
	}
	c = Config{Policy: "x", Datapath: "y"}
	err := c.Validate()
	for _, key := range []string{"policy", "datapath", "proxySocket"} {
		if err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%v does not name %s", err, key)
		}
	}
}

// TestProcessServesBeforeOthersRun: the process starts in any order, needs no capability, and tells its settings.
func TestProcessServesBeforeOthersRun(t *testing.T) {
	place := servicetest.NewPlace(t, instance.HTTPID)
	socket := filepath.Join(place.Dir, "run", "http.sock")
	at := func(name string) string { return filepath.Join(place.Dir, name) }
	p := servicetest.Start(t, place.Command(
		"--socket-path", socket, "--metrics-address", "127.0.0.1:0", "--policy", at("policy.sock"),
		"--datapath", at("datapath.sock"), "--proxy-socket", at("proxy.sock"),
	), socket, client.Options{WaitForReady: true})
	r, err := statusv1.NewProcessServiceClient(p.Conn).GetConfig(servicetest.Context(t), &statusv1.GetConfigRequest{})
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, s := range r.GetSettings() {
		found = found || s.GetKey() == "proxySocket" && s.GetValue() == at("proxy.sock")
	}
	if !found {
		t.Errorf("settings %v", r.GetSettings())
	}
	p.Stop()
}
