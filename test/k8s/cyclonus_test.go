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

// cyclonusFailures are the cases of cyclonus that do not pass on Sluice, each with
// the reason.
var cyclonusFailures = specs.Known{}

// TestCyclonusCasesPassOnSluice runs the cases of cyclonus without SCTP. The pods
// reach each other by their addresses: 182 of the 216 cases have egress rules about
// peers, and by the name of a service they would meet its address (serviceAddress).
func TestCyclonusCasesPassOnSluice(t *testing.T) {
	run := os.Getenv("SLUICE_SPECS")
	selected, err := regexp.Compile(run)
	if err != nil {
		t.Fatal(err)
	}
	known := maps.Clone(cyclonusFailures)
	maps.DeleteFunc(known, func(name, _ string) bool { return !selected.MatchString(name) })
	c := startSluice(t, cluster.Options{
		Mounts: []string{programs()},
		Images: []string{filepath.Join(os.Getenv("SLUICE_BIN"), "images", "cyclonus-"+runtime.GOARCH+".tar")},
	})
	report := reportFile(t, "cyclonus.json")
	args := []string{"-report=" + report, "-registry=sluice.io", "-destination=pod-ip", "-run=" + run}
	for name := range known {
		args = append(args, "-known="+name)
	}
	output := runSuite(t, c, filepath.Join(os.Getenv("SLUICE_BIN"), "test", "cyclonus"), "cyclonus", args...)
	var results []specs.Result
	content, err := os.ReadFile(report)
	if err == nil {
		err = json.Unmarshal(content, &results)
	}
	judge(t, results, err, known, output)
	sluiceNode{t, c, 0}.exact()
}
