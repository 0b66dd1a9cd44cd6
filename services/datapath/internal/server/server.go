// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package server implements the datapath's gRPC API. It only converts requests and answers; decisions are made by the
// core.
package server

import (
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/model/shares"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	"github.com/sluice-net/sluice/proto/wire"
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

// Server implements the services of the datapath.
type Server struct {
	sharesv1.UnimplementedSharesServiceServer
	datapathv1.UnimplementedConnectionServiceServer
	datapathv1.UnimplementedDatapathServiceServer
	datapathv1.UnimplementedDNSReportServiceServer
	datapathv1.UnimplementedObserverServiceServer

	endpoints lifecycle.Parts
	ring      *observe.Ring
	facts     Facts
	// process describes the configuration of this process.
	process wire.Process
	// parts describe the subjects in status and metrics, in the order of their warnings.
	parts []Part
	// bounds are the limits that endpoints share in the programs' maps; nil: ListShares omits them.
	bounds *bound.Bounds
	// budgets are the budgets in the maps of connections; nil: ListShares omits them.
	budgets Budgets
	called  Called
	// named returns the name that identity registered this node under, empty if it is unknown; nil: unknown.
	named func() string
	// services reads the services that the kernel translates.
	services Services
	// backends counts connections; nil: services are not translated.
	backends Backends
	// ranges are the node's pod ranges.
	ranges PodRanges
	// policy describes the policies; nil in policy mode none.
	policy *PolicyPart
	// records reports whether endpoint records can be written.
	records interface{ Err() error }
	// subjects are the parts of the process.
	subjects []Subject
	// explainer answers Explain.
	explainer Explainer
	// tracked are the connections of the kernel.
	tracked Tracked
	// ends looks up the ends of reported DNS messages.
	ends Ends
	// maps reads maps for DumpMap.
	maps Maps
	// labelsFrom looks up the labels of identities; nil: all are unknown.
	labelsFrom *observe.Labels
	// nameOf returns the name of another node by its node ID, "" if it is unknown; nil: all are unknown.
	nameOf func(uint16) string
	// rules resolves the rules in verdicts; nil: all are unknown.
	rules Rules

	history history

	mu      sync.Mutex
	unready time.Time // guarded by mu; since when no ADD can be served
}

// Options are the subjects of the process, and facts and clients that no subject has.
type Options struct {
	// Process describes the configuration of this process.
	Process wire.Process
	Facts   Facts
	Called  Called
	// Named returns the name that identity registered this node under, empty if it is unknown.
	Named func() string
	// Records reports whether endpoint records can be written.
	Records interface{ Err() error }
	// Labels looks up the labels of identities that no endpoint of this node has.
	Labels observe.LabelSource
	// Subjects contribute to status, metrics and calls.
	Subjects []Subject
}

// New returns a server of the subjects.
func New(o Options) *Server {
	of := o.Subjects
	endpoints := find[Endpoints](of)
	calls := endpoints.Calls()
	var policy *PolicyPart
	var rules Rules
	if p := find[Policy](of); p != nil {
		policy = &PolicyPart{
			Tables: p, Modes: p.AuditModes(), Report: calls.Report, Required: p.Required(), Audit: p.AuditsAll(),
		}
		rules = p.History()
	}
	return &Server{
		process: o.Process, facts: o.Facts, called: o.Called, named: o.Named, records: o.Records,
		labelsFrom: &observe.Labels{Local: calls.Report.LabelsOf, Source: o.Labels},
		subjects:   of, parts: partsIn(of, policy), policy: policy, rules: rules,
		endpoints: calls, ranges: endpoints,
		ring: find[Events](of).EventRing(), ends: find[Ends](of), explainer: find[Explainer](of), tracked: find[Tracked](of),
		maps: find[Maps](of), bounds: find[Bounds](of).SharedBounds(), budgets: find[Budgets](of),
		services: find[Services](of), backends: find[Backends](of), nameOf: find[Cluster](of).Name,
	}
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

// partsIn returns what the subjects contribute to status and metrics, in the order of their warnings.
func partsIn(subjects []Subject, policy *PolicyPart) []Part {
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
		partsOf(subjects, func(x Proxies) Part { return ProxiesPart{x} }),
		partsOf(subjects, func(x Cluster) Part { return ProbesPart{x.Probes} }),
		partsOf(subjects, func(x Cluster) Part { return RoutingPart{func() *datapathv1.PodRouting { return routingOf(x) }} }),
	)
	if policy != nil {
		all = append(all, policy)
	}
	return all
}

// Register registers the services.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	datapathv1.RegisterConnectionServiceServer(r, s)
	datapathv1.RegisterDatapathServiceServer(r, s)
	datapathv1.RegisterObserverServiceServer(r, s)
	datapathv1.RegisterDNSReportServiceServer(r, s)
	sharesv1.RegisterSharesServiceServer(r, s)
	statusv1.RegisterProcessServiceServer(r, s.process)
}

// More concurrent creations do not help, because the kernel serialises them.
const (
	creating = 4
	waiting  = 8
)

// Methods returns the access rules and concurrency limits of the methods.
func Methods() rpc.Methods {
	root, group := rpc.Method{Access: rpc.Root()}, rpc.Method{Access: rpc.Group()}
	streams := rpc.Method{Access: rpc.Group(), Limit: rpc.Limit{InFlight: 64}}
	look := rpc.Method{Access: rpc.Group(), Limit: rpc.Limit{InFlight: 8, Waiting: 64}}
	return rpc.Methods{
		statusv1.ProcessService_GetConfig_FullMethodName:   {Access: rpc.Group()},
		statusv1.ProcessService_SetLogLevel_FullMethodName: {Access: rpc.Root()},
		datapathv1.DatapathService_CreateEndpoint_FullMethodName: {
			Access: rpc.Root(), Limit: rpc.Limit{InFlight: creating, Waiting: waiting}, Prepared: true,
		},
		datapathv1.DatapathService_UpdateEndpoint_FullMethodName: {
			Access: rpc.Root(), Limit: rpc.Limit{InFlight: 64, Waiting: 1024},
		},
		datapathv1.DatapathService_DeleteEndpoint_FullMethodName: root,
		datapathv1.DatapathService_SetAuditMode_FullMethodName: {
			Access: rpc.Root(), Limit: rpc.Limit{InFlight: 1, Waiting: 64},
		},
		datapathv1.DatapathService_ReclaimEndpoints_FullMethodName: {Access: rpc.Root(), Limit: rpc.Limit{InFlight: 1, Waiting: 1}},
		// a request may ask for a repair, so only root may call the method
		datapathv1.DatapathService_AuditMaps_FullMethodName:          {Access: rpc.Root(), Limit: rpc.Limit{InFlight: 1, Waiting: 1}},
		datapathv1.DatapathService_CheckEndpoint_FullMethodName:      look,
		datapathv1.DatapathService_GetEndpoint_FullMethodName:        group,
		datapathv1.DatapathService_ListEndpoints_FullMethodName:      group,
		datapathv1.DatapathService_WatchEndpoints_FullMethodName:     streams,
		datapathv1.DatapathService_ListEndpointEvents_FullMethodName: look,
		datapathv1.DatapathService_GetStatus_FullMethodName:          look,
		datapathv1.DatapathService_ListFrontends_FullMethodName:      look,
		// each call of the next three methods reads the whole connection table
		datapathv1.DatapathService_ListBackendConnections_FullMethodName: {
			Access: rpc.Group(), Limit: rpc.Limit{InFlight: 2, Waiting: 16},
		},
		datapathv1.ConnectionService_ListConnections_FullMethodName: {
			Access: rpc.Group(), Limit: rpc.Limit{InFlight: 4, Waiting: 16},
		},
		datapathv1.ConnectionService_FlushConnections_FullMethodName: {
			Access: rpc.Root(), Limit: rpc.Limit{InFlight: 1, Waiting: 8},
		},
		datapathv1.DatapathService_DumpMap_FullMethodName: {Access: rpc.Root(), Limit: rpc.Limit{InFlight: 2, Waiting: 8}},
		datapathv1.ObserverService_Observe_FullMethodName: streams,
		datapathv1.ObserverService_Explain_FullMethodName: look,
		datapathv1.DNSReportService_ReportDNSMessages_FullMethodName: {
			Access: rpc.RootAnd(instance.DNSID), Limit: rpc.Limit{InFlight: 1, Waiting: 4},
		},
		sharesv1.SharesService_ListShares_FullMethodName: {Access: rpc.Group(), Limit: rpc.Limit{InFlight: 4, Waiting: 32}},
	}
}
