// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package routing

import "github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"

// Maps are the maps of other nodes that the programs read; nodemap.Maps implements it.
type Maps interface {
	// SetNode writes the entry of a node ID. Writing the same entry again changes nothing. Another IPv4 or IPv6 address is
	// an error while the node ID is in use. An address that another node has is an error, too, but the rest is written.
	SetNode(number uint16, n nodemap.Node) error
	// SetNextHops writes the next hops of each family to a node, each atomically.
	SetNextHops(number uint16, ipv4, ipv6 nodemap.NextHop) error
	// SetDirect writes the direct path to a node, which packets use while SetShortcut allows it.
	SetDirect(number uint16, d nodemap.Direct) error
	SetShortcut(s nodemap.Shortcut) error
	// RemoveNode removes an entry. A missing entry is not an error.
	RemoveNode(number uint16) error
	SetLocal(l nodemap.Local) error
	// Local returns the last value of SetLocal, also of a previous process.
	Local() (nodemap.Local, error)
	// Nodes returns all entries.
	Nodes() (map[uint16]nodemap.Entry, error)
}

var _ Maps = (*nodemap.Maps)(nil)
