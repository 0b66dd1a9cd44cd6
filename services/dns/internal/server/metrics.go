// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-net/sluice/services/dns/internal/exchange"
	"github.com/sluice-net/sluice/services/dns/internal/names"
	"github.com/sluice-net/sluice/services/dns/internal/rules"
)

// Metrics are the metrics of the service. docs/reference/dns.md lists them.
type Metrics struct {
	Sources

	queries, answers, held, late, names, addresses, stateProblem, sets, connected *prometheus.Desc
}

// Sources are the values of the metrics.
type Sources struct {
	Table    *names.Table
	Rules    *rules.Rules
	RuleSets func() error // returns why the rule sets are not up to date
	Counts   *exchange.Counts
	State    func() error // returns why the state is not written
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
	}
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		m.queries, m.answers, m.held, m.late, m.names, m.addresses, m.stateProblem, m.sets, m.connected,
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
	names, addresses := m.Table.Len()
	gauge(m.names, names)
	gauge(m.addresses, addresses)
	gauge(m.stateProblem, one(m.State() != nil))
	gauge(m.sets, m.Rules.Len())
	gauge(m.connected, one(m.RuleSets() == nil))
}

// one returns 1 if b is set, else 0.
func one(b bool) int {
	if b {
		return 1
	}
	return 0
}
