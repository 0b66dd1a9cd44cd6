// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package explain

import (
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/dryrun"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// explainOutside explains a connection that sluice_from_uplink translates for an external client, in the order of
// bpf/include/sluice/outside.h: first whether the client's address is valid on that path, then the policy of a local
// pod. For a backend that is not a local pod, no policy of this node is evaluated.
func (e *Explainer) explainOutside(known []ipmap.Entry, t conntrack.Tuple, b *Backend) error {
	local, err := e.Nodes.Local()
	if err != nil {
		return err
	}
	x := &b.Explanation
	if x.Source, err = e.peer(known, t.Initiator.Addr()); err != nil {
		return err
	}
	if x.Destination, err = e.peer(known, t.Responder.Addr()); err != nil {
		return err
	}
	spoofed := spoofedBy(local, x.Source)
	if x.Destination.endpoint() {
		b.Path = Evaluated
		if spoofed != 0 {
			x.Reason = spoofed
			return nil
		}
		*x, err = e.explainDirect(known, t)
		return err
	}
	b.Path = InTransit
	x.Destination.Identity = x.Destination.known.Identity
	if x.Destination.Slot == endpointmap.HostID {
		b.Path, x.Destination.Identity = HostSocket, identity.Host
	}
	switch {
	case x.Destination.Slot == endpointmap.NoID && x.Destination.known.Flags&ipmap.PodRange != 0:
		x.Reason = event.NoRoute
	case e.isTunnel(frontend.Protocol(t.Protocol), t.Responder.Port()) && isNode(x.Destination.Identity):
		x.Reason = event.TunnelPort
	case spoofed != 0:
		x.Reason = spoofed
	default:
		x.Reason = event.ForwardedToStack
		x.Source.Identity = x.Source.known.Identity
	}
	if b.Path == InTransit && !x.Reason.Dropped() {
		if b.Source, err = e.transitSource(local, x.Destination); err != nil {
			return err
		}
		if !b.Source.IsValid() {
			x.Reason = event.NATNoSource
		}
	}
	if err := e.findTransit(x, t); err != nil {
		return err
	}
	return e.findPlaces(x)
}

// spoofedBy returns the reason to drop an external packet to a service because of its source address, 0 if it is valid:
// an uplink receives no packets from pods of this node, and from another node with a tunnel only packets from its
// device addresses.
func spoofedBy(local nodemap.Local, from Peer) event.Reason {
	switch {
	case from.known.Flags&ipmap.PodRange != 0:
		return event.SpoofedIP
	case !local.Native && nodePastStack(local, from) != 0 && from.known.Flags&ipmap.OfDevice == 0:
		return event.SpoofedNode
	}
	return 0
}

// nodePastStack returns the node that has the address, if packets to it bypass the host stack.
func nodePastStack(local nodemap.Local, p Peer) uint16 {
	if p.known.Flags&ipmap.ByStack != 0 || !local.Overlay && !local.Native {
		return 0
	}
	return p.Node
}

// transitSource returns the address of this node that a backend on another node sees; not valid if the node has no such
// address. Only the pod ranges of other nodes, which contain their overlay addresses, are routed into the tunnel.
func (e *Explainer) transitSource(local nodemap.Local, to Peer) (netip.Addr, error) {
	at := nodemap.SourceUplink
	if local.Overlay && to.inRange {
		at = nodemap.SourceOverlay
	}
	if to.Addr.Is6() {
		at++
	}
	return e.Endpoints.OwnAt(local.Sources[at])
}

// findTransit looks up the connection in transit. All its packets are handled like the first one.
func (e *Explainer) findTransit(x *Explanation, t conntrack.Tuple) (err error) {
	t.Transit = true
	if x.Connection, x.Tracked, err = e.Connections.Lookup(t); err != nil || !x.Tracked {
		return err
	}
	x.Next = dryrun.Answer{Reason: x.Reason, Source: x.Source.Identity, Destination: x.Destination.Identity}
	if port := x.Connection.Value.NatPort; port != 0 {
		var a netip.Addr
		a, err = e.Endpoints.OwnAt(x.Connection.Value.NatAddress)
		x.NAT = netip.AddrPortFrom(a, port)
	}
	return err
}

// isTunnel reports whether a port of a node is a tunnel port.
func (e *Explainer) isTunnel(p frontend.Protocol, port uint16) bool {
	return p == frontend.UDP && slices.Contains(e.TunnelPorts, port)
}

// isNode reports whether an identity belongs to a node, which may have a tunnel.
func isNode(n identity.Numeric) bool {
	return n == identity.Host || n.OfNode()
}
