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

// TestFormerNameOfMaxBlocksPerNodeWorks, and counts if it is set.
func TestFormerNameOfMaxBlocksPerNodeWorks(t *testing.T) {
	for _, c := range []struct {
		now, former, want int
		problem           string
	}{
		{16, 0, 16, ""},
		{16, 8, 8, ""},
		{64, 0, 64, ""},
		{0, 0, 0, "maxBlocksPerNode"},
		{65, 0, 0, "maxBlocksPerNode"},
		{16, 65, 0, "clusterPool.maxBlocks"},
		{16, -1, 0, "clusterPool.maxBlocks"},
	} {
		s := defaults(instance.Paths{StateDir: "/var/lib/sluice"})
		s.Mode, s.Identity, s.MaxBlocksPerNode, s.ClusterPool.MaxBlocks = modePool, "/run/identity.sock", c.now, c.former
		err := s.Validate()
		switch {
		case c.problem == "" && (err != nil || s.agreed.MaxBlocks != c.want):
			t.Errorf("%+v: %d blocks, %v", c, s.agreed.MaxBlocks, err)
		case c.problem != "" && (err == nil || !strings.Contains(err.Error(), c.problem)):
			t.Errorf("%+v: %v", c, err)
		}
	}
}
