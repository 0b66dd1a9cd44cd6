// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/test/k8s/cluster"
	"github.com/sluice-net/sluice/test/k8s/internal/specs"
)

// policyAPIFailures are conformance tests of ClusterNetworkPolicy that do not pass.
var policyAPIFailures = specs.Known{}

// policyAPIOfSCTP are tests that do not pass on a kernel without SCTP.
var policyAPIOfSCTP = specs.Known{
	"CNPAdminTierEgressSCTP": noSCTP, "CNPAdminTierIngressSCTP": noSCTP,
	"CNPBaselineTierEgressSCTP": noSCTP, "CNPBaselineTierIngressSCTP": noSCTP,
}

// TestPolicyAPIConformsOnSluice runs the conformance tests of ClusterNetworkPolicy, including tests of optional
// features, on two nodes in each routing mode.
func TestPolicyAPIConformsOnSluice(t *testing.T) {
	for _, mode := range []string{"overlay", "native"} {
		t.Run(mode, func(t *testing.T) {
			c := startSluiceAs(t, mode, cluster.Options{
				Nodes: 2, Mounts: []string{programs()}, Images: specImages("agnhost-2.45"),
			})
			crds := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/network-policy-api")
			crds.Dir = "policyapi"
			crds.Env = append(os.Environ(), "GOWORK=off")
			dir, err := crds.Output()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := c.Kubectl(t.Context(), "apply", "--server-side",
				"--kustomize="+filepath.Join(strings.TrimSpace(string(dir)), "config", "crd", "experimental")); err != nil {
				t.Fatal(err)
			}
			selected := regexp.MustCompile(os.Getenv("SLUICE_SPECS"))
			known := maps.Clone(policyAPIFailures)
			if !hasSCTP(t) {
				t.Setenv("SLUICE_NO_SCTP", "1") // see scripts/k8s-policyapi
				maps.Copy(known, policyAPIOfSCTP)
			}
			maps.DeleteFunc(known, func(name, _ string) bool { return !selected.MatchString(name) })
			output := runSuite(t, c, filepath.Join(os.Getenv("SLUICE_BIN"), "test", "policyapi"), "policyapi-"+mode,
				"-test.v", "-test.timeout=60m", "-test.run=^TestConformance$/"+selected.String())
			results, err := specs.GoTest(output)
			judge(t, results, err, known, output)
			for i := range 2 {
				sluiceNode{t, c, i}.exact()
			}
		})
	}
}
