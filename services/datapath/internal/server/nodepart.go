// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/node"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/node/probe"
	"github.com/sluice-net/sluice/services/datapath/internal/node/routing"
)

// ClusterStream is the state of this node's view of the other nodes.
type ClusterStream node.ClusterState

// maxRefused limits the number of reported invalid entries of the cluster.
const maxRefused = 16

func (c ClusterStream) proto() *datapathv1.ClusterStream {
	text := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	return &datapathv1.ClusterStream{
		Complete: c.Complete, Error: text(c.Err), Nodes: uint32(c.Nodes), Prefixes: uint32(c.Prefixes),
		WaitingPrefixes: uint32(c.Waiting), RestingNumbers: uint32(c.Resting), RegistrationError: text(c.Registration),
		Refused: c.Refused[:min(len(c.Refused), maxRefused)],
	}
}

func (c ClusterStream) warnings() (all []string) {
	if c.Err != nil {
		all = append(all, fmt.Sprintf("cluster: using the last known state of other nodes: %v", c.Err))
	}
	if c.Registration != nil {
		all = append(all, fmt.Sprintf("cluster: the current state of this node is not registered: %v", c.Registration))
	}
	if c.Numbers != nil {
		all = append(all, fmt.Sprintf("cluster: node IDs: %v", c.Numbers))
	}
	for _, r := range c.Refused[:min(len(c.Refused), maxRefused)] {
		all = append(all, "cluster: not trusted: "+r)
	}
	return all
}

// ClusterPart describes what this node knows about the other nodes.
type ClusterPart struct {
	State func() ClusterStream
}

var (
	clusterCompleteDesc = desc("cluster_stream_complete",
		"1 if the list of other nodes is complete and the stream is open.")
	clusterNodesDesc    = desc("cluster_nodes", "Other nodes of the cluster.")
	clusterPrefixesDesc = desc("cluster_prefixes",
		"Ranges and addresses of other nodes and external hosts in the ipcache.")
	clusterWaitingDesc = desc("cluster_waiting_prefixes",
		"Prefixes of the cluster whose identity is not yet in the policy tables.")
	restingDesc     = desc("resting_node_numbers", "Node IDs of removed nodes that connections may still use.")
	unpublishedDesc = desc("endpoints_unpublished_total",
		"Creations that returned before other nodes had the addresses, with native routing.")
)

func (p ClusterPart) report(r *report) error {
	c := p.State()
	r.ClusterStream = c.proto()
	r.warn(c.warnings()...)
	return nil
}

// Describe implements prometheus.Collector.
func (ClusterPart) Describe(ch chan<- *prometheus.Desc) {
	describe(ch, clusterCompleteDesc, clusterNodesDesc, clusterPrefixesDesc, clusterWaitingDesc, restingDesc, unpublishedDesc)
}

// Collect implements prometheus.Collector.
func (p ClusterPart) Collect(ch chan<- prometheus.Metric) {
	c := p.State()
	complete := 0.0
	if c.Complete {
		complete = 1
	}
	gauge(ch, clusterCompleteDesc, complete)
	gauge(ch, clusterNodesDesc, float64(c.Nodes))
	gauge(ch, clusterPrefixesDesc, float64(c.Prefixes))
	gauge(ch, clusterWaitingDesc, float64(c.Waiting))
	gauge(ch, restingDesc, float64(c.Resting))
	counter(ch, unpublishedDesc, c.Unpublished)
}

// RoutingPart describes how packets travel between pods of two nodes. It has no metrics.
type RoutingPart struct {
	State func() *datapathv1.PodRouting
}

func (p RoutingPart) report(r *report) error {
	r.PodRouting = p.State()
	return nil
}

// Describe implements prometheus.Collector.
func (RoutingPart) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (RoutingPart) Collect(chan<- prometheus.Metric) {}

// routingOf returns how packets travel between pods of this node and of others; nil if they do not.
func routingOf(x Cluster) *datapathv1.PodRouting {
	state, bypassed, ok := x.PodRouting()
	if !ok {
		return nil
	}
	return PodRouting(state, bypassed)
}

// PodRouting describes how packets between pods of two nodes travel; bypassed are the firewall rules about the tunnel's
// port.
func PodRouting(s routing.State, bypassed []string) *datapathv1.PodRouting {
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

// ProbesPart describes the paths to other nodes, if they are probed.
type ProbesPart struct {
	State func() (state probe.State, ok bool)
}

func (p ProbesPart) report(r *report) error {
	state, ok := p.State()
	if !ok {
		return nil
	}
	probes, troubles := nodeProbes(state)
	r.NodeProbes = probes
	r.warn(troubles...)
	return nil
}

// Describe implements prometheus.Collector.
func (ProbesPart) Describe(ch chan<- *prometheus.Desc) { describe(ch, probeDescs.all()...) }

// Collect implements prometheus.Collector.
func (p ProbesPart) Collect(ch chan<- prometheus.Metric) {
	if state, ok := p.State(); ok {
		probeDescs.collect(ch, state)
	}
}
