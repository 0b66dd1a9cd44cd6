// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package explain

import (
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// explainOutside explains a connection that sluice_from_uplink translates for an external client, in the order of
// bpf/include/sluice/outside.h: first whether the client's address is valid on that path, then the policy of a local
// pod. For a backend that is not a local pod, no policy of this node is evaluated.
func (e *Explainer) explainOutside(q query, b *Backend) (err error) {
	x := &b.Explanation
	if err := e.services.explain(&q, x); err != nil {
		return err
	}
	if !x.Destination.endpoint() {
		q.backend = b
		*x, err = run(e.outside, q)
		return err
	}
	b.Path = Evaluated
	local, err := e.nodes.Local()
	if err != nil {
		return err
	}
	if x.Reason = spoofedBy(local, x.Source); x.Reason != 0 {
		return nil
	}
	*x, err = run(e.direct, q)
	return err
}

// uplink evaluates a packet that sluice_from_uplink sends to a backend other than a pod of this node.
type uplink struct {
	endpoints *endpointmap.Maps
	nodes     *nodemap.Maps
	tunnel    tunnel
}

func (uplink) reads() facts { return ends }
func (uplink) sets() facts  { return verdict }

func (u uplink) explain(q *query, x *Explanation) error {
	local, err := u.nodes.Local()
	if err != nil {
		return err
	}
	spoofed, b := spoofedBy(local, x.Source), q.backend
	b.Path = InTransit
	x.Destination.Identity = x.Destination.known.Identity
	if x.Destination.Slot == endpointmap.HostID {
		b.Path, x.Destination.Identity = HostSocket, identity.Host
	}
	switch {
	case x.Destination.Slot == endpointmap.NoID && x.Destination.known.Flags&ipmap.PodRange != 0:
		x.Reason = event.NoRoute
	case u.tunnel.uses(frontend.Protocol(q.Protocol), q.Responder.Port()) && isNode(x.Destination.Identity):
		x.Reason = event.TunnelPort
	case spoofed != 0:
		x.Reason = spoofed
	default:
		x.Reason = event.ForwardedToStack
		x.Source.Identity = x.Source.known.Identity
	}
	if b.Path == InTransit && !x.Reason.Dropped() {
		if b.Source, err = u.transitSource(local, x.Destination); err != nil {
			return err
		}
		if !b.Source.IsValid() {
			x.Reason = event.NATNoSource
		}
	}
	return nil
}

// spoofedBy returns the reason to drop a packet to a service that arrives at an uplink with a forged source address; 0:
// the source is valid. Pods of this node never send through an uplink. With a tunnel, another node sends such packets
// only from its device addresses.
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
func (u uplink) transitSource(local nodemap.Local, to Peer) (netip.Addr, error) {
	at := nodemap.SourceUplink
	if local.Overlay && to.inRange {
		at = nodemap.SourceOverlay
	}
	if to.Addr.Is6() {
		at++
	}
	return u.endpoints.OwnAt(local.Sources[at])
}

// tunnel knows the tunnel ports of nodes.
type tunnel struct{ ports []uint16 }

// uses reports whether a port of a node is a tunnel port.
func (t tunnel) uses(p frontend.Protocol, port uint16) bool {
	return p == frontend.UDP && slices.Contains(t.ports, port)
}

// isNode reports whether an identity belongs to a node, which may have a tunnel.
func isNode(n identity.Numeric) bool {
	return n == identity.Host || n.OfNode()
}
