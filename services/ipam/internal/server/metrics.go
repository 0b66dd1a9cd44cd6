// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
)

// Metrics contains the metrics of the service. docs/reference/ipam.md lists them.
type Metrics struct {
	allocations *prometheus.CounterVec
	commits     prometheus.Histogram
	failures    prometheus.Counter
	expired     prometheus.Counter

	addresses *prometheus.Desc
	exhausted *prometheus.Desc
	outside   *prometheus.Desc
	owners    *prometheus.Desc
	bytes     *prometheus.Desc
	busy      *prometheus.Desc
	longest   *prometheus.Desc
}

// Results of an allocation: values of the label result.
const (
	resultOK          = "ok"
	resultExhausted   = "exhausted"
	resultConflict    = "conflict"    // the owner holds other addresses
	resultUnavailable = "unavailable" // a requested address is taken
	resultInvalid     = "invalid"
	resultError       = "error"
)

// NewMetrics returns the metrics, all of them zero.
func NewMetrics() *Metrics {
	m := &Metrics{
		allocations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "sluice_ipam_allocations_total", Help: "Answers to Allocate, by result.",
		}, []string{"result"}),
		commits: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "sluice_ipam_commit_seconds", Help: "How long it took to write and sync the state.",
			Buckets: []float64{.0002, .0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5},
		}),
		failures: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "sluice_ipam_commit_failures_total", Help: "Failed commits; their calls were refused.",
		}),
		expired: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "sluice_ipam_expired_leases_total", Help: "Leases that were not confirmed in time.",
		}),
		addresses: prometheus.NewDesc("sluice_ipam_pool_addresses", "Addresses of a pool, by state.", []string{"family", "pool", "state"}, nil),
		exhausted: prometheus.NewDesc("sluice_ipam_exhausted",
			"1 from an allocation that found no address, until each family has had a free one for a minute; else 0.", nil, nil),
		outside: prometheus.NewDesc("sluice_ipam_outside_addresses", "Addresses still held that the configured pools no longer allow.", nil, nil),
		owners:  prometheus.NewDesc("sluice_ipam_owners", "Owners that hold addresses.", nil, nil),
		bytes:   prometheus.NewDesc("sluice_ipam_state_bytes", "Size of the state file.", nil, nil),
		busy: prometheus.NewDesc("sluice_ipam_owner_busy_seconds",
			"How long the one loop that owns the ledger was busy with each operation; a turn is all of one batch, the other operations are parts of it.", []string{"operation"}, nil),
		longest: prometheus.NewDesc("sluice_ipam_owner_busy_longest_seconds", "The longest of them since the start.", []string{"operation"}, nil),
	}
	for _, r := range []string{resultOK, resultExhausted, resultConflict, resultUnavailable, resultInvalid, resultError} {
		m.allocations.WithLabelValues(r)
	}
	return m
}

// Observer returns the functions that an Allocator calls to update the metrics.
func (m *Metrics) Observer() ipam.Observer {
	return ipam.Observer{
		Committed: func(took time.Duration, err error) {
			m.commits.Observe(took.Seconds())
			if err != nil {
				m.failures.Inc()
			}
		},
		Expired: func(n int) { m.expired.Add(float64(n)) },
	}
}

func (m *Metrics) allocated(err error) {
	result := resultError
	switch {
	case err == nil:
		result = resultOK
	case errors.Is(err, ipam.ErrExhausted):
		result = resultExhausted
	case errors.Is(err, ipam.ErrOtherContent):
		result = resultConflict
	case errors.Is(err, ipam.ErrUnavailable):
		result = resultUnavailable
	case errors.Is(err, ipam.ErrBadRequest), errors.Is(err, ipam.ErrNoPool):
		result = resultInvalid
	}
	m.allocations.WithLabelValues(result).Inc()
}

// Register registers all metrics.
func (m *Metrics) Register(r prometheus.Registerer, a *ipam.Allocator, exhausted func() bool) error {
	for _, c := range []prometheus.Collector{m.allocations, m.commits, m.failures, m.expired, &gauges{m, a, exhausted}} {
		if err := r.Register(c); err != nil {
			return err
		}
	}
	return nil
}

// gauges contains the metrics that are read at each scrape.
type gauges struct {
	*Metrics
	ipam  *ipam.Allocator
	short func() bool
}

// Describe implements prometheus.Collector.
func (g *gauges) Describe(ch chan<- *prometheus.Desc) {
	ch <- g.addresses
	ch <- g.exhausted
	ch <- g.outside
	ch <- g.owners
	ch <- g.bytes
	ch <- g.busy
	ch <- g.longest
}

// Collect implements prometheus.Collector.
func (g *gauges) Collect(ch chan<- prometheus.Metric) {
	put := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	sum := g.ipam.Summary()
	for _, f := range sum.Pools {
		family := "ipv6"
		if f.Prefix.Addr().Is4() {
			family = "ipv4"
		}
		for _, s := range []struct {
			state string
			n     uint64
		}{{"free", f.Free}, {"leased", f.Leased}, {"confirmed", f.Confirmed}, {"quarantined", f.Quarantined}, {"reserved", f.Reserved}} {
			put(g.addresses, s.n, family, f.Prefix.String(), s.state)
		}
	}
	exhausted := uint64(0)
	if g.short() {
		exhausted = 1
	}
	put(g.exhausted, exhausted)
	put(g.outside, sum.Outside)
	put(g.owners, sum.Owners)
	put(g.bytes, uint64(g.ipam.StateBytes()))
	for _, b := range g.ipam.Busy() {
		ch <- prometheus.MustNewConstHistogram(g.busy, b.Count, b.Sum.Seconds(), b.Cumulative(), b.Operation)
		ch <- prometheus.MustNewConstMetric(g.longest, prometheus.GaugeValue, b.Longest.Seconds(), b.Operation)
	}
}
