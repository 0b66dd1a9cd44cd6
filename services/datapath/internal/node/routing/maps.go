// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package routing

import "github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"

// Maps are what the programs read of other nodes; nodemap.Maps are.
type Maps interface {
	// SetNode writes the entry of a number. The same again changes nothing; another
	// IPv4 or IPv6 address is an error while the number lives. An address that
	// another number has is an error, too, but the rest is written.
	SetNode(number uint16, n nodemap.Node) error
	// SetNextHops writes how packets of each family travel to a node, each at once.
	SetNextHops(number uint16, ipv4, ipv6 nodemap.NextHop) error
	// RemoveNode removes an entry. That there is none is no error.
	RemoveNode(number uint16) error
	SetLocal(l nodemap.Local) error
	// Local is what SetLocal wrote last, also that of an earlier process.
	Local() (nodemap.Local, error)
	// Nodes are all entries.
	Nodes() (map[uint16]nodemap.Entry, error)
}

var _ Maps = (*nodemap.Maps)(nil)
