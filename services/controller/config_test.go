// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/process"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestSettingsAreThoseOfTheDocumentation(t *testing.T) {
	want, err := process.Reference("controller", defaults)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("../../docs/reference/controller.md")
	if err != nil {
		t.Fatal(err)
	}
	// Settings that every service has are documented once, elsewhere.
	_, own, ok := strings.Cut(want, "\n| `stateDir`")
	if own = "| `stateDir`" + strings.TrimSpace(own); !ok || !strings.Contains(string(doc), own) {
		t.Errorf("docs/reference/controller.md does not have these rows:\n%s", own)
	}
}

// TestSharesHaveTheDefaultsOfTheNodes: the status tells how nodes treat a policy, so the controller must have the
// same limits as the nodes.
func TestSharesHaveTheDefaultsOfTheNodes(t *testing.T) {
	doc, err := os.ReadFile("../../docs/reference/policy.md")
	if err != nil {
		t.Fatal(err)
	}
	own, err := process.Reference("controller", defaults)
	if err != nil {
		t.Fatal(err)
	}
	compared := 0
	for line := range strings.Lines(own) {
		key, _, _ := strings.Cut(strings.TrimPrefix(line, "| `"), "`")
		for _, group := range []string{"cluster.", "limits.", "shares."} {
			if !strings.HasPrefix(key, group) {
				continue
			}
			compared++
			if of := strings.ReplaceAll(line, "SLUICE_CONTROLLER_", "SLUICE_POLICY_"); !strings.Contains(string(doc), of) {
				t.Errorf("the setting %s of sluice-policy differs, want %q", key, of)
			}
		}
	}
	if compared < 10 {
		t.Errorf("%d settings were compared", compared)
	}
}

func TestWrongSettingsAreNamed(t *testing.T) {
	c := defaults(instance.Paths{RunDir: "/run/sluice", StateDir: "/var/lib/sluice"})
	c.Kubernetes.API = []string{"https://192.0.2.1:6443"}
	if err := c.Validate(); err != nil {
		t.Fatalf("the defaults with an API server: %v", err)
	}
	c.StateDir, c.Identity, c.Kubernetes.API, c.Election.Lease = "x", "y", nil, ""
	err := c.Validate()
	for _, key := range []string{"stateDir", "identity", "kubernetes", "election"} {
		if err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%v does not name %s", err, key)
		}
	}
}
