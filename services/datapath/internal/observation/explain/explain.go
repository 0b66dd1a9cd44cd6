// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package explain determines what would happen to a connection and why, by combining the information of all maps.
package explain

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/dryrun"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policymap"
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

// Side is the verdict of one side's table.
type Side struct {
	event.SideVerdict
	// Place is the entry of the table that matches the other end; zero for tables with a fixed verdict.
	Place policymap.Place
}

// Explanation describes what would happen to the first packet of a connection, and why.
type Explanation struct {
	// Reason is the reason why the packet would be forwarded or dropped.
	Reason              event.Reason
	Source, Destination Peer
	// Egress and Ingress are the verdicts of the local ends. If one side drops the packet, the other one is still
	// explained, unless the packet would be dropped before any policy is evaluated.
	Egress, Ingress *Side
	// Connection is the tracked connection, if Tracked, and Next the result for its next packet.
	Connection conntrack.Connection
	Tracked    bool
	Next       dryrun.Answer
	// NAT is the address that the responder of Connection sees instead of its initiator; only valid if the connection is
	// in transit to a backend on another node.
	NAT netip.AddrPort
	// Service is the service whose frontend is the destination; nil: none. If it is translated, only Source and
	// Destination are set in addition; the explanations are in the backends.
	Service *Service
}

// Explainer explains connections from the maps of an instance.
type Explainer struct {
	Endpoints   *endpointmap.Maps
	Addresses   *ipmap.Maps
	Nodes       *nodemap.Maps
	Tables      *policymap.Maps
	Connections *conntrack.Connections
	Replicas    *dryrun.Programs
	Services    Services
	// Worlds are the identities of addresses without an ipcache entry, for IPv4 and IPv6.
	Worlds [2]identity.Numeric
	// TunnelPorts are UDP ports of nodes that services do not use for external packets.
	TunnelPorts []uint16
}

// ErrNotLocal is returned if neither end is an endpoint of this node.
var ErrNotLocal = errors.New("neither address belongs to an endpoint of this node")

// Explain runs replicas of the programs on the first packet of a connection: sent by the endpoint with the source
// address or, without one, by the host stack to the endpoint with the destination address. If the connection is
// tracked, it also runs them on its next packet. The port of the responder is the packet's destination port, or type <<
// 8 | code of ICMP; the port of the initiator is only used to look up the connection, and is the identifier of an ICMP
// echo. Explain changes no state.
//
// It assumes a valid packet: complete headers, the endpoint's own Ethernet addresses, a size within the MTU, no mark of
// another program.
//
// If the destination is the frontend of a translated service, its backends are evaluated instead.
func (e *Explainer) Explain(t conntrack.Tuple) (Explanation, error) {
	if err := t.Validate(); err != nil {
		return Explanation{}, err
	}
	known, err := e.Addresses.List()
	if err != nil {
		return Explanation{}, err
	}
	s, err := e.findService(known, t)
	if err != nil {
		return Explanation{}, err
	}
	if s != nil && s.Outcome != NotTranslated {
		return e.explainService(known, t, s)
	}
	x, err := e.explainDirect(known, t)
	if x.Service = s; s != nil && errors.Is(err, ErrNotLocal) {
		return x, nil // the information about the service is the answer
	}
	return x, err
}

// explainDirect explains a connection to exactly this address.
func (e *Explainer) explainDirect(known []ipmap.Entry, t conntrack.Tuple) (x Explanation, err error) {
	if x.Source, err = e.peer(known, t.Initiator.Addr()); err != nil {
		return x, err
	}
	if x.Destination, err = e.peer(known, t.Responder.Addr()); err != nil {
		return x, err
	}
	q := dryrun.Question{Program: program.FromPod, Far: x.Destination.Slot}
	near := x.Source
	if !x.Source.endpoint() {
		q.Program, q.Far, near = program.ToPod, x.Source.Slot, x.Destination
		// only the host sends with its addresses
		q.Forwarded = x.Source.Slot != endpointmap.HostID
		if x.Source.Node != 0 {
			// as if the tunnel's program had passed the packet to the stack: a test run cannot set the tunnel key
			local, err := e.Nodes.Local()
			if err != nil {
				return x, err
			}
			q.Tunnel = local.TunnelIfindex
		}
	}
	if !near.endpoint() {
		return x, fmt.Errorf("%v, %v: %w", t.Initiator.Addr(), t.Responder.Addr(), ErrNotLocal)
	}
	if q.Near, err = e.Endpoints.At(near.Slot); err != nil {
		return x, err
	}
	frame := func(begins bool) []byte {
		if q.Program == program.FromPod {
			return dryrun.Frame(q.Near.MAC, q.Near.HostMAC, t, begins)
		}
		return dryrun.Frame(q.Near.HostMAC, q.Near.MAC, t, begins)
	}
	q.Frame = frame(true)
	if err := e.first(&x, q); err != nil {
		return x, err
	}
	q.Frame = frame(false)
	if err := e.next(&x, q, t); err != nil {
		return x, err
	}
	return x, e.findPlaces(&x)
}

// first evaluates a packet that belongs to no connection.
func (e *Explainer) first(x *Explanation, q dryrun.Question) error {
	a, err := e.Replicas.Run(q)
	if err != nil {
		return err
	}
	x.Reason = a.Reason
	x.Source.Identity, x.Destination.Identity = a.Source, a.Destination
	egress, ingress := a.Egress, a.Ingress
	if egress.By != event.ByNobody && ingress.By == event.ByNobody && x.Destination.Slot != endpointmap.NoID {
		q.LetOut = true
		if a, err = e.Replicas.Run(q); err != nil {
			return err
		}
		ingress = a.Ingress
	}
	if egress.By != event.ByNobody {
		x.Egress = &Side{SideVerdict: egress}
	}
	if ingress.By != event.ByNobody {
		x.Ingress = &Side{SideVerdict: ingress}
	}
	return nil
}

// next looks up the tracked connection, and evaluates a packet of it.
func (e *Explainer) next(x *Explanation, q dryrun.Question, t conntrack.Tuple) error {
	key := t
	switch t.Protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP:
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		key.Responder = netip.AddrPortFrom(t.Responder.Addr(), t.Initiator.Port())
	default:
		key.Initiator = netip.AddrPortFrom(t.Initiator.Addr(), 0)
		key.Responder = netip.AddrPortFrom(t.Responder.Addr(), 0)
	}
	var err error
	if x.Connection, x.Tracked, err = e.Connections.Lookup(key); err != nil || !x.Tracked {
		return err
	}
	sender := x.Connection.From
	if x.Connection.Initiator.Addr() != t.Initiator.Addr() {
		sender = x.Connection.To
	}
	// an external client that the host masquerades with its own address
	if sender.Slot == endpointmap.HostID && slices.Contains(e.Worlds[:], sender.Identity) {
		q.Forwarded = true
	}
	q.Connection = &x.Connection
	x.Next, err = e.Replicas.Run(q)
	return err
}

// endpoint reports whether the end is a pod of this node.
func (p Peer) endpoint() bool { return isEndpoint(p.Slot) }

func isEndpoint(s endpointmap.ID) bool { return s != endpointmap.NoID && s != endpointmap.HostID }

// peer looks up an address in the maps: its endpoint ID, and the ipcache prefix that matches it. It searches the list,
// because a lookup in the map returns the value of an entry, but not its prefix.
func (e *Explainer) peer(all []ipmap.Entry, a netip.Addr) (Peer, error) {
	p := Peer{Addr: a}
	p.known.Identity = e.Worlds[0]
	if a.Is6() {
		p.known.Identity = e.Worlds[1]
	}
	var err error
	if p.Slot, err = e.Endpoints.SlotOf(a); err != nil {
		return p, fmt.Errorf("look up the endpoint ID of %v: %w", a, err)
	}
	for _, known := range all {
		if known.Node != 0 && !known.Prefix.IsSingleIP() && known.Prefix.Contains(a) {
			p.inRange = true
		}
		if known.Prefix.Contains(a) && (!p.Entry.IsValid() || known.Prefix.Bits() > p.Entry.Bits()) {
			p.Entry, p.Node, p.known = known.Prefix, known.Node, known.Info
		}
	}
	return p, nil
}

// findPlaces looks up both ends in the policy tables: their identities, and the entry of each side's table for the
// other end.
func (e *Explainer) findPlaces(x *Explanation) (err error) {
	x.Source.Word, x.Destination.Word = e.Tables.Identity(x.Source.Identity), e.Tables.Identity(x.Destination.Identity)
	if s := x.Egress; s != nil {
		if s.Place, err = e.Tables.Place(s.Table, x.Destination.Word, x.Destination.Addr); err != nil {
			return err
		}
	}
	if s := x.Ingress; s != nil {
		s.Place, err = e.Tables.Place(s.Table, x.Source.Word, x.Source.Addr)
	}
	return err
}
