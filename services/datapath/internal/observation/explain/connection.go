// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package explain

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/dryrun"
)

// connections looks up the tracked connection, and evaluates a packet of it.
type connections struct {
	connections *conntrack.Connections
	replicas    *dryrun.Programs
	worlds      [2]identity.Numeric
}

func (connections) reads() facts { return nextPacket }
func (connections) sets() facts  { return 0 }

func (c connections) explain(t *query, x *Explanation) error {
	key, q := t.Tuple, t.next
	switch t.Protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP:
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		key.Responder = netip.AddrPortFrom(t.Responder.Addr(), t.Initiator.Port())
	default:
		key.Initiator = netip.AddrPortFrom(t.Initiator.Addr(), 0)
		key.Responder = netip.AddrPortFrom(t.Responder.Addr(), 0)
	}
	var err error
	if x.Connection, x.Tracked, err = c.connections.Lookup(key); err != nil || !x.Tracked {
		return err
	}
	sender := x.Connection.From
	if x.Connection.Initiator.Addr() != t.Initiator.Addr() {
		sender = x.Connection.To
	}
	// an external client that the host masquerades with its own address
	if sender.Slot == endpointmap.HostID && slices.Contains(c.worlds[:], sender.Identity) {
		q.Forwarded = true
	}
	q.Connection = &x.Connection
	x.Next, err = c.replicas.Run(q)
	return err
}

// transit looks up a connection in transit. All its packets are handled like the first one.
type transit struct {
	connections *conntrack.Connections
	endpoints   *endpointmap.Maps
}

func (transit) reads() facts { return ends | verdict }
func (transit) sets() facts  { return 0 }

func (c transit) explain(q *query, x *Explanation) (err error) {
	t := q.Tuple
	t.Transit = true
	if x.Connection, x.Tracked, err = c.connections.Lookup(t); err != nil || !x.Tracked {
		return err
	}
	x.Next = dryrun.Answer{Reason: x.Reason, Source: x.Source.Identity, Destination: x.Destination.Identity}
	if port := x.Connection.Value.NatPort; port != 0 {
		var a netip.Addr
		a, err = c.endpoints.OwnAt(x.Connection.Value.NatAddress)
		x.NAT = netip.AddrPortFrom(a, port)
	}
	return err
}
