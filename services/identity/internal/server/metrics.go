// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

type metric struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(allocator.Status, allocator.Counters) float64
}

func newMetric(name, help string, kind prometheus.ValueType,
	value func(allocator.Status, allocator.Counters) float64,
) metric {
	return metric{prometheus.NewDesc("sluice_identity_"+name, help, nil, nil), kind, value}
}

var metrics = []metric{
	newMetric("cluster_identities", "Identities of the cluster that this node knows.", prometheus.GaugeValue,
		func(s allocator.Status, _ allocator.Counters) float64 { return float64(s.Known) }),
	newMetric("held_identities", "Identities of the cluster that this node holds.", prometheus.GaugeValue,
		func(s allocator.Status, _ allocator.Counters) float64 { return float64(s.Held) }),
	newMetric("isolated_endpoints", "Endpoints that are isolated because the labels of their pod have no identity.",
		prometheus.GaugeValue, func(s allocator.Status, _ allocator.Counters) float64 { return float64(s.Isolated) }),
	newMetric("pending_store_writes", "References and releases that wait for etcd.", prometheus.GaugeValue,
		func(s allocator.Status, _ allocator.Counters) float64 { return float64(s.PendingWrites) }),
	newMetric("store_connected", "1 while this node is connected to etcd, else 0.", prometheus.GaugeValue,
		func(s allocator.Status, _ allocator.Counters) float64 {
			if s.Connected {
				return 1
			}
			return 0
		}),
	newMetric("allocated_identities_total", "Identities that this node created.", prometheus.CounterValue,
		func(_ allocator.Status, c allocator.Counters) float64 { return float64(c.Allocated) }),
	newMetric("collected_identities_total", "Identities without references that this node removed.",
		prometheus.CounterValue,
		func(_ allocator.Status, c allocator.Counters) float64 { return float64(c.Collected) }),
	newMetric("restored_references_total", "References of this node that were written again.", prometheus.CounterValue,
		func(_ allocator.Status, c allocator.Counters) float64 { return float64(c.Restored) }),
	newMetric("offline_answers_total", "Answers given from memory because etcd was unavailable.", prometheus.CounterValue,
		func(_ allocator.Status, c allocator.Counters) float64 { return float64(c.Offline) }),
	newMetric("relabelled_endpoints_total", "Endpoints that were moved because the labels of their pod changed.",
		prometheus.CounterValue,
		func(_ allocator.Status, c allocator.Counters) float64 { return float64(c.Relabelled) }),
	newMetric("conflicts_total",
		"Identities of this node that the cluster gave to other labels while the node was cut off; the log has an error for each.",
		prometheus.CounterValue,
		func(_ allocator.Status, c allocator.Counters) float64 { return float64(c.Conflicts) }),
}

// Metrics of the lock; the label operation has the operations of package allocator.
var (
	busyDesc = prometheus.NewDesc("sluice_identity_owner_busy_seconds",
		"How long each operation held the lock on the state of the allocator; all other operations wait for the lock.",
		[]string{"operation"}, nil)
	longestDesc = prometheus.NewDesc("sluice_identity_owner_busy_longest_seconds", "Longest time that each operation held the lock since the start.",
		[]string{"operation"}, nil)
)

// Metrics of the registry.
var (
	nodesDesc = prometheus.NewDesc("sluice_identity_nodes", "Other nodes of the cluster that are registered.", nil,
		nil)
	mappingsDesc = prometheus.NewDesc("sluice_identity_mappings",
		"Addresses of other nodes' endpoints whose identity is known.", nil, nil)
	refusedDesc = prometheus.NewDesc("sluice_identity_refused_mappings",
		"Addresses that other nodes wrote and that are refused, because they lie outside the node's ranges or an "+
			"earlier incarnation wrote them.", nil, nil)
	unpublishedDesc = prometheus.NewDesc("sluice_identity_pending_mappings",
		"Endpoints of this node whose addresses wait for etcd.", nil, nil)
	rangesDesc = prometheus.NewDesc("sluice_identity_refused_ranges",
		"Ranges of this node that belong to another node.", nil, nil)
	listingsDesc = prometheus.NewDesc("sluice_identity_store_listings_total",
		"Listings of all identities, nodes and addresses in etcd: one at the first start, later only when etcd's history "+
			"does not reach back to the last revision that this node has.", nil, nil)
)

// Collector exports the figures of allocator and registry to Prometheus.
type Collector struct {
	Allocator *allocator.Allocator
	Registry  *registry.Registry
	Listings  func() uint64 // of the store
}

// Describe implements prometheus.Collector.
func (Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range metrics {
		ch <- m.desc
	}
	ch <- busyDesc
	ch <- longestDesc
	for _, d := range []*prometheus.Desc{nodesDesc, mappingsDesc, refusedDesc, unpublishedDesc, rangesDesc, listingsDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c Collector) Collect(ch chan<- prometheus.Metric) {
	status, counters := c.Allocator.Summary(), c.Allocator.Counters()
	for _, m := range metrics {
		ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(status, counters))
	}
	for _, b := range c.Allocator.Busy() {
		ch <- prometheus.MustNewConstHistogram(busyDesc, b.Count, b.Sum.Seconds(), b.Cumulative(), b.Operation)
		ch <- prometheus.MustNewConstMetric(longestDesc, prometheus.GaugeValue, b.Longest.Seconds(), b.Operation)
	}
	ch <- prometheus.MustNewConstMetric(listingsDesc, prometheus.CounterValue, float64(c.Listings()))
	r := c.Registry.Status()
	for d, n := range map[*prometheus.Desc]int{
		nodesDesc: r.Nodes, mappingsDesc: r.Mappings, refusedDesc: r.Refused, unpublishedDesc: r.Pending,
		rangesDesc: len(r.Ranges),
	} {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n))
	}
}
