// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"github.com/prometheus/client_golang/prometheus"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// EndpointsPart describes the endpoints of the node.
type EndpointsPart struct{ Endpoints }

var (
	endpointsDesc     = desc("endpoints", "Endpoints by state.", "state")
	repairsDesc       = desc("attachment_repairs_total", "Attachments that were found missing or changed and were repaired.")
	deviceRepairsDesc = desc("device_repairs_total", "Host ends that were found changed and were repaired.")
	nodeRepairsDesc   = desc("node_repairs_total",
		"Repairs of addresses, rules, routes, firewall and sysctls of the node.")
	unrepairedDesc = desc("unrepaired_differences",
		"Differences of host ends and of the node that the last comparison did not repair.")
	pendingDesc = desc("pending_releases", "Deleted endpoints whose addresses or identity wait to be released.")
	changedDesc = desc("identity_changes_total", "Endpoints whose identity was changed at run time.")
	waitingDesc = desc("pending_identity_changes", "Endpoints whose identity change is pending.")
)

func (p EndpointsPart) report(r *report) error {
	n, ranges := p.Calls().Report.Counts(), p.PodRanges()
	r.warn(n.BadRecords...)
	r.warn(n.Unrepaired...)
	r.warn(n.Waiting...)
	r.AttachmentRepairs, r.DeviceRepairs, r.NodeRepairs = n.Repairs, n.DeviceRepairs, n.NodeRepairs
	r.PendingReleases = uint32(n.PendingReleases)
	r.NodeAddresses = wire.Addresses(ranges.NodeAddrs())
	for _, c := range ranges.All() {
		r.PodPrefixes = append(r.PodPrefixes, c.String())
	}
	for state := endpoint.Restoring; state <= endpoint.Damaged; state++ {
		r.Endpoints = append(r.Endpoints, &datapathv1.EndpointStateCount{
			State: protoState(state), Count: uint32(n.ByState[state]),
		})
	}
	complete, err := p.IdentityStream()
	r.IdentityStream = &datapathv1.IdentityStream{
		Complete: complete, Changed: n.Relabels, Pending: uint32(n.PendingRelabels),
	}
	if err != nil {
		r.IdentityStream.Error = err.Error()
	}
	return nil
}

// Describe implements prometheus.Collector.
func (EndpointsPart) Describe(ch chan<- *prometheus.Desc) {
	describe(ch, endpointsDesc, repairsDesc, deviceRepairsDesc, nodeRepairsDesc, unrepairedDesc, pendingDesc, changedDesc,
		waitingDesc)
}

// Collect implements prometheus.Collector.
func (p EndpointsPart) Collect(ch chan<- prometheus.Metric) {
	n := p.Calls().Report.Counts()
	for s := endpoint.Restoring; s <= endpoint.Damaged; s++ {
		gauge(ch, endpointsDesc, float64(n.ByState[s]), s.String())
	}
	counter(ch, repairsDesc, n.Repairs)
	counter(ch, deviceRepairsDesc, n.DeviceRepairs)
	counter(ch, nodeRepairsDesc, n.NodeRepairs)
	gauge(ch, unrepairedDesc, float64(len(n.Unrepaired)))
	gauge(ch, pendingDesc, float64(n.PendingReleases))
	counter(ch, changedDesc, n.Relabels)
	gauge(ch, waitingDesc, float64(n.PendingRelabels))
}
