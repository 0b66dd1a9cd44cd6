// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package nodetable has policy tables as the maps of the node hold them, with the node's own
// numbers of tables and identity classes.
//
// policysync makes them from the steps of model/policytable and keeps the kernel in step with
// them; policymap stores them. The package reads and writes nothing.
package nodetable

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
)

// ID is the kernel's number of a table: one direction of one policy.
type ID uint16

// Tables with a fixed meaning.
const (
	// Deny denies everything. It is the zero value, so that an entry that was
	// never written fails closed.
	Deny ID = 0
	// Allow allows everything: nothing is enforced.
	Allow ID = 1
	// Pending stands for a policy that is not known yet: nothing may enter but
	// from the local host, and nothing may leave but answers to it that cannot
	// start a connection.
	Pending ID = 2
	// First is the smallest number of a table made from policies.
	First ID = 16
)

// IdentityClass is the kernel's number of an identity class: identities that
// every table of the node treats alike, 1 to MaxIdentityClass. It is stable over
// restarts, because the maps hold the key of each number. 0 is none.
type IdentityClass uint16

// MaxIdentityClass is the largest number of an identity class.
const MaxIdentityClass IdentityClass = 32768 - 1

// Identity is what the tables know of an identity: the kernel's packed entry
// for it. The zero value is an identity that was never announced.
type Identity struct {
	Class IdentityClass
	Kind  identity.Kind
	Scope identity.PeerScope
	Known bool
}

// KeyBetween is the key of the identity class that has an identity while some tables
// evaluate it as the old one and others as the new one.
func KeyBetween(old, to Identity) policytable.ClassKey {
	b := []byte("between")
	for _, w := range []Identity{old, to} {
		b = binary.LittleEndian.AppendUint16(b, uint16(w.Class))
		b = append(b, byte(w.Kind), byte(w.Scope), 0)
		if w.Known {
			b[len(b)-1] = 1
		}
	}
	sum := sha256.Sum256(b)
	return policytable.ClassKey(sum[:16])
}

// Content is one direction of one policy.
type Content struct {
	policytable.Table
	Peers map[IdentityClass]policytable.Class // the rows
}

// Info is a line about a table.
type Info struct {
	ID                                     ID
	Hash                                   [32]byte
	Rules, Classes, Nodes, Peers, Prefixes int // Nodes of the trees of ranges
}

// MapLimit is a map of the node, or a part of one, that tables share.
type MapLimit int

// The limits.
const (
	LimitTables MapLimit = iota
	LimitRules
	LimitPortNodes
	LimitPeerClasses
	LimitPeerRows
	LimitPrefixes4
	LimitPrefixes6
	MapLimits // the number of limits
)

var mapLimitNames = [MapLimits]string{
	"tables", "table-rules", "port-nodes", "peer-classes", "peer-rows", "prefixes-ipv4", "prefixes-ipv6",
}

// String is the name of the limit, as in docs/reference/bounds.md.
func (l MapLimit) String() string { return mapLimitNames[l] }

// Size is how many units tables take of each limit.
type Size [MapLimits]int

// Binding is an endpoint with the tables that evaluate its packets.
type Binding struct {
	Slot            uint16
	Identity        uint32
	Addrs           []netip.Addr
	Egress, Ingress ID
	// Epoch is the epoch of the binding; it changes with every change of
	// the tables.
	Epoch uint32
}

// String names the tables.
func (b Binding) String() string {
	return fmt.Sprintf("egress table %d ingress table %d", b.Egress, b.Ingress)
}

// Blocked says whether the endpoint is denied everything, as it is while it is
// removed.
func (b Binding) Blocked() bool { return b.Egress == Deny && b.Ingress == Deny }

// Sentinels that callers branch on.
var (
	// ErrNoCapacity says that a map of the kernel is too small; the text has the
	// figures.
	ErrNoCapacity = errors.New("no capacity")
	// ErrNoTable says that no table has the number.
	ErrNoTable = errors.New("no such table")
)

// NoCapacityError says that a table does not fit. Nothing of it was written. It
// wraps ErrNoCapacity.
type NoCapacityError struct {
	// Map is the name of the map that is too small.
	Map string
	// Need is the number of entries that the table, or the change of it, takes;
	// Free how many there are for it; Limit how many one table may have in all:
	// a quarter of the map.
	Need, Free, Limit int
}

// PeerRows reports whether the rows of peers are what does not fit.
func (e *NoCapacityError) PeerRows() bool { return e.Map == PeerMap }

// Names of maps that callers treat differently.
const (
	PeerMap = "sl_peer"
	PortMap = "sl_ports"
)

// Error names the map and the figures.
func (e *NoCapacityError) Error() string {
	return fmt.Sprintf("map %s: %d entries needed, %d free, at most %d for one table", e.Map, e.Need, e.Free, e.Limit)
}

// Unwrap makes the error an ErrNoCapacity.
func (e *NoCapacityError) Unwrap() error { return ErrNoCapacity }
