// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpc

import (
	"net"
	"net/netip"
)

// SourceOf returns the addresses that a limit counts as one client: an IPv4 address, or the /64 of an IPv6 address,
// whose other bits the client can choose. It returns the zero Prefix if a is not an IP address with a port.
func SourceOf(a net.Addr) netip.Prefix {
	at, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Prefix{}
	}
	ip, bits := at.Addr().Unmap(), 64
	if ip.Is4() {
		bits = 32
	}
	return netip.PrefixFrom(ip.WithZone(""), bits).Masked()
}
