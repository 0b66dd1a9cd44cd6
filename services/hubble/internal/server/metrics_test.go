// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"os"
	"regexp"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/flowmetrics"
	"github.com/sluice-net/sluice/services/hubble/internal/server/export"
)

// TestMetricsAreThoseOfTheDocumentation compares the names.
func TestMetricsAreThoseOfTheDocumentation(t *testing.T) {
	doc, err := os.ReadFile("../../../../docs/reference/hubble.md")
	if err != nil {
		t.Fatal(err)
	}
	b := newBench(t, 64<<20)
	b.add(0, 0)
	b.h.Flush()
	described := make(chan *prometheus.Desc, 100)
	b.Collector().Describe(described)
	flowmetrics.New(flowmetrics.Options{Names: flowmetrics.Names, MaxSeries: 1000}).Describe(described)
	exporter, err := export.New(export.Options{})
	if err != nil {
		t.Fatal(err)
	}
	exporter.Describe(described)
	close(described)
	documented := make(map[string]bool)
	for _, m := range regexp.MustCompile("`((?:sluice_)?hubble_[a-z_]+)`").FindAllStringSubmatch(string(doc), -1) {
		documented[m[1]] = true
	}
	name := regexp.MustCompile(`fqName: "([a-z_]+)"`)
	for d := range described {
		m := name.FindStringSubmatch(d.String())
		if !documented[m[1]] {
			t.Errorf("%s is not in docs/reference/hubble.md", m[1])
		}
		delete(documented, m[1])
	}
	for name := range documented {
		t.Errorf("docs/reference/hubble.md has %s, but the process does not", name)
	}
}
