// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package explain says what would become of a connection and why, from what all packages
// with maps know of it.
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

// Peer is one end of a connection as the maps know it.
type Peer struct {
	Addr netip.Addr
	// Identity that the program found, 0 if it dropped the packet before it asked.
	Identity identity.Numeric
	// Word of the identity; not Known: the tables do not know it.
	Word nodetable.Identity
	// Slot of the endpoint, HostID for the node's own addresses, NoID else.
	Slot endpointmap.ID
	// Entry of the ipcache that holds the address; not valid: none does.
	Entry netip.Prefix
	// Node is the number of the other node that has the address, 0: none.
	Node uint16

	known   ipmap.Info // of Entry; of the world without one
	inRange bool       // in a range of another node's pods
}

// Side is what one side's table says.
type Side struct {
	event.SideVerdict
	// Place is where the table has the other end; zero for tables with a fixed
	// meaning.
	Place policymap.Place
}

// Explanation is what would become of the first packet of a connection, and
// why.
type Explanation struct {
	// Reason is why it would be forwarded or dropped.
	Reason              event.Reason
	Source, Destination Peer
	// Egress and Ingress are the sides that are evaluated: those of local ends.
	// With a drop on one side the other is explained all the same, unless the
	// packet would be dropped before any policy is asked.
	Egress, Ingress *Side
	// Connection is the tracked one, if Tracked, and Next what would become of
	// its next packet.
	Connection conntrack.Connection
	Tracked    bool
	Next       dryrun.Answer
	// NAT is what the responder of Connection sees in place of its initiator; not valid
	// unless the connection is in transit to a backend elsewhere.
	NAT netip.AddrPort
	// Service is the one whose frontend the destination is; nil: of none. If it is
	// translated, nothing else is set but Source and Destination: what becomes of a
	// connection is said of each backend.
	Service *Service
}

// Explainer asks the packages that have the maps of an instance.
type Explainer struct {
	Endpoints   *endpointmap.Maps
	Addresses   *ipmap.Maps
	Nodes       *nodemap.Maps
	Tables      *policymap.Maps
	Connections *conntrack.Connections
	Replicas    *dryrun.Programs
	Services    Services
	// Worlds are the identities of addresses that the ipcache does not know.
	Worlds [2]identity.Numeric
	// TunnelPorts are UDP ports at nodes that no service leads to or answers at from
	// outside.
	TunnelPorts []uint16
}

// ErrNotLocal says that neither end is an endpoint of this node.
var ErrNotLocal = errors.New("neither address belongs to an endpoint of this node")

// Explain asks replicas of the programs about the first packet of a connection:
// from the endpoint that has the source address, else from the host's stack to
// the one that has the destination; and about the next packet of the one that
// is tracked. Destination's port is the packet's, or type << 8 | code of ICMP;
// Source's port is for the connection's state alone, and is the identifier of an
// echo. Nothing changes.
//
// What needs a packet is taken for granted: whole headers, the endpoint's own
// Ethernet addresses, a size that fits, no mark of another program.
//
// A destination that is the frontend of a service is not evaluated itself where
// the service is translated: its backends are.
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
		return x, nil // what is known of the service is the answer
	}
	return x, err
}

// explainDirect explains a connection to just this address.
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
		// nothing but the host sends under its addresses
		q.Forwarded = x.Source.Slot != endpointmap.HostID
		if x.Source.Node != 0 {
			// as if the tunnel's program had given it to the stack: what its key names
			// no test run can say
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

// first asks about a packet that belongs to no connection yet.
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

// next looks for the tracked connection, and asks about a packet of it.
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
	// a client outside that the host translates to its own address
	if sender.Slot == endpointmap.HostID && slices.Contains(e.Worlds[:], sender.Identity) {
		q.Forwarded = true
	}
	q.Connection = &x.Connection
	x.Next, err = e.Replicas.Run(q)
	return err
}

// endpoint says whether the end is a pod.
func (p Peer) endpoint() bool { return isEndpoint(p.Slot) }

func isEndpoint(s endpointmap.ID) bool { return s != endpointmap.NoID && s != endpointmap.HostID }

// peer finds out what leads to an address in the maps: its slot, and the prefix
// of the ipcache that counts. A lookup there says what an entry holds, and not
// which it is.
func (e *Explainer) peer(all []ipmap.Entry, a netip.Addr) (Peer, error) {
	p := Peer{Addr: a}
	p.known.Identity = e.Worlds[0]
	if a.Is6() {
		p.known.Identity = e.Worlds[1]
	}
	var err error
	if p.Slot, err = e.Endpoints.SlotOf(a); err != nil {
		return p, fmt.Errorf("slot of %v: %w", a, err)
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

// findPlaces says what the tables know of both ends: their identities, and
// where the table of each side has the other one.
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
