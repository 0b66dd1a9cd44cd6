// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"errors"
	"net/netip"
)

// Slot is an index into the table of endpoints.
type Slot uint16

const (
	// HostSlot is the node itself.
	HostSlot Slot = 0
	// NoSlot means that an address or device belongs to no local endpoint.
	NoSlot Slot = 0xFFFF
	// MaxEndpoints is how many endpoints fit on a node; slot 0 is the host.
	MaxEndpoints = 4096 - 1
)

// Identity is a security identity as it travels in the kernel, 24 bits wide.
// Zero is not an identity.
type Identity uint32

// Reserved identities that the programs know by number.
const (
	IdentityHost             Identity = 1
	IdentityWorld            Identity = 2
	IdentityInit             Identity = 5
	IdentityRemoteNode       Identity = 6
	IdentityWorldIPv4        Identity = 9
	IdentityWorldIPv6        Identity = 10
	IdentityUnknownInCluster Identity = 255
	// MaxIdentity is the largest number that a packet mark can carry.
	MaxIdentity Identity = 1<<24 - 1
)

// Table is the number of a policy table: one direction of one policy.
type Table uint16

const (
	// TableDeny denies everything. It is the zero value, so that a word that
	// nobody wrote fails closed.
	TableDeny Table = 0
	// TableAllow allows everything.
	TableAllow Table = 1
	// TablePending stands for a policy that is not known yet: nothing may enter
	// but from the own host, and nothing may leave but answers to it that
	// cannot start a connection.
	TablePending Table = 2
)

// Policy is the word that judges an endpoint's packets.
type Policy struct {
	Egress, Ingress Table
	// Gen is the endpoint's number from the node-wide counter; it changes with
	// every change of the word, and no two endpoints ever share one.
	Gen uint32
}

// Deliver says how a packet from another local pod reaches the endpoint.
type Deliver uint8

const (
	// DeliverPeer moves the packet into the pod's namespace without passing
	// the host end's queues.
	DeliverPeer Deliver = 1
	// DeliverRedirect sends it out of the host end, for devices with a root
	// qdisc that must see the traffic.
	DeliverRedirect Deliver = 2
)

// Endpoint is one local pod as the programs see it.
type Endpoint struct {
	// Slot is set by Publish.
	Slot Slot
	// Ifindex of the host end, in the node's network namespace.
	Ifindex uint32
	// Identity, 1 to MaxIdentity.
	Identity Identity
	// IPv4 and IPv6 are the pod's addresses; one of them may be invalid.
	IPv4, IPv6 netip.Addr
	// MAC is the pod's own address, HostMAC that of the host end. The programs
	// accept no other source address from the pod.
	MAC, HostMAC [6]byte
	// MTU of both ends of the device, 576 to 65535 bytes, at least 1280 with
	// IPv6.
	MTU uint16
	// Deliver is DeliverPeer or DeliverRedirect.
	Deliver Deliver
	// Policy that judges the endpoint's first packet. Gen is set by Publish.
	Policy Policy
	// Incomplete is set by Endpoints if some of the keys that should lead to
	// the slot are missing: a process was killed between two writes. Unpublish
	// it, or unpublish and publish it anew.
	Incomplete bool
}

// IPInfo is what the ipcache knows about a prefix.
type IPInfo struct {
	Identity Identity
	// Node is the number of the node that holds the prefix, 0 for this node or
	// none.
	Node uint16
	// Flags say what kind of prefix it is.
	Flags IPFlags
}

// IPFlags describe an ipcache entry.
type IPFlags uint16

// IPEntry is one entry of the ipcache.
type IPEntry struct {
	Prefix netip.Prefix
	IPInfo
}

// Sentinels that a caller branches on.
var (
	// ErrExists says that a key already leads to another slot.
	ErrExists = errors.New("already in use")
	// ErrFull says that no slot is free, or that a map is full.
	ErrFull = errors.New("no room")
	// ErrNotFound says that the slot belongs to no endpoint.
	ErrNotFound = errors.New("no such endpoint")
	// ErrNoProgram says that the program id is not, or no longer, loaded.
	ErrNoProgram = errors.New("no such program")
	// ErrValidateOnly answers every change of a kernel that was opened to look.
	ErrValidateOnly = errors.New("opened for validation only")
	// ErrClosed says that Close was called.
	ErrClosed = errors.New("closed")
	// ErrInvalid says that an argument is out of range; the text names it.
	ErrInvalid = errors.New("invalid argument")
)
