// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package names

import (
	"net/netip"
)

// Reason is the reason for which an address was not learned.
type Reason uint8

// The reasons.
const (
	Learned Reason = iota // it was learned
	// Special addresses belong to no external server: unspecified, loopback, link-local, multicast, broadcast.
	Special
	// Cluster addresses belong to a node, a pod, the API server or a range of pods. Policies select these by labels
	// and entities.
	Cluster
	// Configured addresses are in the setting neverLearn.
	Configured
	// NameFull means that the name has the maximum number of valid addresses.
	NameFull
	// NamesShare means that the table has no capacity for the name: the pod is above its guarantee.
	NamesShare
	// AddressesShare means that the table has no capacity for the address: the pod is above its guarantee.
	AddressesShare
	// Server means that no addresses are learned from the server that answered (setting learnFrom).
	Server
	// NotSelected means that no rule of the pod that asked selects the name.
	NotSelected
	// NotEnforced means that sluice-policy had no capacity for the address, or did not answer in time.
	NotEnforced
)

// special lists prefixes in addition to the classes that package netip knows.
var special = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),          // "this network": on Linux, 0.0.0.0 reaches the local host
	netip.MustParsePrefix("255.255.255.255/32"), // broadcast
	netip.MustParsePrefix("::/96"),              // deprecated form with an IPv4 address; contains :: and ::1
	netip.MustParsePrefix("fec0::/10"),          // deprecated site-local addresses
}

// isSpecial reports whether an address cannot belong to an external server.
func isSpecial(a netip.Addr) bool {
	if !a.IsGlobalUnicast() || a.Zone() != "" { // also true for private addresses
		return true
	}
	for _, p := range special {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// Exclusions are addresses that are never learned, in addition to special ones. It is immutable.
type Exclusions struct {
	addrs    map[netip.Addr]Reason
	prefixes []exclusion
}

type exclusion struct {
	prefix netip.Prefix
	reason Reason
}

// NewExclusions returns the exclusions of prefixes, by reason.
func NewExclusions(byReason map[Reason][]netip.Prefix) *Exclusions {
	x := &Exclusions{addrs: make(map[netip.Addr]Reason)}
	for reason, list := range byReason {
		for _, p := range list {
			p = unmapped(p)
			if p.IsSingleIP() {
				x.addrs[p.Addr()] = reason
			} else {
				x.prefixes = append(x.prefixes, exclusion{p.Masked(), reason})
			}
		}
	}
	return x
}

func unmapped(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		return netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p
}

// Reason returns the reason why an address is never learned; Learned if it may be learned.
func (x *Exclusions) Reason(a netip.Addr) Reason {
	if isSpecial(a) {
		return Special
	}
	if x == nil {
		return Learned
	}
	if r, ok := x.addrs[a]; ok {
		return r
	}
	for _, p := range x.prefixes {
		if p.prefix.Contains(a) {
			return p.reason
		}
	}
	return Learned
}
