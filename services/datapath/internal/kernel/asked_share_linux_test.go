// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"testing"
)

// TestKernelAskedAddressesOfOtherNodesStayInTheirRing: if a pod of another node sends datagrams to the host
// from and to ever new ports, there are at most as many records as the UDP ring has positions.
func TestKernelAskedAddressesOfOtherNodesStayInTheirRing(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	pod := f.b.pod
	const ring, rounds = 131072 / 8, 3
	packets := make([][]byte, ring)
	for round := range rounds {
		for i := range packets {
			datagram := udp(uint16(1024+i), uint16(9000+round))
			packets[i] = vxlan(uint32(pod.Identity), frame(f.a.pod.MAC, pod.MAC, etherIPv4,
				ip4Header{src: pod.IPv4, dst: f.a.over4, proto: protoUDP}.with(datagram)))
		}
		f.forge(t, f.b.ns, f.a.addr4, packets...)
	}
	if n := len(f.a.askedRecords(t)); n > ring || n < ring/2 {
		t.Errorf("%d records of requested addresses, want <= %d", n, ring)
	}
}
