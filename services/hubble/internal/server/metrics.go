// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import "github.com/prometheus/client_golang/prometheus"

// Metrics of the history and of the stream of the datapath.
var (
	connected = prometheus.NewDesc("sluice_hubble_source_connected",
		"1 while the stream of the datapath is open, else 0.", nil, nil)
	stopped = prometheus.NewDesc("sluice_hubble_history_problem",
		"1 while flows are not written or a file of the history is corrupt, else 0; the log has the details.", nil, nil)
	records = prometheus.NewDesc("sluice_hubble_history_records",
		"Stored flows, by part of the history.", []string{"part"}, nil)
	size = prometheus.NewDesc("sluice_hubble_history_bytes",
		"Size of the files of the history, by part.", []string{"part"}, nil)
	oldest = prometheus.NewDesc("sluice_hubble_history_oldest_timestamp_seconds",
		"Time of the oldest stored flow, by part.", []string{"part"}, nil)
	limit = prometheus.NewDesc("sluice_hubble_history_limit_bytes",
		"Setting history.maxSize.", nil, nil)
	unwritten = prometheus.NewDesc("sluice_hubble_history_unwritten_flows_total",
		"Flows that were not written to the history, because the file system took no writes.", nil, nil)
)

// Collector returns the Prometheus collector of the history and the stream.
func (s *Server) Collector() prometheus.Collector { return collector{s} }

type collector struct{ *Server }

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{connected, stopped, records, size, oldest, limit, unwritten} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	truth := func(yes bool) float64 {
		if yes {
			return 1
		}
		return 0
	}
	st := c.o.History.Status()
	gauge(connected, truth(c.o.Source() == nil))
	gauge(stopped, truth(st.Problem != nil))
	gauge(limit, float64(st.MaxBytes))
	for _, p := range st.Parts {
		gauge(records, float64(p.Records), p.Name)
		gauge(size, float64(p.Bytes), p.Name)
		if !p.Oldest.IsZero() {
			gauge(oldest, float64(p.Oldest.UnixNano())/1e9, p.Name)
		}
	}
	ch <- prometheus.MustNewConstMetric(unwritten, prometheus.CounterValue, float64(st.Unwritten))
}
