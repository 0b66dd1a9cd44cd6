// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-net/sluice/services/dns/internal/exchange"
	"github.com/sluice-net/sluice/services/dns/internal/names"
	"github.com/sluice-net/sluice/services/dns/internal/rules"
	"github.com/sluice-net/sluice/services/dns/internal/stream"
	"github.com/sluice-net/sluice/services/dns/internal/tap"
)

// Metrics are the metrics of the service. docs/reference/dns.md lists them.
type Metrics struct {
	Sources

	queries, answers, held, late, names, addresses, stateProblem, sets, connected *prometheus.Desc
	packets, dropped, attached, endpoints, endpointsConnected, unreported         *prometheus.Desc
	streams, streamsEnded, streamsAttached                                        *prometheus.Desc
}

// Sources are the values of the metrics.
type Sources struct {
	Table    *names.Table
	Rules    *rules.Rules
	RuleSets func() error // reason why the rule sets are not up to date; nil if they are
	Counts   *exchange.Counts
	State    func() error // reason why the state cannot be written; nil if it can
	// Packets counts packets. Fragments returns how many incomplete packets were dropped because of their waiting
	// time, and because of the limits.
	Packets       *tap.Counts
	Fragments     func() (expired, evicted uint64)
	Attached      func() error // reason why the process is not attached; nil if it is
	Endpoints     func() int
	EndpointWatch func() error // reason why the endpoints are not up to date; nil if they are
	// Unreported returns the number of messages that observers did not receive.
	Unreported func() uint64
	// Streams returns the number of TCP connections. StreamsAttached returns the reason why the process gets no TCP
	// connections.
	Streams         func() int
	StreamCounts    *stream.Counts
	StreamsAttached func() error
}

// NewHeld returns the metric of how long packets were held.
func NewHeld() prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "sluice_dns_held_seconds", Help: "How long answers waited for sluice-policy, and queries for their rule set.",
		Buckets: []float64{0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5},
	})
}

// NewMetrics returns the metrics.
func NewMetrics(s Sources) *Metrics {
	return &Metrics{
		Sources: s,
		queries: prometheus.NewDesc("sluice_dns_queries_total", "DNS queries, by verdict.", []string{"verdict"}, nil),
		answers: prometheus.NewDesc("sluice_dns_answers_total", "DNS answers, by result.", []string{"result"}, nil),
		held:    prometheus.NewDesc("sluice_dns_held_total", "Answers that waited for sluice-policy.", nil, nil),
		late: prometheus.NewDesc("sluice_dns_late_total",
			"Answers that were released before sluice-policy enforced their addresses, by reason.", []string{"reason"}, nil),
		names:     prometheus.NewDesc("sluice_dns_names", "Learned names.", nil, nil),
		addresses: prometheus.NewDesc("sluice_dns_addresses", "Addresses of learned names.", nil, nil),
		stateProblem: prometheus.NewDesc("sluice_dns_state_problem",
			"1 while learned names are not written to disk, else 0.", nil, nil),
		sets: prometheus.NewDesc("sluice_dns_rule_sets", "Rule sets of sluice-policy.", nil, nil),
		connected: prometheus.NewDesc("sluice_dns_rule_sets_connected",
			"1 while the rule sets of sluice-policy are followed, else 0.", nil, nil),
		packets: prometheus.NewDesc("sluice_dns_packets_total", "Packets from the TAP device, by kind.",
			[]string{"kind"}, nil),
		dropped: prometheus.NewDesc("sluice_dns_dropped_packets_total",
			"Packets that were dropped for another reason than their message, by reason.", []string{"reason"}, nil),
		attached: prometheus.NewDesc("sluice_dns_attached",
			"1 while the process is attached to the datapath, else 0.", nil, nil),
		endpoints: prometheus.NewDesc("sluice_dns_endpoints", "Endpoints of sluice-datapath.", nil, nil),
		endpointsConnected: prometheus.NewDesc("sluice_dns_endpoints_connected",
			"1 while the endpoints of sluice-datapath are followed, else 0.", nil, nil),
		unreported: prometheus.NewDesc("sluice_dns_unreported_messages_total",
			"Queries and answers that observers did not get, because of limits or errors.", nil, nil),
		streams: prometheus.NewDesc("sluice_dns_tcp_connections", "TCP connections of clients.", nil, nil),
		streamsEnded: prometheus.NewDesc("sluice_dns_tcp_ended_connections_total",
			"TCP connections of clients that have ended, by reason.", []string{"reason"}, nil),
		streamsAttached: prometheus.NewDesc("sluice_dns_tcp_attached",
			"1 while the process gets TCP connections from the datapath, else 0.", nil, nil),
	}
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		m.queries, m.answers, m.held, m.late, m.names, m.addresses, m.stateProblem, m.sets, m.connected,
		m.packets, m.dropped, m.attached, m.endpoints, m.endpointsConnected, m.unreported,
		m.streams, m.streamsEnded, m.streamsAttached,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	count := func(d *prometheus.Desc, v *atomic.Uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v.Load()), labels...)
	}
	gauge := func(d *prometheus.Desc, v int) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v))
	}
	count(m.queries, &m.Counts.Allowed, "allowed")
	count(m.queries, &m.Counts.Refused, "refused")
	count(m.queries, &m.Counts.Malformed, "malformed")
	count(m.answers, &m.Counts.Answered, "passed")
	count(m.answers, &m.Counts.Unasked, "unasked")
	count(m.answers, &m.Counts.BadAnswers, "malformed")
	count(m.held, &m.Counts.Held)
	count(m.late, &m.Counts.Late, "timeout")
	count(m.late, &m.Counts.NoCapacity, "no-capacity")
	count(m.late, &m.Counts.BeyondShare, "share")
	m.collectPackets(ch, count)
	m.collectStreams(count, gauge)
	gauge(m.attached, one(m.Attached() == nil))
	gauge(m.endpoints, m.Endpoints())
	gauge(m.endpointsConnected, one(m.EndpointWatch() == nil))
	ch <- prometheus.MustNewConstMetric(m.unreported, prometheus.CounterValue, float64(m.Unreported()))
	names, addresses := m.Table.Len()
	gauge(m.names, names)
	gauge(m.addresses, addresses)
	gauge(m.stateProblem, one(m.State() != nil))
	gauge(m.sets, m.Rules.Len())
	gauge(m.connected, one(m.RuleSets() == nil))
}

// collectPackets collects the counts of packets.
func (m *Metrics) collectPackets(
	ch chan<- prometheus.Metric, count func(d *prometheus.Desc, v *atomic.Uint64, labels ...string),
) {
	p := m.Packets
	count(m.packets, &p.Queries, "query")
	count(m.packets, &p.Answers, "answer")
	count(m.packets, &p.Fragments, "fragment")
	count(m.packets, &p.Invalid, "invalid")
	count(m.dropped, &p.Invalid, "invalid")
	count(m.dropped, &p.BadChecksum, "checksum")
	count(m.dropped, &p.FragmentedQueries, "fragmented-query")
	count(m.dropped, &p.FragmentConflicts, "fragment-conflict")
	count(m.dropped, &p.FragmentLimit, "fragment-limit")
	count(m.dropped, &p.NoRuleSet, "no-rule-set")
	count(m.dropped, &p.Share, "share")
	count(m.dropped, &p.PodGone, "pod-gone")
	count(m.dropped, &p.WriteErrors, "write")
	expired, evicted := m.Fragments()
	for reason, n := range map[string]uint64{"fragment-timeout": expired, "fragment-share": evicted} {
		ch <- prometheus.MustNewConstMetric(m.dropped, prometheus.CounterValue, float64(n), reason)
	}
}

// collectStreams collects the counts of TCP connections.
func (m *Metrics) collectStreams(
	count func(d *prometheus.Desc, v *atomic.Uint64, labels ...string), gauge func(*prometheus.Desc, int),
) {
	gauge(m.streams, m.Streams())
	gauge(m.streamsAttached, one(m.StreamsAttached() == nil))
	c := m.StreamCounts
	count(m.streamsEnded, &c.Client, "client")
	count(m.streamsEnded, &c.Server, "server")
	count(m.streamsEnded, &c.Connect, "connect")
	count(m.streamsEnded, &c.Idle, "idle")
	count(m.streamsEnded, &c.Slow, "slow")
	count(m.streamsEnded, &c.Share, "share")
	count(m.streamsEnded, &c.NoRuleSet, "no-rule-set")
	count(m.streamsEnded, &c.PodGone, "pod-gone")
	count(m.streamsEnded, &c.Invalid, "invalid")
	count(m.streamsEnded, &c.Stopped, "stopping")
}

// one returns 1 if b is set, else 0.
func one(b bool) int {
	if b {
		return 1
	}
	return 0
}
