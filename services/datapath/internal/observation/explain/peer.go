// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package explain

import (
	"fmt"
	"net/netip"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// Peer is one end of a connection, as looked up in the maps.
type Peer struct {
	Addr netip.Addr
	// Identity is the identity that the program looked up; 0 if it dropped the packet before.
	Identity identity.Numeric
	// Word is the entry of the identity; not Known: the tables do not have it.
	Word nodetable.Identity
	// Slot is the endpoint ID, HostID for the node's own addresses, otherwise NoID.
	Slot endpointmap.ID
	// Entry is the ipcache entry that contains the address; not valid: none.
	Entry netip.Prefix
	// Node is the node ID of the other node that has the address; 0: none.
	Node uint16

	known   ipmap.Info // info of Entry; without an entry, of the world
	inRange bool       // in a pod range of another node
}

// endpoint reports whether the end is a pod of this node.
func (p Peer) endpoint() bool { return isEndpoint(p.Slot) }

func isEndpoint(s endpointmap.ID) bool { return s != endpointmap.NoID && s != endpointmap.HostID }

// peers looks up both ends of a connection.
type peers struct {
	endpoints *endpointmap.Maps
	worlds    [2]identity.Numeric
}

func (peers) reads() facts { return 0 }
func (peers) sets() facts  { return ends }

func (p peers) explain(q *query, x *Explanation) (err error) {
	if x.Source, err = p.lookUp(q.known, q.Initiator.Addr()); err != nil {
		return err
	}
	x.Destination, err = p.lookUp(q.known, q.Responder.Addr())
	return err
}

// lookUp looks up an address in the maps: its endpoint ID, and the ipcache prefix that matches it. It searches the list,
// because a lookup in the map returns the value of an entry, but not its prefix.
func (p peers) lookUp(all []ipmap.Entry, a netip.Addr) (Peer, error) {
	found := Peer{Addr: a}
	found.known.Identity = p.worlds[0]
	if a.Is6() {
		found.known.Identity = p.worlds[1]
	}
	var err error
	if found.Slot, err = p.endpoints.SlotOf(a); err != nil {
		return found, fmt.Errorf("look up the endpoint ID of %v: %w", a, err)
	}
	for _, known := range all {
		if known.Node != 0 && !known.Prefix.IsSingleIP() && known.Prefix.Contains(a) {
			found.inRange = true
		}
		if known.Prefix.Contains(a) && (!found.Entry.IsValid() || known.Prefix.Bits() > found.Entry.Bits()) {
			found.Entry, found.Node, found.known = known.Prefix, known.Node, known.Info
		}
	}
	return found, nil
}
