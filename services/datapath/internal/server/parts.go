// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"github.com/prometheus/client_golang/prometheus"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// Part describes one subject of the process: in the answer of GetStatus and in the metrics. A subject that the
// configuration turns off has no part.
type Part interface {
	prometheus.Collector
	// report adds the subject to an answer.
	report(*report) error
}

// report is an answer of GetStatus to which the parts add.
type report struct {
	*datapathv1.GetStatusResponse
	ready        readiness
	dependencies map[string]error // why a process does not answer, nil if it does; by the names of dependencies
}

// dependencies are the processes that the datapath calls, in the order of the answer.
var dependencies = []string{"identity", "ipam", "policy", "loadbalancer"}

// warn adds warnings for an operator, one line each.
func (r *report) warn(lines ...string) { r.Warnings = append(r.Warnings, lines...) }

// finish adds the dependencies to the answer.
func (r *report) finish() {
	for _, name := range dependencies {
		err, ok := r.dependencies[name]
		if !ok {
			continue
		}
		d := &datapathv1.Dependency{Name: name, Serving: err == nil}
		if err != nil {
			d.Error = err.Error()
		}
		r.Dependencies = append(r.Dependencies, d)
	}
}

// Metrics returns a collector that reads the counters of all parts on each scrape.
func (s *Server) Metrics() prometheus.Collector { return collectors(s.parts) }

// collectors is one collector for all parts: two collectors must not export the same metric.
type collectors []Part

// Describe implements prometheus.Collector.
func (c collectors) Describe(ch chan<- *prometheus.Desc) {
	for _, part := range c {
		part.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (c collectors) Collect(ch chan<- prometheus.Metric) {
	for _, part := range c {
		part.Collect(ch)
	}
}

// desc describes a metric of the datapath.
func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("sluice_datapath_"+name, help, labels, nil)
}

func describe(ch chan<- *prometheus.Desc, all ...*prometheus.Desc) {
	for _, d := range all {
		ch <- d
	}
}

func gauge(ch chan<- prometheus.Metric, d *prometheus.Desc, v float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func counter(ch chan<- prometheus.Metric, d *prometheus.Desc, v uint64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
}
