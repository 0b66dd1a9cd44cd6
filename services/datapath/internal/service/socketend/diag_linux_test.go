// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package socketend

import (
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// TestKernelThatListsNoSocketsOfAProtocolIsKnown: a kernel without udp_diag reports every socket as missing. No kernel
// can list sockets of the protocol 255.
func TestKernelThatListsNoSocketsOfAProtocolIsKnown(t *testing.T) {
	c, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		if !lists(c, family, unix.IPPROTO_UDP) {
			t.Errorf("family %d: sockets of UDP are not listed", family)
		}
		if lists(c, family, 255) {
			t.Errorf("family %d: sockets of the protocol 255 are listed", family)
		}
	}
}
