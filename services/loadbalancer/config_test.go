// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

func TestSettingsAreThoseOfTheDocumentation(t *testing.T) {
	want, err := process.Reference("loadbalancer", defaults)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("../../docs/reference/loadbalancer.md")
	if err != nil {
		t.Fatal(err)
	}
	// Settings common to all services are documented once, elsewhere.
	_, own, ok := strings.Cut(want, "\n| `stateDir`")
	if own = "| `stateDir`" + strings.TrimSpace(own); !ok || !strings.Contains(string(doc), own) {
		t.Errorf("docs/reference/loadbalancer.md does not have these rows:\n%s", own)
	}
}

func TestReservedPorts(t *testing.T) {
	for text, want := range map[string]compile.Reserved{
		"udp/4789":             {Protocol: service.UDP, Port: 4789},
		"tcp/10.0.0.1/8:6443":  {Prefix: netip.MustParsePrefix("10.0.0.0/8"), Protocol: service.TCP, Port: 6443},
		"udp/[fd00::/8]:8472":  {Prefix: netip.MustParsePrefix("fd00::/8"), Protocol: service.UDP, Port: 8472},
		"SCTP/1":               {Protocol: service.SCTP, Port: 1},
		"udp":                  {},
		"icmp/1":               {},
		"udp/0":                {},
		"udp/65536":            {},
		"udp/10.0.0.0:1":       {},
		"udp/10.0.0.0/33:4789": {},
	} {
		got, err := parseReserved(text)
		if (err != nil) != (want == compile.Reserved{}) || err == nil && got != want {
			t.Errorf("%q: %+v, %v; want %+v", text, got, err, want)
		}
	}
}

func TestWrongSettingsAreNamed(t *testing.T) {
	c := defaults(instance.Paths{RunDir: "/run/sluice", StateDir: "/var/lib/sluice"})
	if err := c.Validate(); err != nil || len(c.reserved) != 2 {
		t.Fatalf("the defaults: %v, %+v", err, c.reserved)
	}
	c.StateDir, c.Sources.Directory, c.Sources.Identity, c.HealthChecks.Address = "x", "y", "w", "z"
	c.ExternalIPs.Allow, c.Backends.Reserved = []string{"10.0.0.0/8", "no"}, []string{"no"}
	c.Limits.Services, c.Limits.Manifests, c.Subscribers.Linger = 0, 0, -1
	err := c.Validate()
	for _, key := range []string{
		"stateDir", "sources.directory", "sources.identity", "healthChecks.address", "externalIPs.allow[1]",
		"backends.reserved[0]", "limits.services", "limits.manifests", "subscribers.linger",
	} {
		if err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%v does not name %s", err, key)
		}
	}
}
