// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-net/sluice/services/http/internal/relay"
)

// Requests are the metrics of requests. docs/reference/http.md lists all metrics.
type Requests struct {
	total   *prometheus.CounterVec
	seconds prometheus.Histogram
}

// NewRequests returns the metrics of requests.
func NewRequests() *Requests {
	return &Requests{
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "sluice_http_requests_total",
			Help: "Requests and TLS connections, by outcome, class of the status code, and namespace of the client.",
		}, []string{"outcome", "code", "namespace"}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "sluice_http_request_seconds", Help: "Time from the first byte of a request to the end of its response.",
			Buckets: []float64{0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10},
		}),
	}
}

// Report counts a request.
func (r *Requests) Report(namespace string, e relay.Event) {
	code := "none"
	if e.Status > 0 {
		code = strconv.Itoa(e.Status/100) + "xx"
	}
	r.total.WithLabelValues(string(e.Outcome), code, namespace).Inc()
	r.seconds.Observe(e.Duration.Seconds())
}

// Describe implements prometheus.Collector.
func (r *Requests) Describe(ch chan<- *prometheus.Desc) {
	r.total.Describe(ch)
	r.seconds.Describe(ch)
}

// Collect implements prometheus.Collector.
func (r *Requests) Collect(ch chan<- prometheus.Metric) {
	r.total.Collect(ch)
	r.seconds.Collect(ch)
}

// Sources are the values of the other metrics.
type Sources struct {
	Server    *Server
	RuleSets  func() int
	Following func() error // reason why the rule sets are not up to date; nil if they are
	Attached  func() error // reason why the process gets no connections; nil if it gets them
	Endpoints func() int
}

// Metrics are the metrics of connections and of what the process follows.
type Metrics struct {
	Sources
	connections, ended, sets, following, attached, endpoints *prometheus.Desc
}

// NewMetrics returns the metrics.
func NewMetrics(s Sources) *Metrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("sluice_http_"+name, help, labels, nil)
	}
	return &Metrics{
		Sources:     s,
		connections: desc("connections", "Connections of clients."),
		ended:       desc("dropped_connections_total", "Connections that were reset, by reason: invalid or share.", "reason"),
		sets:        desc("rule_sets", "Rule sets of sluice-policy."),
		following:   desc("rule_sets_connected", "1 while the rule sets of sluice-policy are followed, else 0."),
		attached:    desc("attached", "1 while the process gets connections of pods, else 0."),
		endpoints:   desc("endpoints", "Endpoints of sluice-datapath."),
	}
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.connections, m.ended, m.sets, m.following, m.attached, m.endpoints} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v int) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v))
	}
	is := func(problem error) int {
		if problem == nil {
			return 1
		}
		return 0
	}
	gauge(m.connections, m.Server.Len())
	gauge(m.sets, m.RuleSets())
	gauge(m.following, is(m.Following()))
	gauge(m.attached, is(m.Attached()))
	gauge(m.endpoints, m.Endpoints())
	ch <- prometheus.MustNewConstMetric(m.ended, prometheus.CounterValue, float64(m.Server.Invalid.Load()), "invalid")
	ch <- prometheus.MustNewConstMetric(m.ended, prometheus.CounterValue, float64(m.Server.Share.Load()), "share")
}
