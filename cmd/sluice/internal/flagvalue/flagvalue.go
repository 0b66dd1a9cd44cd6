// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package flagvalue parses values of filter flags.
package flagvalue

import (
	"net/netip"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
)

// Prefix parses a prefix, whose host bits it clears, or an address.
func Prefix(flag, text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	if err != nil {
		a, err := netip.ParseAddr(text)
		if err != nil || a.Zone() != "" {
			return p, invocation.Usagef("%s: %q is neither an address nor a prefix", flag, text)
		}
		p = netip.PrefixFrom(a, a.BitLen())
	}
	return p.Masked(), nil
}

// Port parses a port.
func Port(flag, text string) (uint16, error) {
	p, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return 0, invocation.Usagef("%s: %q is not a port", flag, text)
	}
	return uint16(p), nil
}

// Protocol parses the name or the number of an IP protocol.
func Protocol(flag, text string) (uint8, error) {
	if n, ok := ports.Protocols[strings.ToLower(text)]; ok {
		return uint8(n), nil
	}
	n, err := strconv.ParseUint(text, 10, 8)
	if err != nil {
		return 0, invocation.Usagef("%s: %q is not a protocol", flag, text)
	}
	return uint8(n), nil
}
