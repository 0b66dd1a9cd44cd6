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
	doc, err := os.ReadFile("../../docs/reference/ipam.md")
	if err != nil {
		t.Fatal(err)
	}
	// Settings that all services share are documented once, elsewhere.
	own := strings.Index(want, "| `mode`")
	want, _, _ = strings.Cut(want, "| `kubernetes.node`") // its default is the machine's name
	if own < 0 || !strings.Contains(string(doc), strings.TrimSpace(want[own:])) {
		t.Errorf("docs/reference/ipam.md does not have these rows:\n%s", want[max(own, 0):])
	}
}

// TestFormerNameOfMaxBlocksPerNodeWorks: the former name of the setting takes precedence if it is set.
func TestFormerNameOfMaxBlocksPerNodeWorks(t *testing.T) {
	for _, c := range []struct {
		now, former, want int
		problem           string
	}{
		{16, 0, 16, ""},
		{16, 8, 8, ""},
		{32, 0, 32, ""},
		{0, 0, 0, "maxBlocksPerNode"},
		{33, 0, 0, "maxBlocksPerNode"},
		{16, 33, 0, "clusterPool.maxBlocks"},
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

// TestPoolsLieWithinTheStaticRanges: other nodes would ignore pools outside the static ranges.
func TestPoolsLieWithinTheStaticRanges(t *testing.T) {
	for _, c := range []struct {
		mode     string
		pools    []string
		prefixes []string
		problem  string
		agreed   int // prefixes
	}{
		{modeStatic, []string{"10.0.0.0/8"}, nil, "", 0},
		{modeStatic, []string{"10.1.1.0/24", "fd00:1:0:1::/64"}, []string{"10.1.0.0/16", "fd00:1::/48"}, "", 2},
		{modeStatic, []string{"10.1.1.128/25"}, []string{"10.1.0.0/16"}, "", 1},
		{modeStatic, []string{"10.1.0.0/23"}, []string{"10.1.0.0/16"}, "pools[0]: 10.1.0.0/23 is not within", 1},
		{modeStatic, []string{"10.1.1.0/24", "10.2.1.0/24"}, []string{"10.1.0.0/16"}, "pools[1]", 1},
		{modeStatic, []string{"fd00:1:0:1::/64"}, []string{"10.1.0.0/16"}, "pools[0]", 1},
		{modeStatic, []string{"10.1.1.0/24"}, []string{"10.1.1.0/25"}, "staticRanges.prefixes[0]", 1},
		{modeStatic, []string{"10.1.1.0/24"}, []string{"10.1.0.0"}, "staticRanges.prefixes[0]", 0},
		{modeKubernetes, []string{"10.1.1.0/24"}, []string{"10.2.0.0/16"}, "", 0},
	} {
		s := defaults(instance.Paths{StateDir: "/var/lib/sluice"})
		s.Mode, s.Pools, s.StaticRanges.Prefixes, s.Kubernetes.API = c.mode, c.pools, c.prefixes, []string{"https://192.0.2.1"}
		err := s.Validate()
		switch {
		case len(s.agreed.Prefixes) != c.agreed:
			t.Errorf("%+v: all nodes agree on %v", c, s.agreed.Prefixes)
		case c.problem == "" && err != nil, c.problem != "" && (err == nil || !strings.Contains(err.Error(), c.problem)):
			t.Errorf("%+v: %v", c, err)
		case c.agreed > 0 && s.agreed.MaxBlocks != 16:
			t.Errorf("%+v: a node has at most %d ranges", c, s.agreed.MaxBlocks)
		}
	}
}
