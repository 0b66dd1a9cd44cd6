// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import "net/netip"

// TableVerdict is what a table says, and by which entries.
type TableVerdict struct {
	Action uint8  // enum sl_action, never pass
	Proxy  uint16 // kind of proxy of a redirect
	Rule   uint16 // number of the deciding rule, 0 if none decided
	By     uint8  // enum sl_by
	// IdentityClass is the class of the identity side; IdentityRow says whether
	// a row of the table gave it, and not a default.
	IdentityClass uint16
	IdentityRow   bool
	// AddressClass is the class of the address side if the table asks it, and
	// AddressBlock the block that gave it; not valid: a default did.
	AddressClass uint16
	AddressBlock netip.Prefix
}

// MapUsage says how full a map is.
type MapUsage struct {
	Name       string
	Entries    int // in use
	MaxEntries uint32
	Bytes      uint64 // memory as the kernel accounts it, 0 if unknown
}
