// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
)

type noBounds struct{}

func (noBounds) SharedBounds() *bound.Bounds { return nil }

// TestMetricsAreThoseOfTheDocumentation compares the metrics with the documentation.
func TestMetricsAreThoseOfTheDocumentation(t *testing.T) {
	page, err := os.ReadFile("../../../../docs/reference/datapath.md")
	if err != nil {
		t.Fatal(err)
	}
	var documented, exported []string
	for _, m := range regexp.MustCompile("(?m)^\\| `(sluice_datapath_[a-z_]+)`").FindAllStringSubmatch(string(page), -1) {
		documented = append(documented, m[1])
	}
	type subject = warning
	all := collectors(partsIn([]Subject{
		struct {
			subject
			Endpoints
		}{},
		struct {
			subject
			Packets
		}{},
		struct {
			subject
			MapUsages
			ConnectionCounts
			Bounds
		}{Bounds: noBounds{}},
		struct {
			subject
			Cluster
		}{},
		struct {
			subject
			Frontends
		}{},
		struct {
			subject
			Proxies
		}{},
	}, &PolicyPart{}))
	ch := make(chan *prometheus.Desc, 128)
	all.Describe(ch)
	close(ch)
	for d := range ch {
		name := regexp.MustCompile(`fqName: "([^"]+)"`).FindStringSubmatch(d.String())[1]
		exported = append(exported, name)
	}
	slices.Sort(documented)
	slices.Sort(exported)
	exported = slices.Compact(exported) // two parts have limits
	if !slices.Equal(documented, exported) {
		t.Errorf("documented %v\nexported   %v", documented, exported)
	}
	if err := prometheus.NewRegistry().Register(all); err != nil {
		t.Errorf("register the metrics of all parts: %v", err)
	}
}
