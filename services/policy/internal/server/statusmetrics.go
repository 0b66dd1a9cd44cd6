// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-net/sluice/services/policy/internal/statuswriter"
)

type statusMetric struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(statuswriter.Figures) float64
}

func newStatusMetric(name, help string, kind prometheus.ValueType, value func(statuswriter.Figures) float64) statusMetric {
	return statusMetric{prometheus.NewDesc("sluice_policy_status_"+name, help, nil, nil), kind, value}
}

var statusMetrics = []statusMetric{
	newStatusMetric("leading", "1 while this process writes the status, else 0.", prometheus.GaugeValue, func(f statuswriter.Figures) float64 {
		if f.Leading {
			return 1
		}
		return 0
	}),
	newStatusMetric("due_objects", "Objects whose status is to be compared, and written if it differs.", prometheus.GaugeValue,
		func(f statuswriter.Figures) float64 { return float64(f.Due) }),
	newStatusMetric("writes_total", "Writes that the API server took.", prometheus.CounterValue,
		func(f statuswriter.Figures) float64 { return float64(f.Written) }),
	newStatusMetric("failed_writes_total", "Writes that it did not take, or did not answer.", prometheus.CounterValue,
		func(f statuswriter.Figures) float64 { return float64(f.Failed) }),
}

// StatusCollector gives the figures of a writer of status to Prometheus.
type StatusCollector struct{ Figures func() statuswriter.Figures }

// Describe implements prometheus.Collector.
func (StatusCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range statusMetrics {
		ch <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (c StatusCollector) Collect(ch chan<- prometheus.Metric) {
	f := c.Figures()
	for _, m := range statusMetrics {
		ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(f))
	}
}
