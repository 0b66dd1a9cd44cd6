// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package loopmetrics exports the figures of a loop to Prometheus. It is separate from package
// loop, which programs without metrics also use.
package loopmetrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-net/sluice/kit/desired/loop"
)

// Metrics exports, per operation, a histogram of turn durations and the longest turn.
type Metrics struct{ busy, longest *prometheus.Desc }

// New returns the metrics of a loop. owned names what the loop owns, such as "policy"; prefix
// begins the metric names, such as "sluice_policy_".
func New(prefix, owned string) Metrics {
	labels := []string{"operation"}
	return Metrics{
		busy: prometheus.NewDesc(prefix+"owner_busy_seconds", "Time for which the goroutine that owns "+owned+
			" was busy with each operation; other operations wait meanwhile.", labels, nil),
		longest: prometheus.NewDesc(prefix+"owner_busy_longest_seconds",
			"Longest time that one operation took since the start.", labels, nil),
	}
}

// Describe sends the descriptions of the metrics to ch.
func (m Metrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- m.busy
	ch <- m.longest
}

// Collect sends the metrics of the figures to ch.
func (m Metrics) Collect(ch chan<- prometheus.Metric, figures []loop.Figures) {
	for _, f := range figures {
		ch <- prometheus.MustNewConstHistogram(m.busy, f.Count, f.Sum.Seconds(), f.Cumulative(), f.Operation)
		ch <- prometheus.MustNewConstMetric(m.longest, prometheus.GaugeValue, f.Longest.Seconds(), f.Operation)
	}
}
