// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/test/k8s/cluster"
	"github.com/sluice-net/sluice/test/k8s/internal/specs"
	"golang.org/x/sys/unix"
)

const (
	sctp = "[sig-network] Netpol [Feature:SCTPConnectivity] [LinuxOnly] " +
		"NetworkPolicy between server and client using SCTP should "
	feature = " [Feature:NetworkPolicy]"
)

// sctpFailures are the specs of Netpol that do not pass. They wait five minutes each for
// a pod that serves SCTP.
var sctpFailures = specs.Known{
	sctp + "support a 'default-deny-ingress' policy" + feature: noSCTP,
	sctp + "enforce policy based on Ports" + feature:           noSCTP,
	sctp + "enforce policy to allow traffic only from a pod in a different namespace " +
		"based on PodSelector and NamespaceSelector" + feature: noSCTP,
}

const noSCTP = "the kernel of the test machine has no SCTP sockets"

// TestNetpolSpecsPassOnSluice runs Kubernetes' own specs of NetworkPolicy.
func TestNetpolSpecsPassOnSluice(t *testing.T) {
	known, skip := specs.Known{}, ""
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	switch {
	case err == nil:
		if err := unix.Close(socket); err != nil {
			t.Fatal(err)
		}
	case errors.Is(err, unix.EPROTONOSUPPORT):
		skip = "Feature:SCTPConnectivity"
		maps.Copy(known, sctpFailures)
	default:
		t.Fatal(err)
	}
	testSpecs(t, startSluice(t, cluster.Options{Mounts: []string{programs()}}), "Netpol", skip, known)
}

// testSpecs runs the upstream specs whose names contain the word and, if it is set,
// match the expression SLUICE_SPECS, less those that match skip. Each is a subtest
// afterwards.
func testSpecs(t *testing.T, c *cluster.Cluster, word, skip string, known specs.Known) {
	focus, err := regexp.Compile(word + ".*(" + os.Getenv("SLUICE_SPECS") + ")")
	if err != nil {
		t.Fatal(err)
	}
	report := reportFile(t, word+".json")
	args := []string{
		"--kubeconfig=" + c.Kubeconfig(), "--ginkgo.focus=" + focus.String(), "--ginkgo.json-report=" + report,
		"--ginkgo.timeout=1h", "--ginkgo.no-color", "--ginkgo.v",
	}
	if skip != "" {
		args = append(args, "--ginkgo.skip="+skip)
	}
	output := runSuite(t, c, filepath.Join(os.Getenv("SLUICE_BIN"), "k8s", "e2e"), word, args...)
	results, err := specs.Ginkgo(report, focus.MatchString)
	maps.DeleteFunc(known, func(name, _ string) bool { return !focus.MatchString(name) })
	judge(t, results, err, known, output)
	sluiceNode{t, c}.exact()
}

// reportFile is the path of a report to be written.
func reportFile(t *testing.T, name string) string {
	t.Helper()
	file, err := filepath.Abs(filepath.Join(os.Getenv("SLUICE_BIN"), "test", name))
	if err != nil {
		t.Fatal(err)
	}
	// One of an earlier run says nothing of this one.
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return file
}

// runSuite runs a program with the rights of an administrator, and returns the file
// with its output.
func runSuite(t *testing.T, c *cluster.Cluster, program, name string, args ...string) string {
	t.Helper()
	output := reportFile(t, name+".log")
	log, err := os.Create(output)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	suite, err := c.MachineCommand(t.Context(), append([]string{program}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	suite.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig())
	suite.Stdout, suite.Stderr = log, log
	begin := time.Now()
	// The report says which specs failed.
	var exit *exec.ExitError
	if err := suite.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	t.Logf("%s took %.0f s", name, time.Since(begin).Seconds())
	return output
}

// judge makes each result a subtest. The file output is what the suite logged.
func judge(t *testing.T, results []specs.Result, err error, known specs.Known, output string) {
	if err == nil {
		results, err = specs.Compare(results, known)
	}
	if err != nil {
		content, _ := os.ReadFile(output)
		t.Fatalf("%v\n%s", err, lastLines(string(content), 60))
	}
	states := map[string]int{}
	for _, r := range results {
		states[r.State]++
		t.Run(r.Name, func(t *testing.T) {
			switch t.Logf("%s after %.1f s", r.State, r.Took.Seconds()); {
			case r.Err != nil:
				// Ends with what was expected, and what was observed.
				t.Errorf("%v\n%s", r.Err, lastLines(r.Output, 35))
			case r.Reason != "":
				t.Logf("does not pass: %s", r.Reason)
			}
		})
	}
	t.Logf("%d specs: %v; their output is in %s", len(results), states, output)
}

func lastLines(text string, n int) string {
	all := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(all[max(0, len(all)-n):], "\n")
}
