// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"slices"

	"github.com/sluice-net/sluice/model/shares"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/node"
	"github.com/sluice-net/sluice/services/datapath/internal/node/podrange"
	"github.com/sluice-net/sluice/services/datapath/internal/node/probe"
	"github.com/sluice-net/sluice/services/datapath/internal/node/routing"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/observe"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policyhistory"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policysync"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendstream"
)

// Subject is a subject of the process. It contributes to status, metrics and calls what the interfaces of this package
// ask for, as far as it implements them. A subject that the configuration turns off does not exist.
type Subject interface {
	// Warnings lists problems that an operator has to look at although ADD works, one line each.
	Warnings() []string
}

// Endpoints are the endpoints of the node. Their subject always exists.
type Endpoints interface {
	PodRanges
	// Calls returns the parts that serve calls about endpoints.
	Calls() lifecycle.Parts
	// IdentityStream reports whether the desired identities of all endpoints are known, and the last error of their
	// stream.
	IdentityStream() (complete bool, err error)
}

// PodRanges are the node's pod ranges.
type PodRanges interface {
	PodRanges() *podrange.Set
	// RangeProblems lists the reasons why an ADD has to wait for pod ranges; ok is false if the ranges are configured.
	RangeProblems() (texts []string, ok bool)
}

// Policy is the policies of the node. Policy mode none has no such subject.
type Policy interface {
	Tables
	AuditModes() *auditmode.Modes
	History() *policyhistory.History
	// Required reports whether ADD needs the policy service.
	Required() bool
	// AuditsAll reports whether the configuration puts every endpoint in audit mode.
	AuditsAll() bool
}

// Tables maintains the policy tables.
type Tables interface {
	Status() policysync.Status
	Shares() []shares.Usage
}

// Frontends is the stream of services. There is no such subject if services are not translated.
type Frontends interface {
	FrontendStatus() frontendstream.Status
	// Ended counts the sockets that were ended because their backend was removed.
	Ended() uint64
}

// Packets counts the packets and events of the programs.
type Packets interface {
	PacketCounters() ([]event.Counter, error)
	LostEvents() (uint64, error)
}

// Events has the last events.
type Events interface {
	EventRing() *observe.Ring
}

// MapUsages reads how full the maps are.
type MapUsages interface {
	MapUsage() ([]pin.Usage, error)
}

// Bounds are the limits that endpoints share in the programs' maps.
type Bounds interface {
	SharedBounds() *bound.Bounds
}

// ConnectionCounts counts the tracked connections.
type ConnectionCounts interface {
	// CountConnections returns the counters of the programs, the result of the last collection, and the number of
	// endpoints whose connections are not picked up.
	CountConnections() (c conntrack.Counters, last conntrack.Pass, pickUpStopped int, err error)
}

// Cluster is this node's view of the other nodes.
type Cluster interface {
	ClusterState() node.ClusterState
	// Name returns the name of another node by its node ID; "" if it is unknown.
	Name(number uint16) string
	// PodRouting returns how packets travel between pods of two nodes, and the firewall rules about the tunnel's port
	// that they bypass; ok is false if they do not travel.
	PodRouting() (state routing.State, bypassed []string, ok bool)
	// Probes returns the state of the paths to other nodes; ok is false if they are not probed.
	Probes() (state probe.State, ok bool)
}

// find returns the first subject that implements an interface; nil if none does.
func find[T any](subjects []Subject) (found T) {
	for _, s := range subjects {
		if x, ok := s.(T); ok {
			return x
		}
	}
	return found
}

// partsOf returns a part for each subject that implements an interface.
func partsOf[T any](subjects []Subject, part func(T) Part) (all []Part) {
	for _, s := range subjects {
		if x, ok := s.(T); ok {
			all = append(all, part(x))
		}
	}
	return all
}

// parts returns what the subjects contribute to status and metrics, in the order of their warnings.
func parts(subjects []Subject, policy *PolicyPart) []Part {
	all := slices.Concat(
		partsOf(subjects, func(x Endpoints) Part { return EndpointsPart{x} }),
		partsOf(subjects, func(x Packets) Part { return PacketsPart{x} }),
		partsOf(subjects, func(x MapUsages) Part { return MapsPart{x.MapUsage} }),
		partsOf(subjects, func(x ConnectionCounts) Part {
			return ConnectionsPart{func() (Connections, error) { return connectionsIn(x) }}
		}),
		partsOf(subjects, func(x Bounds) Part { return BoundsPart{x.SharedBounds()} }),
		partsOf(subjects, func(x Cluster) Part {
			return ClusterPart{func() ClusterStream { return ClusterStream(x.ClusterState()) }}
		}),
		partsOf(subjects, func(x Frontends) Part { return ServicesPart{x, find[Services](subjects)} }),
		partsOf(subjects, func(x Proxy) Part { return ProxyPart{x} }),
		partsOf(subjects, func(x Cluster) Part { return ProbesPart{x.Probes} }),
		partsOf(subjects, func(x Cluster) Part { return RoutingPart{func() *datapathv1.PodRouting { return routingOf(x) }} }),
	)
	if policy != nil {
		all = append(all, policy)
	}
	return all
}
