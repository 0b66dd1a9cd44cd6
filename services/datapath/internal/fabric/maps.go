// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package fabric

import "net/netip"

// Flags say how packets to a node travel.
type Flags uint16

// The flags.
const (
	// Overlay: in the tunnel.
	Overlay Flags = 1 << iota
	// Underlay6: packets of the tunnel are IPv6.
	Underlay6
	// Hop: the node's own address is the next hop on the device.
	Hop
	// Lookup: the kernel's routes say the next hop.
	Lookup
)

// Way is how packets of one family travel to a node; the zero Way: they do not.
type Way struct {
	Ifindex uint32
	MTU     uint16 // largest packet of a pod, bytes
	Flags   Flags
}

// Node is another node by its addresses.
type Node struct {
	IPv4, IPv6 netip.Addr   // the preferred ones; invalid: none
	Addrs      []netip.Addr // all that its packets may come from, at most 16
}

// Entry is a node in the maps, with the ways of IPv4 and IPv6 packets.
type Entry struct {
	Node
	Ways [2]Way
}

// Local is how this node sends.
type Local struct {
	Overlay, Native bool
	TunnelIfindex   uint32
}

// Maps are what the programs read of other nodes.
type Maps interface {
	// SetNode writes the entry of a number. The same again changes nothing; another
	// IPv4 or IPv6 address is an error while the number lives.
	SetNode(number uint16, n Node) error
	// SetWays writes how packets of each family travel to a node, each at once.
	SetWays(number uint16, ipv4, ipv6 Way) error
	// RemoveNode removes an entry. That there is none is no error.
	RemoveNode(number uint16) error
	SetLocal(l Local) error
	// Nodes are all entries.
	Nodes() (map[uint16]Entry, error)
}
