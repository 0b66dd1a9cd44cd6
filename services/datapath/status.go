// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-net/sluice/kit/process"
	services "github.com/sluice-net/sluice/services/datapath/internal/client"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
	"github.com/sluice-net/sluice/services/datapath/internal/node"
	"github.com/sluice-net/sluice/services/datapath/internal/server"
)

// setGroups sets the supplementary groups of all threads.
func setGroups(gids []int) error { return syscall.Setgroups(gids) }

// probeTimeout bounds what GetStatus asks other services.
const probeTimeout = 2 * time.Second

func statusOf(p *process.Process, cfg Config, n *node.Node, ipam *services.IPAM, identity *services.Identity, policies *services.Policy) func(context.Context) (server.Status, error) {
	start := time.Now()
	return func(ctx context.Context) (server.Status, error) {
		st := server.Status{
			Version: process.Version().String(), Start: start, PolicyMode: cfg.Policy.Mode, KernelRelease: n.KernelRelease,
		}
		for _, c := range cfg.PodCIDRs {
			st.PodCIDRs = append(st.PodCIDRs, c.String())
		}
		for _, a := range n.NodeAddrs {
			st.NodeAddrs = append(st.NodeAddrs, a.AsSlice())
		}
		counters, err := n.Kernel.Metrics()
		if err != nil {
			return st, fmt.Errorf("read counters: %w", err)
		}
		for _, c := range counters {
			st.Counters = append(st.Counters, server.Counter{
				Reason: c.Reason.String(), Egress: c.Direction == kernel.Egress, Dropped: c.Reason.Dropped(), Packets: c.Packets, Bytes: c.Bytes,
			})
		}
		if st.EventsLost, err = n.Kernel.EventsLost(); err != nil {
			return st, fmt.Errorf("read lost events: %w", err)
		}
		ctx, cancel := context.WithTimeout(ctx, probeTimeout)
		defer cancel()
		st.Problems = n.Problems(ctx, ipam)
		ierr := identity.Ping(ctx)
		if ierr != nil {
			st.Problems = append(st.Problems, ierr.Error())
		}
		st.Dependencies = []server.Dependency{{Name: "identity", Err: ierr}, {Name: "ipam", Err: ipam.Err()}}
		if n.Policy != nil {
			ps := n.Policy.Status()
			perr := ps.Err
			if perr == nil {
				perr = policies.Ping(ctx)
			}
			if perr != nil && cfg.Policy.Mode == policyRequired {
				st.Problems = append(st.Problems, perr.Error())
			}
			st.Dependencies = append(st.Dependencies, server.Dependency{Name: "policy", Err: perr})
			st.PolicyRevision, st.PolicyRefusals = ps.Revision, ps.Refusals
			if ps.Waiting > 0 {
				st.PolicyRefusals = append(st.PolicyRefusals, fmt.Sprintf("%d identities stay unknown, because tables have no room for them", ps.Waiting))
			}
		}
		return st, nil
	}
}

// metrics reads the kernel's and the core's counters when they are asked for.
type metrics struct {
	node *node.Node

	packets, bytes, endpoints, repairs, pending, lost, entries *prometheus.Desc
}

func newMetrics(n *node.Node) *metrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("sluice_datapath_"+name, help, labels, nil)
	}
	return &metrics{
		node:      n,
		packets:   desc("packets_total", "Packets by reason and direction, since the maps were made.", "reason", "direction", "dropped"),
		bytes:     desc("bytes_total", "Bytes by reason and direction, Ethernet headers included.", "reason", "direction", "dropped"),
		endpoints: desc("endpoints", "Endpoints by state.", "state"),
		repairs:   desc("attachment_repairs_total", "Attachments that were found missing or changed and were repaired."),
		pending:   desc("pending_releases", "Deleted endpoints whose addresses or identity wait to be released."),
		lost:      desc("events_lost_total", "Drop events that the kernel left out, since the maps were made."),
		entries:   desc("map_bytes", "Memory of each map as the kernel accounts it.", "map"),
	}
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.packets, m.bytes, m.endpoints, m.repairs, m.pending, m.lost, m.entries} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	counters, err := m.node.Kernel.Metrics()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(m.packets, err)
	}
	for _, c := range counters {
		labels := []string{c.Reason.String(), c.Direction.String(), fmt.Sprint(c.Reason.Dropped())}
		ch <- prometheus.MustNewConstMetric(m.packets, prometheus.CounterValue, float64(c.Packets), labels...)
		ch <- prometheus.MustNewConstMetric(m.bytes, prometheus.CounterValue, float64(c.Bytes), labels...)
	}
	n := m.node.Core.Counts()
	for s := endpoint.Restoring; s <= endpoint.Disconnecting; s++ {
		ch <- prometheus.MustNewConstMetric(m.endpoints, prometheus.GaugeValue, float64(n.ByState[s]), s.String())
	}
	ch <- prometheus.MustNewConstMetric(m.repairs, prometheus.CounterValue, float64(n.Repairs))
	ch <- prometheus.MustNewConstMetric(m.pending, prometheus.GaugeValue, float64(n.PendingReleases))
	if lost, err := m.node.Kernel.EventsLost(); err == nil {
		ch <- prometheus.MustNewConstMetric(m.lost, prometheus.CounterValue, float64(lost))
	}
	maps, err := m.node.Kernel.Maps()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(m.entries, err)
	}
	for _, info := range maps {
		ch <- prometheus.MustNewConstMetric(m.entries, prometheus.GaugeValue, float64(info.Bytes), info.Name)
	}
}
