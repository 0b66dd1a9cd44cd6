// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build modules

package underlay

import (
	"slices"
	"strings"
	"testing"
)

// TestKernelUplinkOfABondOrVLANIsTheUpperDevice tests that only the upper device gets the programs, also after it was
// created again. The device types are modules of the kernels that scripts/test-kernels boots.
func TestKernelUplinkOfABondOrVLANIsTheUpperDevice(t *testing.T) {
	for name, c := range map[string]struct {
		upper         string
		patterns      []string
		make, members []string
	}{
		"VLAN": {
			upper: "upper0", make: []string{"link add link uplink0 name upper0 type vlan id 5"},
			members: []string{"uplink0"},
		},
		"bond": {
			upper: "upper0", make: []string{
				"link add upper0 type bond mode active-backup miimon 10", "link set uplink0 down",
				"link set uplink0 master upper0", "link set spare0 master upper0",
			},
			members: []string{"uplink0", "spare0"}, patterns: []string{"upper0", "uplink*", "spare0"},
		},
		"VLAN of a bond": {
			upper: "upper0", make: []string{
				"link add bond0 type bond mode active-backup miimon 10", "link set uplink0 down",
				"link set uplink0 master bond0", "link set spare0 master bond0", "link set bond0 up",
				"link add link bond0 name upper0 type vlan id 5",
			},
			members: []string{"uplink0", "spare0", "bond0"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.ip(t, "link add spare0 type veth peer name spare1", "addr flush dev uplink0")
			up := []string{"link set upper0 up", "addr add 192.0.2.1/24 dev upper0"}
			n.ip(t, append(c.make, up...)...)
			// the setting matches members, too
			n.Underlay = n.open(t, Options{Uplinks: listed(programs(t)), Devices: c.patterns})
			ensure := func(when string) {
				t.Helper()
				names, devices := n.uplinks(t, "192.0.2.1")
				if !slices.Equal(names, []string{c.upper}) {
					t.Fatalf("%s: uplinks %v, want %s", when, names, c.upper)
				}
				if err := n.EnsureUplinks(devices, true); err != nil {
					t.Fatal(err)
				}
				if got, all := n.attached(t, c.upper), n.allOn(t, c.upper); !slices.Equal(got, all) {
					t.Errorf("%s: %s has %v, want %v", when, c.upper, got, all)
				}
				for _, m := range c.members {
					if got := n.attached(t, m); len(got) > 0 {
						t.Errorf("%s: %s has %v, want none", when, m, got)
					}
				}
			}
			ensure("at first")
			n.ip(t, "link del "+c.upper)
			again := c.make[len(c.make)-1:]
			if name == "bond" {
				again = c.make
			}
			n.ip(t, append(slices.Clone(again), up...)...)
			ensure("made again")
		})
	}
}

// TestKernelVLANWhoseFramesKeepTheirTagIsNamed: programs on such a device cannot parse IP.
func TestKernelVLANWhoseFramesKeepTheirTagIsNamed(t *testing.T) {
	n := newNode(t)
	n.ip(t, "addr flush dev uplink0", "link add link uplink0 name upper0 type vlan id 5 reorder_hdr off",
		"link set upper0 up", "addr add 192.0.2.1/24 dev upper0")
	n.Underlay = n.open(t, Options{Uplinks: listed(programs(t))})
	_, devices := n.uplinks(t, "192.0.2.1")
	if err := n.EnsureUplinks(devices, true); err == nil || !strings.Contains(err.Error(), "reorder_hdr") {
		t.Errorf("%v, want the flag by name", err)
	}
	n.ip(t, "link set upper0 type vlan reorder_hdr on")
	if err := n.EnsureUplinks(devices, true); err != nil {
		t.Error(err)
	}
}
