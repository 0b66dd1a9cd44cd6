// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package explain determines what would happen to a connection and why, by combining the information of all maps.
//
// An Explainer passes a connection through a list of parts, one for each subject of the datapath. Each part has its own
// file and adds the information in the maps of its subject: addresses (peer.go), the programs (packet.go, outside.go),
// tracked connections (connection.go), and policies (policy.go). Their order follows from the facts that each of them
// reads and sets (order.go). Services (service.go) come first, because they decide which connections are explained.
package explain

import (
	"errors"
	"net/netip"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/dryrun"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policymap"
)

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

// Maps are the handles of the maps and programs of one instance.
type Maps struct {
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

// Explainer explains connections from the maps of an instance.
type Explainer struct {
	addresses *ipmap.Maps
	nodes     *nodemap.Maps
	services  services
	// direct explains packets that a program of an endpoint processes. outside explains packets from external clients
	// to a service that only sluice_from_uplink processes.
	direct, outside []part
}

// query is the connection that the parts explain.
type query struct {
	conntrack.Tuple
	known []ipmap.Entry // the ipcache

	// backend is the backend of a Service to which the connection goes; nil if the part packets runs a program on
	// it.
	backend *Backend
	// next is the run of a program with a packet that continues the connection; set by packets.
	next dryrun.Question
}

// New returns an Explainer that reads the given maps.
func New(m Maps) *Explainer {
	peers := peers{endpoints: m.Endpoints, worlds: m.Worlds}
	tunnel := tunnel{m.TunnelPorts}
	policies := policies{m.Tables}
	return &Explainer{
		addresses: m.Addresses, nodes: m.Nodes,
		services: services{peers: peers, tunnel: tunnel, frontends: m.Services},
		direct: ordered(
			peers,
			packets{endpoints: m.Endpoints, nodes: m.Nodes, replicas: m.Replicas},
			connections{connections: m.Connections, replicas: m.Replicas, worlds: m.Worlds},
			policies,
		),
		outside: ordered(
			peers,
			uplink{endpoints: m.Endpoints, nodes: m.Nodes, tunnel: tunnel},
			transit{connections: m.Connections, endpoints: m.Endpoints},
			policies,
		),
	}
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
	known, err := e.addresses.List()
	if err != nil {
		return Explanation{}, err
	}
	q := query{Tuple: t, known: known}
	s, err := e.services.find(&q)
	if err != nil {
		return Explanation{}, err
	}
	if s != nil && s.Outcome != NotTranslated {
		return e.explainService(q, s)
	}
	x, err := run(e.direct, q)
	if x.Service = s; s != nil && errors.Is(err, ErrNotLocal) {
		return x, nil // the information about the service is the answer
	}
	return x, err
}

// run passes a connection to exactly this address through parts.
func run(parts []part, q query) (x Explanation, err error) {
	for _, p := range parts {
		if err := p.explain(&q, &x); err != nil {
			return x, err
		}
	}
	return x, nil
}
