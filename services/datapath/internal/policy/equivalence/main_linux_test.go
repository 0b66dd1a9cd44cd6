// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package equivalence tests that the kernel evaluates every packet as the policy engine does. The
// engine writes tables, and questions with its answers. The tests write the tables to real maps in
// the same way as a policy service's tables, and run the programs on packets.
package equivalence

import (
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

// openKernel opens maps and programs of its own.
func openKernel(t testing.TB) (k *kernel.Kernel, dir string) {
	t.Helper()
	dir = kerneltest.NewBPFFS(t)
	// pod ranges and tunnel port that no question uses
	k, err := kernel.Open(t.Context(), kernel.Options{
		Dir:             dir,
		PodCIDRs:        []netip.Prefix{netip.MustParsePrefix("198.19.255.0/24"), netip.MustParsePrefix("2001:2:ffff::/64")},
		TunnelPorts:     []uint16{65535},
		EventsPerSecond: 1 << 30,
		// subjects of the vectors may have any identity
		ReservedEndpoints: true,
	})
	if err != nil {
		t.Fatalf("open the kernel's maps and programs: %v", err)
	}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return k, dir
}
