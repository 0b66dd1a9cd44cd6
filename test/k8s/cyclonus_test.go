// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"testing"

	"github.com/sluice-net/sluice/test/k8s/cluster"
	"github.com/sluice-net/sluice/test/k8s/internal/specs"
)

// cyclonusFailures are cases of cyclonus that do not pass on Sluice, each with the reason.
var cyclonusFailures = specs.Known{}

// TestCyclonusCasesPassOnSluice runs cyclonus's cases without SCTP on two nodes, in each routing mode. Pods connect to
// each other by Service names, and then by pod addresses: policies apply to pods in both cases.
func TestCyclonusCasesPassOnSluice(t *testing.T) {
	selected, err := regexp.Compile(os.Getenv("SLUICE_SPECS"))
	if err != nil {
		t.Fatal(err)
	}
	for _, mode := range []string{"overlay", "native"} {
		t.Run(mode, func(t *testing.T) {
			c := startSluiceAs(t, mode, cluster.Options{
				Nodes: 2, Mounts: []string{programs()},
				Images: []string{filepath.Join(os.Getenv("SLUICE_BIN"), "images", "cyclonus-"+runtime.GOARCH+".tar")},
			})
			for _, destination := range []string{"service-name", "pod-ip"} {
				t.Run(destination, func(t *testing.T) {
					runCyclonus(t, c, mode, destination, selected)
					if _, err := c.Kubectl(t.Context(), "delete", "namespace", "x", "y", "z", "--ignore-not-found"); err != nil {
						t.Fatal(err)
					}
					for i := range 2 {
						sluiceNode{t, c, i}.exact()
					}
				})
			}
		})
	}
}

func runCyclonus(t *testing.T, c *cluster.Cluster, mode, destination string, selected *regexp.Regexp) {
	known := maps.Clone(cyclonusFailures)
	maps.DeleteFunc(known, func(name, _ string) bool { return !selected.MatchString(name) })
	name := "cyclonus-" + mode + "-" + destination
	report := reportFile(t, name+".json")
	args := []string{
		"-report=" + report, "-registry=sluice.io", "-destination=" + destination, "-run=" + selected.String(),
	}
	for name := range known {
		args = append(args, "-known="+name)
	}
	output := runSuite(t, c, filepath.Join(os.Getenv("SLUICE_BIN"), "test", "cyclonus"), name, args...)
	var results []specs.Result
	content, err := os.ReadFile(report)
	if err == nil {
		err = json.Unmarshal(content, &results)
	}
	judge(t, results, err, known, output)
}
