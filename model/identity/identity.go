// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package identity defines identities: numbers and their label sets, the ranges of the numbers, the reserved numbers,
// and the kinds of peers.
//
// All Go processes use the numbers of this package. The eBPF programs define the same numbers in bpf/include/sluice;
// a test of services/datapath/internal/bpf compares the two. sluice-identity allocates the numbers of workloads.
package identity

import "strconv"

// Numeric is the number of an identity. 0 is not a valid identity.
type Numeric uint32

// Ranges of numbers.
const (
	MinReserved  Numeric = 1
	MaxReserved  Numeric = 255
	MinCluster   Numeric = 256
	MaxCluster   Numeric = 65_535
	MinNodeLocal Numeric = 0xFF0000
	MaxNodeLocal Numeric = 0xFF0FFF
	// Max is the largest number: 24 bits fit into a packet mark and into a VXLAN network identifier.
	Max Numeric = 1<<24 - 1
)

// Sizes of the ranges that numbers are allocated from.
const (
	ClusterSize   = int(MaxCluster-MinCluster) + 1
	NodeLocalSize = int(MaxNodeLocal-MinNodeLocal) + 1
)

// Reserved numbers. The numbers up to 10 have the same meaning as in Cilium.
const (
	Host             Numeric = 1
	World            Numeric = 2
	Unmanaged        Numeric = 3
	Health           Numeric = 4
	Init             Numeric = 5
	RemoteNode       Numeric = 6
	KubeAPIServer    Numeric = 7
	Ingress          Numeric = 8
	WorldIPv4        Numeric = 9
	WorldIPv6        Numeric = 10
	UnknownInCluster Numeric = 255
)

// Names of reserved identities. Their label is reserved:NAME.
const (
	NameHost             = "host"
	NameWorld            = "world"
	NameUnmanaged        = "unmanaged"
	NameHealth           = "health"
	NameInit             = "init"
	NameRemoteNode       = "remote-node"
	NameKubeAPIServer    = "kube-apiserver"
	NameIngress          = "ingress"
	NameWorldIPv4        = "world-ipv4"
	NameWorldIPv6        = "world-ipv6"
	NameUnknownInCluster = "unknown-in-cluster"
)

// Scope is the area in which a number is valid.
type Scope uint8

// Scopes.
const (
	ScopeInvalid   Scope = iota // no identity has such a number
	ScopeReserved               // fixed meaning everywhere
	ScopeCluster                // the same on all nodes of the cluster
	ScopeNodeLocal              // on this node only; never sent to another node
)

// String returns invalid, reserved, cluster or node-local.
func (s Scope) String() string {
	switch s {
	case ScopeReserved:
		return "reserved"
	case ScopeCluster:
		return "cluster"
	case ScopeNodeLocal:
		return "node-local"
	}
	return "invalid"
}

// Scope returns the scope of the number, which its range determines.
func (n Numeric) Scope() Scope {
	switch {
	case n >= MinReserved && n <= MaxReserved:
		return ScopeReserved
	case n >= MinCluster && n <= MaxCluster:
		return ScopeCluster
	case n >= MinNodeLocal && n <= MaxNodeLocal:
		return ScopeNodeLocal
	}
	return ScopeInvalid
}

// OfNode reports whether an address on another node with this identity belongs to the node itself and not to a pod. A
// node has the identity remote-node, kube-apiserver if it runs an API server, or, if it has labels, a number that is
// valid on this node only.
func (n Numeric) OfNode() bool {
	return n == RemoteNode || n == KubeAPIServer || n.Scope() == ScopeNodeLocal
}

// Kind is the general kind of a peer. A policy table has one default class per kind, for peers without a row.
type Kind uint8

// Kinds, in the order of a table's default classes.
const (
	KindInCluster     Kind = iota // pods, of this cluster or another
	KindWorld4                    // outside, IPv4, or any family on a single-stack node
	KindWorld6                    // outside, IPv6
	KindHost                      // the local node
	KindRemoteNode                // other nodes
	KindKubeAPIServer             // an API server outside the cluster
	KindUnknown                   // the identity service has not announced the number
	KindOther                     // health, init, ingress, unmanaged
	Kinds                         // the number of kinds
)

var kindNames = [Kinds]string{
	"in-cluster", "world-ipv4", "world-ipv6", "host", "remote-node", "kube-apiserver", "unknown", "other",
}

// String returns the name of the kind in the API.
func (k Kind) String() string {
	if k < Kinds {
		return kindNames[k]
	}
	return "Kind(" + strconv.Itoa(int(k)) + ")"
}

// PeerScope determines which address rules can match a peer.
type PeerScope uint8

// Peer scopes, in the order of a table's address classes.
const (
	PeerScopeCluster PeerScope = iota // pods and other endpoints in the cluster
	PeerScopeNode                     // the local node and remote nodes
	PeerScopeOutside                  // the world
	PeerScopes                        // the number of peer scopes
)

var peerScopeNames = [PeerScopes]string{"cluster", "node", "outside"}

// String returns cluster, node or outside.
func (s PeerScope) String() string {
	if s < PeerScopes {
		return peerScopeNames[s]
	}
	return "PeerScope(" + strconv.Itoa(int(s)) + ")"
}
