// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package nodetable represents policy tables as the maps of the node hold them, with node-local numbers of
// tables and identity classes.
//
// Package policysync builds them from the steps of model/policytable and keeps the kernel in step with them;
// policymap stores them. This package reads and writes no maps.
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

// ID is the kernel's number of a policy table: one direction of one policy.
type ID uint16

// Reserved tables.
const (
	// Deny denies everything. It is the zero value, so that an entry that was never written fails closed.
	Deny ID = 0
	// Allow allows everything: no policy is enforced.
	Allow ID = 1
	// Pending replaces a policy that is not known yet. It only allows ingress from the local host, and the answers to
	// it.
	Pending ID = 2
	// First is the smallest number of a table that is compiled from policies.
	First ID = 16
)

// IdentityClass is the kernel's number of an identity class: identities that every table of the node treats
// alike, 1 to MaxIdentityClass. It is stable across restarts, because the maps contain the key of each number. 0
// means none.
type IdentityClass uint16

// MaxIdentityClass is the largest number of an identity class.
const MaxIdentityClass IdentityClass = 32768 - 1

// Identity describes an identity for the tables, as the kernel's packed entry does. The zero value is an
// unknown identity.
type Identity struct {
	Class IdentityClass
	Kind  identity.Kind
	Scope identity.PeerScope
	Known bool
}

// KeyBetween returns the key of the identity class of an identity while some tables evaluate it as old and
// others as to.
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
	Peers map[IdentityClass]policytable.Class // by identity class
}

// Info summarises a table.
type Info struct {
	ID                                     ID
	Hash                                   [32]byte
	Rules, Classes, Nodes, Peers, Prefixes int // Nodes of the trees of ranges
}

// MapLimit is a map of the node, or a part of one, that tables share.
type MapLimit int

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

// String returns the name of the limit, as in docs/reference/bounds.md.
func (l MapLimit) String() string { return mapLimitNames[l] }

// Size is the usage of each limit, in units of that limit.
type Size [MapLimits]int

// Binding is an endpoint with the tables that evaluate its packets.
type Binding struct {
	Slot            uint16
	Identity        uint32
	Addrs           []netip.Addr
	Egress, Ingress ID
	// Epoch is the epoch of the binding; every change of the tables changes it.
	Epoch uint32
}

func (b Binding) String() string {
	return fmt.Sprintf("egress table %d ingress table %d", b.Egress, b.Ingress)
}

// Blocked reports whether the endpoint is denied everything, for example during its removal.
func (b Binding) Blocked() bool { return b.Egress == Deny && b.Ingress == Deny }

// Errors that callers distinguish.
var (
	// ErrNoCapacity: a map of the kernel is too small; the text has the figures.
	ErrNoCapacity = errors.New("no capacity")
	// ErrNoTable: there is no table with the number.
	ErrNoTable = errors.New("no such table")
)

// NoCapacityError reports that a table does not fit. None of it was written. It wraps ErrNoCapacity.
type NoCapacityError struct {
	// Map is the name of the map that is too small.
	Map string
	// Need is the number of entries that the table, or its change, needs. Free is the number of free
	// entries. Limit is the maximum for one table: a quarter of the map.
	Need, Free, Limit int
}

// PeerRows reports whether the map of peers is too small.
func (e *NoCapacityError) PeerRows() bool { return e.Map == PeerMap }

// Names of maps that callers distinguish.
const (
	PeerMap = "sl_peer"
	PortMap = "sl_ports"
)

func (e *NoCapacityError) Error() string {
	return fmt.Sprintf("map %s: %d entries needed, %d free, at most %d for one table", e.Map, e.Need, e.Free, e.Limit)
}

func (e *NoCapacityError) Unwrap() error { return ErrNoCapacity }
