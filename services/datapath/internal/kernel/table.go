// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"
	"net/netip"
)

// NodeClass is the kernel's own number of a class of peers that every table of
// the node treats alike, 1 to MaxNodeClass. It is stable over restarts: the
// maps hold the key of each number.
type NodeClass uint16

// MaxNodeClass is the largest number of a node class.
const MaxNodeClass NodeClass = 32768 - 1

// ClassKey is what a node class is, the same in every run of whoever made it.
// The zero key is nobody's.
type ClassKey [16]byte

// Kind is the coarse sort of a peer, 0 to 7, as in enum sl_kind.
type Kind uint8

// Scope says which address rules reach a peer, 0 to 2, as in enum sl_scope.
type Scope uint8

// IdentityWord is what the programs know of an identity. The zero value is an
// identity that nobody announced.
type IdentityWord struct {
	Class NodeClass
	Kind  Kind
	Scope Scope
	Known bool
}

// TableRule is what the programs know of a rule.
type TableRule struct {
	Action uint8  // enum sl_action: 0 deny, 1 redirect, 2 allow, 3 pass
	Tier   uint8  // 0 Admin, 1 Normal, 2 Isolation, 3 Baseline
	Proxy  uint16 // kind of proxy of a redirect, else 0
}

// Fanout is the number of entries in a PortNode.
const Fanout = 16

// PortNode is a node of a tree of intervals over protocol << 16 | port: the
// first entry whose High is not below the point is taken. High ascends, unused
// entries repeat the last one, and the last High of a root is 0xFFFFFFFF.
type PortNode struct {
	High [Fanout]uint32
	// Value of an entry: with bit 31 the index of another node in the same
	// table; else bits 30 to 16 the number of an Admin rule (0x7FFF: none),
	// bits 15 to 0 that of another tier's (0xFFFF: none).
	Value [Fanout]uint32
}

// Block is a block of addresses with a class per scope.
type Block struct {
	Prefix  netip.Prefix // masked
	Classes [3]uint16
}

// TableContent is one direction of one policy.
type TableContent struct {
	// Hash is the caller's name for what does not change in place: the rules,
	// the ports and the defaults. Not zero.
	Hash         [32]byte
	DefaultAllow bool // what no rule decides is allowed
	HostAllow    bool // what no rule decides is allowed for the own host
	HasAddresses bool // the address side has to be asked
	// DefaultClasses are those of peers without a row, by kind.
	DefaultClasses [8]uint16
	// AddressClasses are those of addresses in no block, by scope.
	AddressClasses [3]uint16
	Rules          []TableRule // number 1 first
	Classes        []uint32    // class to the index of its root in Nodes
	Nodes          []PortNode
	Peers          map[NodeClass]uint16 // node class to class
	Blocks         []Block              // sorted when read back
}

// TableInfo is a line about a table.
type TableInfo struct {
	ID                                   Table
	Hash                                 [32]byte
	Rules, Classes, Nodes, Peers, Blocks int
}

// NoRoomError says that a table does not fit. Nothing of it was written. It
// wraps ErrFull.
type NoRoomError struct {
	// Map is the name of the map that is too small.
	Map string
	// Need is the number of entries that the table, or the change of it, takes;
	// Free how many there are for it; Limit how many one table may have in all:
	// a quarter of the map.
	Need, Free, Limit int
}

// Error names the map and the figures.
func (e *NoRoomError) Error() string {
	return fmt.Sprintf("map %s: %d entries needed, %d free, at most %d for one table", e.Map, e.Need, e.Free, e.Limit)
}

// Unwrap makes the error an ErrFull.
func (e *NoRoomError) Unwrap() error { return ErrFull }

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
