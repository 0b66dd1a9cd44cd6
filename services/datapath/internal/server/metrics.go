// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
)

// Metrics returns a collector that reads the counters of the kernel and the core on each scrape.
func (s *Server) Metrics() prometheus.Collector { return newMetrics(s) }

// metrics implements prometheus.Collector.
type metrics struct {
	server *Server

	packets, bytes, endpoints, repairs, deviceRepairs, nodeRepairs, unrepaired, pending, lost, entries *prometheus.Desc

	changed, waiting *prometheus.Desc

	clusterComplete, clusterNodes, clusterPrefixes, clusterWaiting, resting, unpublished *prometheus.Desc

	live, capacity, begun, ended, evicted, pickedUp, reevaluated, related, unremembered, stopped, collecting *prometheus.Desc

	used, size, revision, refusals, unknown, audited *prometheus.Desc
	limit, limitUsed, exceeds                        *prometheus.Desc

	frontends, backends, serviceRevision, serviceEnded       *prometheus.Desc
	refusedFrontends, restingServices, earlier, endedSockets *prometheus.Desc

	probes probeMetrics
}

func newMetrics(s *Server) *metrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("sluice_datapath_"+name, help, labels, nil)
	}
	return &metrics{
		server: s,
		packets: desc("packets_total", "Packets by reason and direction, since the maps were created.", "reason",
			"direction", "dropped"),
		bytes:         desc("bytes_total", "Bytes by reason and direction, Ethernet headers included.", "reason", "direction", "dropped"),
		endpoints:     desc("endpoints", "Endpoints by state.", "state"),
		repairs:       desc("attachment_repairs_total", "Attachments that were found missing or changed and were repaired."),
		deviceRepairs: desc("device_repairs_total", "Host ends that were found changed and were repaired."),
		nodeRepairs:   desc("node_repairs_total", "Repairs of addresses, rules, routes, firewall and sysctls of the node."),
		unrepaired: desc("unrepaired_differences",
			"Differences of host ends and of the node that the last comparison did not repair."),
		pending: desc("pending_releases", "Deleted endpoints whose addresses or identity wait to be released."),
		changed: desc("identity_changes_total", "Endpoints whose identity was changed at run time."),
		waiting: desc("pending_identity_changes", "Endpoints whose identity change is pending."),

		clusterComplete: desc("cluster_stream_complete", "1 if the list of other nodes is complete and the stream is open."),
		audited: desc("audited_endpoints",
			"Endpoints in audit mode: packets that their policies deny are forwarded."),
		unpublished: desc("endpoints_unpublished_total",
			"Creations that returned before other nodes had the addresses, with native routing."),
		clusterNodes:    desc("cluster_nodes", "Other nodes of the cluster."),
		clusterPrefixes: desc("cluster_prefixes", "Ranges and addresses of other nodes and external hosts in the ipcache."),
		clusterWaiting: desc("cluster_waiting_prefixes",
			"Prefixes of the cluster whose identity is not yet in the policy tables."),
		resting: desc("resting_node_numbers", "Node IDs of removed nodes that connections may still use."),

		lost:    desc("events_lost_total", "Events that the kernel dropped, since the maps were created."),
		entries: desc("map_bytes", "Memory of each map as the kernel accounts it.", "map"),

		live:     desc("connections", "Tracked connections as of the last collection.", "family"),
		capacity: desc("connections_max", "Connections that fit.", "family"),
		begun:    desc("connections_created_total", "Connections created, since the maps were created."),
		ended:    desc("connections_ended_total", "Connections removed, by reason.", "reason"),
		evicted:  desc("connections_evicted_total", "Connections evicted because the table was full; a lower bound."),
		pickedUp: desc("connections_picked_up_total", "Connections picked up mid-stream after their eviction."),
		unremembered: desc("connections_unremembered_total",
			"Revoked connections that only their entry records, because the map of revoked connections was full."),
		stopped: desc("endpoints_without_pick_up",
			"Endpoints whose connections are not picked up, because the record of a revoked one may be missing."),
		reevaluated: desc("packets_reevaluated_total",
			"Packets whose connection was evaluated again because a policy or an address had changed."),
		related:    desc("connections_related_total", "ICMP errors forwarded because they belong to a connection."),
		collecting: desc("connection_collect_seconds", "How long the last collection took."),

		used: desc("map_entries", "Entries in use, by map.", "map"),
		size: desc("map_entries_max", "Maximum number of entries, by map.", "map"),

		revision: desc("policy_revision", "Policy revision that the kernel enforces for all endpoints."),
		refusals: desc("policy_refusals", "Subjects that are isolated in a direction because their table does not fit, and "+
			"tables that lack rows or prefixes."),
		unknown: desc("policy_waiting_identities",
			"Identities that stay unknown because no identity class is free."),

		limit: desc("limit", "Size of a limit: capacity of the policy maps that tenants share, or capacity of another map "+
			"that endpoints share.", "limit"),
		limitUsed: desc("limit_used", "Units of the limit that are in use.", "limit"),
		exceeds: desc("exceeds_share", "Units that tenants need beyond their share of the limit; their tables are "+
			"not in the kernel, or not wholly.", "limit"),

		frontends: desc("frontends", "Addresses of services that the kernel translates."),
		backends:  desc("backends", "Backends of these frontends, including IDs in quarantine."),
		serviceRevision: desc("service_revision",
			"Revision of the services that the kernel enforces, except for refused frontends."),
		serviceEnded: desc("service_ended_revision",
			"Revision of the services whose removed backends are no longer used by sockets."),
		refusedFrontends: desc("refused_frontends", "Frontends that are not enforced as sluice-loadbalancer sent them."),
		restingServices: desc("resting_service_numbers",
			"IDs of removed frontends and backends that connections may still use."),
		endedSockets: desc("ended_sockets_total", "Sockets that were ended because they sent to a removed backend."),
		earlier: desc("earlier_frontends",
			"Frontends that are kept although sluice-loadbalancer, which lost its state, does not list them."),

		probes: newProbeMetrics(desc),
	}
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range append([]*prometheus.Desc{
		m.packets, m.bytes, m.endpoints, m.repairs, m.deviceRepairs, m.nodeRepairs, m.unrepaired, m.pending, m.lost, m.entries,
		m.changed, m.waiting, m.clusterComplete, m.clusterNodes, m.clusterPrefixes, m.clusterWaiting, m.resting,
		m.unpublished,
		m.live, m.capacity, m.begun, m.ended, m.evicted, m.pickedUp, m.reevaluated, m.related, m.unremembered, m.stopped, m.collecting, m.used, m.size,
		m.revision, m.refusals, m.unknown, m.audited, m.limit, m.limitUsed, m.exceeds,
		m.frontends, m.backends, m.serviceRevision, m.serviceEnded, m.refusedFrontends, m.restingServices, m.earlier,
		m.endedSockets,
	}, m.probes.all()...) {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	counters, err := m.server.Counts.Packets()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(m.packets, err)
	}
	for _, c := range counters {
		labels := []string{c.Reason.String(), c.Direction.String(), strconv.FormatBool(c.Reason.Dropped())}
		ch <- prometheus.MustNewConstMetric(m.packets, prometheus.CounterValue, float64(c.Packets), labels...)
		ch <- prometheus.MustNewConstMetric(m.bytes, prometheus.CounterValue, float64(c.Bytes), labels...)
	}
	n := m.server.Core.Counts()
	for s := endpoint.Restoring; s <= endpoint.Damaged; s++ {
		ch <- prometheus.MustNewConstMetric(m.endpoints, prometheus.GaugeValue, float64(n.ByState[s]), s.String())
	}
	ch <- prometheus.MustNewConstMetric(m.repairs, prometheus.CounterValue, float64(n.Repairs))
	ch <- prometheus.MustNewConstMetric(m.deviceRepairs, prometheus.CounterValue, float64(n.DeviceRepairs))
	ch <- prometheus.MustNewConstMetric(m.nodeRepairs, prometheus.CounterValue, float64(n.NodeRepairs))
	ch <- prometheus.MustNewConstMetric(m.unrepaired, prometheus.GaugeValue, float64(len(n.Unrepaired)))
	if m.server.Cluster != nil {
		c := m.server.Cluster()
		gauge := func(d *prometheus.Desc, n int) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n))
		}
		complete := 0
		if c.Complete {
			complete = 1
		}
		gauge(m.clusterComplete, complete)
		gauge(m.clusterNodes, c.Nodes)
		gauge(m.clusterPrefixes, c.Prefixes)
		gauge(m.clusterWaiting, c.Waiting)
		gauge(m.resting, c.Resting)
		ch <- prometheus.MustNewConstMetric(m.unpublished, prometheus.CounterValue, float64(c.Unpublished))
	}
	if m.server.Probes != nil {
		m.probes.collect(ch, m.server.Probes())
	}
	ch <- prometheus.MustNewConstMetric(m.pending, prometheus.GaugeValue, float64(n.PendingReleases))
	ch <- prometheus.MustNewConstMetric(m.changed, prometheus.CounterValue, float64(n.Relabels))
	ch <- prometheus.MustNewConstMetric(m.waiting, prometheus.GaugeValue, float64(n.PendingRelabels))
	if lost, err := m.server.Counts.EventsLost(); err == nil {
		ch <- prometheus.MustNewConstMetric(m.lost, prometheus.CounterValue, float64(lost))
	}
	usage, err := m.server.Counts.MapUsage()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(m.entries, err)
	}
	for _, u := range usage {
		ch <- prometheus.MustNewConstMetric(m.entries, prometheus.GaugeValue, float64(u.Bytes), u.Name)
		ch <- prometheus.MustNewConstMetric(m.used, prometheus.GaugeValue, float64(u.Entries), u.Name)
		ch <- prometheus.MustNewConstMetric(m.size, prometheus.GaugeValue, float64(u.MaxEntries), u.Name)
		if family, ok := connectionMaps[u.Name]; ok {
			ch <- prometheus.MustNewConstMetric(m.capacity, prometheus.GaugeValue, float64(u.MaxEntries), family)
		}
	}
	m.collectConnections(ch)
	m.collectServices(ch)
	m.collectBounds(ch)
	if m.server.Policy != nil {
		st := m.server.Policy.Status()
		ch <- prometheus.MustNewConstMetric(m.revision, prometheus.GaugeValue, float64(st.Revision))
		ch <- prometheus.MustNewConstMetric(m.refusals, prometheus.GaugeValue, float64(len(st.Refusals)))
		ch <- prometheus.MustNewConstMetric(m.unknown, prometheus.GaugeValue, float64(st.Waiting))
		ch <- prometheus.MustNewConstMetric(m.audited, prometheus.GaugeValue, float64(m.server.auditedEndpoints()))
		for _, u := range m.server.Policy.Shares() {
			ch <- prometheus.MustNewConstMetric(m.limit, prometheus.GaugeValue, float64(u.Limit.Size), u.Limit.Name)
			ch <- prometheus.MustNewConstMetric(m.limitUsed, prometheus.GaugeValue, float64(u.Used), u.Limit.Name)
			ch <- prometheus.MustNewConstMetric(m.exceeds, prometheus.GaugeValue, float64(u.Asked-u.Used), u.Limit.Name)
		}
	}
}

// collectBounds collects the limits that endpoints share.
func (m *metrics) collectBounds(ch chan<- prometheus.Metric) {
	if m.server.Bounds == nil {
		return
	}
	for _, b := range bound.Counted() {
		if size := m.server.Bounds.Size(b); size > 0 {
			used := float64(m.server.Bounds.Total(b))
			ch <- prometheus.MustNewConstMetric(m.limit, prometheus.GaugeValue, float64(size), b.String())
			ch <- prometheus.MustNewConstMetric(m.limitUsed, prometheus.GaugeValue, used, b.String())
		}
	}
}

// collectServices collects the metrics of services, if they are translated.
func (m *metrics) collectServices(ch chan<- prometheus.Metric) {
	if m.server.Frontends == nil {
		return
	}
	st := m.server.Frontends.Status()
	n, err := m.server.Services.Counts()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(m.frontends, err)
		return
	}
	for desc, v := range map[*prometheus.Desc]float64{
		m.frontends: float64(n.Frontends), m.backends: float64(n.Backends), m.restingServices: float64(n.Resting),
		m.serviceRevision: float64(st.Revision), m.serviceEnded: float64(st.Ended),
		m.refusedFrontends: float64(len(st.Refused())),
		m.earlier:          float64(st.Earlier),
	} {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, v)
	}
	if m.server.Ender != nil {
		ch <- prometheus.MustNewConstMetric(m.endedSockets, prometheus.CounterValue, float64(m.server.Ender.Ended()))
	}
}

// connectionMaps maps the connection tables to their families.
var connectionMaps = map[string]string{"sl_ct4": "ipv4", "sl_ct6": "ipv6"}

func (m *metrics) collectConnections(ch chan<- prometheus.Metric) {
	c, err := m.server.Counts.Connections()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(m.begun, err)
		return
	}
	for family, n := range map[string]uint64{"ipv4": c.LiveIPv4, "ipv6": c.LiveIPv6} {
		ch <- prometheus.MustNewConstMetric(m.live, prometheus.GaugeValue, float64(n), family)
	}
	for reason, n := range map[string]uint64{"revoked": c.Revoked, "expired": c.Expired} {
		ch <- prometheus.MustNewConstMetric(m.ended, prometheus.CounterValue, float64(n), reason)
	}
	for desc, n := range map[*prometheus.Desc]uint64{
		m.begun: c.Created, m.evicted: c.Evicted, m.pickedUp: c.PickedUp, m.reevaluated: c.Reevaluated, m.related: c.Related, m.unremembered: c.Unremembered,
	} {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n))
	}
	ch <- prometheus.MustNewConstMetric(m.stopped, prometheus.GaugeValue, float64(c.PickUpStopped))
	ch <- prometheus.MustNewConstMetric(m.collecting, prometheus.GaugeValue, c.Collected.Seconds())
}
