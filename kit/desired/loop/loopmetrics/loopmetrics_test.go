// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package loopmetrics

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-net/sluice/kit/desired/loop"
)

// collector is a Collector with fixed figures.
type collector struct {
	Metrics
	figures []loop.Figures
}

func (c collector) Collect(ch chan<- prometheus.Metric) { c.Metrics.Collect(ch, c.figures) }

func TestFiguresAreMetrics(t *testing.T) {
	var f loop.Figures
	f.Operation = "read"
	for _, d := range []time.Duration{time.Millisecond, 3 * time.Second} {
		f.Add(d)
	}
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(collector{New("sluice_test_", "the test"), []loop.Figures{f}})
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if len(families) != 2 {
		t.Fatalf("%d metrics, want 2", len(families))
	}
	for _, family := range families {
		if len(family.GetMetric()) != 1 || family.GetMetric()[0].GetLabel()[0].GetValue() != "read" {
			t.Fatalf("got %v, want one metric of the operation", family)
		}
		m := family.GetMetric()[0]
		switch h := m.GetHistogram(); family.GetName() {
		case "sluice_test_owner_busy_seconds":
			if h.GetSampleCount() != 2 || h.GetSampleSum() != 3.001 || h.GetBucket()[3].GetCumulativeCount() != 1 {
				t.Errorf("the histogram is %v", h)
			}
		case "sluice_test_owner_busy_longest_seconds":
			if m.GetGauge().GetValue() != 3 {
				t.Errorf("the longest took %v s, want 3", m.GetGauge().GetValue())
			}
		default:
			t.Errorf("there is a metric %s", family.GetName())
		}
	}
}
