// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import "github.com/prometheus/client_golang/prometheus"

// Metrics of the election and of each subject.
var (
	leading = prometheus.NewDesc("sluice_controller_leading",
		"1 while this process is elected, else 0. The sum over all is 1.", nil, nil)
	pending = prometheus.NewDesc("sluice_controller_pending_objects",
		"Objects for which a request is due. If this is above 0 for minutes, read the log.", []string{"subject"}, nil)
	requests = prometheus.NewDesc("sluice_controller_requests_total",
		"Requests that succeeded.", []string{"subject"}, nil)
	failed = prometheus.NewDesc("sluice_controller_failed_requests_total",
		"Requests that were refused or not answered.", []string{"subject"}, nil)
	duration = prometheus.NewDesc("sluice_controller_request_seconds",
		"How long requests took.", []string{"subject"}, nil)
)

// Collector returns the Prometheus collector of the election and the subjects.
func (s *Server) Collector() prometheus.Collector { return collector{s} }

type collector struct{ *Server }

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{leading, pending, requests, failed, duration} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	value := 0.0
	if c.o.Election().Leading {
		value = 1
	}
	ch <- prometheus.MustNewConstMetric(leading, prometheus.GaugeValue, value)
	for _, x := range c.subjects() {
		ch <- prometheus.MustNewConstMetric(pending, prometheus.GaugeValue, float64(x.Pending), x.Name)
		ch <- prometheus.MustNewConstMetric(requests, prometheus.CounterValue, float64(x.Done), x.Name)
		ch <- prometheus.MustNewConstMetric(failed, prometheus.CounterValue, float64(x.Failed), x.Name)
		ch <- prometheus.MustNewConstHistogram(duration, x.Times.Count, x.Times.Sum.Seconds(), x.Times.Cumulative(), x.Name)
	}
}
