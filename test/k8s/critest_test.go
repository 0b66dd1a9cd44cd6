// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/sluice-net/sluice/test/k8s/cluster"
	"github.com/sluice-net/sluice/test/k8s/internal/specs"
)

// aboutNetworks matches the beginning of the names of specs about networks.
const aboutNetworks = `\[k8s.io\] Networking `

// TestCritestPassesOnSluice runs critest's specs about networks. They create sandboxes only in containerd, without an
// API server, so identity takes labels as it does without Kubernetes.
func TestCritestPassesOnSluice(t *testing.T) {
	critest, err := filepath.EvalSymlinks(filepath.Join(os.Getenv("SLUICE_BIN"), "k8s", "critest"))
	if err != nil {
		t.Fatal(err)
	}
	c := startSluiceAs(t, "runtime", cluster.Options{
		Mounts: []string{programs(), filepath.Dir(critest)}, Images: specImages("busybox-1.29-2", "nginx-1.14-2"),
	})
	const report = "/tmp/critest.json"
	suite, err := c.NodeCommand(t.Context(), 0, critest, "--runtime-endpoint=unix:///run/containerd/containerd.sock",
		"--ginkgo.focus="+aboutNetworks, "--ginkgo.json-report="+report, "--ginkgo.no-color", "--ginkgo.v")
	if err != nil {
		t.Fatal(err)
	}
	output := logSuite(t, suite, "critest")
	content, err := c.InNode(t.Context(), 0, "cat", report)
	file := reportFile(t, "critest.json")
	if err == nil {
		err = os.WriteFile(file, content, 0o600)
	}
	if err != nil {
		log, _ := os.ReadFile(output)
		t.Fatalf("%v\n%s", err, lastLines(string(log), 60))
	}
	focus := regexp.MustCompile("^" + aboutNetworks)
	results, err := specs.Ginkgo(file, focus.MatchString)
	judge(t, results, err, specs.Known{}, output)
	sluiceNode{t, c, 0}.exact()
}
