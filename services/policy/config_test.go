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
	want, err := process.Reference("policy", defaults)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("../../docs/reference/policy.md")
	if err != nil {
		t.Fatal(err)
	}
	// Settings that every service has are documented once, elsewhere.
	_, own, ok := strings.Cut(want, "\n| `stateDir`")
	if own = "| `stateDir`" + strings.TrimSpace(own); !ok || !strings.Contains(string(doc), own) {
		t.Errorf("docs/reference/policy.md does not have these rows:\n%s", own)
	}
}

// TestStatusIsNotWrittenHere: a process that was started with the Kubernetes manifests of an earlier version, which
// set status.write, must not run as the policy service of a node.
func TestStatusIsNotWrittenHere(t *testing.T) {
	c := defaults(instance.Paths{RunDir: "/run/sluice", StateDir: "/var/lib/sluice"})
	c.Kubernetes.API, c.Kubernetes.Status.Write = []string{"https://192.0.2.1:6443"}, true
	if err := c.Validate(); err == nil || !strings.Contains(err.Error(), "sluice-controller") {
		t.Errorf("%v does not name sluice-controller", err)
	}
	c.Kubernetes.Status.Write = false
	if err := c.Validate(); err != nil {
		t.Errorf("the defaults with an API server: %v", err)
	}
}
