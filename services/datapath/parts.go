// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"cmp"
	"fmt"
	"slices"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/node/routing"
	"github.com/sluice-net/sluice/services/datapath/internal/server"
)

// parts returns what status and metrics contain, in the order of the warnings. policy is nil in policy mode none.
func (d *datapath) parts(called callees, policy *server.PolicyPart) []server.Part {
	all := []server.Part{
		server.EndpointsPart{Report: d.Endpoints.Report, Ranges: d.Ranges, Owners: called.owners},
		server.PacketsPart{Events: d.Kernel.Events},
		server.MapsPart{Usage: d.Kernel.MapUsage},
		server.ConnectionsPart{Counts: d.connectionCounts},
		server.BoundsPart{Bounds: d.Kernel.Bounds},
		server.ClusterPart{State: d.clusterStream},
	}
	if d.Services != nil {
		all = append(all, server.ServicesPart{Frontends: d.Services.Frontends, Ender: d.Services, Kernel: d.Kernel.Services})
	}
	if d.Proxy != nil {
		all = append(all, server.ProxiesPart{Proxies: []server.Proxy{d.Proxy}})
	}
	if d.Node.Prober != nil {
		all = append(all, server.ProbesPart{State: d.Node.Prober.State})
	}
	if d.Node.Mode() != cluster.None {
		all = append(all, server.RoutingPart{State: d.podRouting})
	}
	if policy != nil {
		all = append(all, policy)
	}
	return all
}

// policyPart returns the part about policies; nil in policy mode none.
func (d *datapath) policyPart(cfg Config) *server.PolicyPart {
	if d.Policy == nil {
		return nil
	}
	return &server.PolicyPart{
		Tables: d.Policy.Applier, Modes: d.Policy.Modes, Report: d.Endpoints.Report,
		Required: cfg.Policy.Mode == policyRequired, Audit: cfg.Policy.Audit,
	}
}

// connectionCounts counts the tracked connections.
func (d *datapath) connectionCounts() (server.Connections, error) {
	k, err := d.Kernel.Connections.Counters()
	if err != nil {
		return server.Connections{}, fmt.Errorf("read the counters of connections: %w", err)
	}
	stopped, err := d.Kernel.Endpoints.PickUpStopped()
	if err != nil {
		return server.Connections{}, err
	}
	last := d.Collector.Last()
	return server.Connections{
		LiveIPv4: uint64(last.Live[0]), LiveIPv6: uint64(last.Live[1]), Created: k.Created, Revoked: k.Revoked, Expired: k.Expired,
		Evicted: last.Evicted, PickedUp: k.PickedUp, Reevaluated: k.Reevaluated, Related: k.Related, Unremembered: k.Unremembered,
		PickUpStopped: stopped, Collected: last.Took, EvictedAt: last.EvictedAt, OutsideSpent: last.OutsideSpent,
	}, nil
}

// clusterStream returns the state of this node's view of the other nodes.
func (d *datapath) clusterStream() server.ClusterStream {
	counts := d.Kernel.IPCache.Counts()
	return server.ClusterStream{
		State: d.Node.Follower.State(), Prefixes: counts.Prefixes, Waiting: counts.Waiting,
		Unpublished: d.Node.Unpublished(),
		Resting:     d.Node.Numbers.Resting(), Numbers: d.Node.Numbers.Err(), Registration: d.Node.Registrar.Err(),
	}
}

// podRouting returns how packets travel between pods of two nodes.
func (d *datapath) podRouting() *datapathv1.PodRouting {
	return podRouting(d.Node.Router.State(), d.Node.Host.Bypassed())
}

// podRouting describes how packets between pods of two nodes travel; bypassed are the firewall rules about the tunnel's
// port.
func podRouting(s routing.State, bypassed []string) *datapathv1.PodRouting {
	r := &datapathv1.PodRouting{Mode: string(s.Mode), ByStack: s.ByStack, Reason: s.Why}
	if s.Mode != cluster.Overlay {
		return r
	}
	r.Reason = s.Closed
	if !s.Shortcut {
		r.Reason = "routing.shortcut is off"
	}
	for _, p := range s.Peers {
		if p.Paths[0].MTU == 0 && p.Paths[1].MTU == 0 {
			continue // not reachable, which a warning says
		}
		path := &datapathv1.TunnelPath{Node: p.Name, BypassesDevice: r.Reason == "" && p.Direct}
		if path.BypassesDevice {
			r.BypassedRules = bypassed
		} else {
			path.Reason = cmp.Or(r.Reason, p.Device)
		}
		r.TunnelPaths = append(r.TunnelPaths, path)
	}
	slices.SortFunc(r.TunnelPaths, func(a, b *datapathv1.TunnelPath) int { return cmp.Compare(a.Node, b.Node) })
	return r
}
