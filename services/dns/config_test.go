// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/process"
)

func TestSettingsAreThoseOfTheDocumentation(t *testing.T) {
	want, err := process.Reference("dns", defaults)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("../../docs/reference/dns.md")
	if err != nil {
		t.Fatal(err)
	}
	// Settings common to all services are documented once, elsewhere.
	own := strings.TrimSpace(want[strings.Index(want, "| `stateDir`"):])
	if !strings.Contains(string(doc), own) {
		t.Errorf("docs/reference/dns.md does not have these rows:\n%s", own)
	}
}

func TestWrongSettingsAreNamed(t *testing.T) {
	c := defaults(instance.Paths{RunDir: "/run/sluice", StateDir: "/var/lib/sluice"})
	if err := c.Validate(); err != nil {
		t.Fatalf("the defaults: %v", err)
	}
	c.LearnFrom, c.NeverLearn = []string{"10.96.0.10", "fd00::/64"}, []string{"198.51.100.7/24"}
	if err := c.Validate(); err != nil || c.learnFrom[0].String() != "10.96.0.10/32" ||
		c.neverLearn[0].String() != "198.51.100.0/24" {
		t.Errorf("%v, %v, %v", err, c.learnFrom, c.neverLearn)
	}
	c.StateDir, c.Policy, c.Identity, c.Names, c.Hold = "x", "y", "z", NamesConfig{}, time.Minute
	c.Datapath, c.ProxySocket, c.Events = "v", "w", "some"
	c.SearchDomains, c.LearnFrom, c.NeverLearn = []string{"a..b"}, []string{"x"}, []string{"fe80::1%eth0", "10.0.0.0/40"}
	err := c.Validate()
	for _, key := range []string{
		"stateDir", "policy", "identity", "datapath", "proxySocket", "names.max", "names.addresses", "hold", "events",
		"searchDomains", "learnFrom[0]", "neverLearn[0]", "neverLearn[1]",
	} {
		if err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%v does not name %s", err, key)
		}
	}
}
