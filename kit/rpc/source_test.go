// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpc

import (
	"net"
	"net/netip"
	"testing"
)

// TestSourceOf: a client cannot count as several by the bits of its address that it chooses.
func TestSourceOf(t *testing.T) {
	for address, want := range map[string]string{
		"192.0.2.1:5": "192.0.2.1/32", "[::ffff:192.0.2.1]:5": "192.0.2.1/32", "[2001:db8::1]:5": "2001:db8::/64",
		"[fe80::1%eth0]:5": "fe80::/64",
	} {
		at := net.TCPAddrFromAddrPort(netip.MustParseAddrPort(address))
		if got := SourceOf(at); got.String() != want {
			t.Errorf("%s counts as %s, want %s", address, got, want)
		}
	}
	if got := SourceOf(&net.UnixAddr{Name: "/run/s"}); got.IsValid() {
		t.Errorf("a unix socket counts as %s", got)
	}
}
