// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"cmp"
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

// sctpFailures are specs of Netpol that do not pass. Each of them waits five minutes for a pod that serves SCTP.
var sctpFailures = specs.Known{
	sctp + "support a 'default-deny-ingress' policy" + feature: noSCTP,
	sctp + "enforce policy based on Ports" + feature:           noSCTP,
	sctp + "enforce policy to allow traffic only from a pod in a different namespace " +
		"based on PodSelector and NamespaceSelector" + feature: noSCTP,
}

const noSCTP = "the kernel of the test machine has no SCTP sockets"

// suite is a part of Kubernetes' own specs.
type suite struct {
	name string
	// focus matches the beginning of the names of the suite's specs, end matches their end, and skip matches a part
	// of names that are not run. elsewhere matches the beginning of names that belong to another suite.
	focus, end, skip, elsewhere string
	nodes                       int      // 2 if it is 0
	images                      []string // of scripts/k8s-images
	known                       specs.Known
}

// TestNetpolSpecsPassOnSluice runs Kubernetes' own specs of NetworkPolicy.
func TestNetpolSpecsPassOnSluice(t *testing.T) {
	s := suite{name: "Netpol", focus: `\[sig-network\] Netpol `, known: specs.Known{}}
	if !hasSCTP(t) {
		s.skip = "Feature:SCTPConnectivity"
		maps.Copy(s.known, sctpFailures)
	}
	s.test(t)
}

// hasSCTP reports whether the kernel has sockets of SCTP.
func hasSCTP(t *testing.T) bool {
	t.Helper()
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	if err == nil {
		err = unix.Close(socket)
		if err == nil {
			return true
		}
	}
	if !errors.Is(err, unix.EPROTONOSUPPORT) {
		t.Fatal(err)
	}
	return false
}

// TestServicesSpecsPassOnSluice runs Kubernetes' own specs of Services.
func TestServicesSpecsPassOnSluice(t *testing.T) {
	suite{
		name: "Services", focus: `\[sig-network\] Services `, nodes: 3, images: []string{"agnhost-2.63.0"},
		known: servicesFailures,
	}.test(t)
}

// servicesFailures are the specs of Services that do not pass.
var servicesFailures = specs.Known{
	"[sig-network] Services should work after restarting kube-proxy [Disruptive]": "there is no kube-proxy",
	"[sig-network] Services should work after restarting apiserver [Disruptive]":  "its API server is not a pod",
}

// TestConformanceSpecsPassOnSluice runs the network specs that a conformant cluster passes, except the specs of
// Services.
func TestConformanceSpecsPassOnSluice(t *testing.T) {
	suite{
		name: "Conformance", focus: `\[sig-network\] `, end: `\[Conformance\]`, elsewhere: `\[sig-network\] Services `,
		images: []string{"agnhost-2.63.0", "glibc-dns-testing-2.0.0", "nginx-1.15-4"}, known: conformanceFailures,
	}.test(t)
}

// conformanceFailures are the specs of Conformance that do not pass.
var conformanceFailures = specs.Known{}

// test runs the specs that match the expression SLUICE_SPECS, if it is set, on some nodes in each routing mode. Then
// each spec becomes a subtest.
func (s suite) test(t *testing.T) {
	for _, mode := range []string{"overlay", "native"} {
		t.Run(mode, func(t *testing.T) {
			nodes := cmp.Or(s.nodes, 2)
			c := startSluiceAs(t, mode, cluster.Options{
				Nodes: nodes, Mounts: []string{programs()}, Images: specImages(s.images...),
			})
			s.run(t, c, mode)
			endDeletions(t, c)
			for i := range nodes {
				sluiceNode{t, c, i}.exact()
			}
		})
	}
}

// endDeletions immediately ends pods that specs have left in a deletion of several minutes.
func endDeletions(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	var pods struct{ Items []kubePod }
	if err := c.Get(t.Context(), &pods, "pods", "--all-namespaces"); err != nil {
		t.Fatal(err)
	}
	for _, p := range pods.Items {
		if p.Metadata.DeletionTimestamp == nil {
			continue
		}
		if _, err := c.Kubectl(t.Context(), "--namespace="+p.Metadata.Namespace, "delete", "pod", p.Metadata.Name,
			"--grace-period=1", "--ignore-not-found"); err != nil {
			t.Error(err)
		}
	}
}

// specImages returns images that `scripts/k8s-images specs` writes.
func specImages(names ...string) (files []string) {
	for _, name := range names {
		files = append(files, filepath.Join(os.Getenv("SLUICE_BIN"), "k8s", "images", "specs", "specs-"+name+".tar"))
	}
	return files
}

func (s suite) run(t *testing.T, c *cluster.Cluster, mode string) {
	narrow, err := regexp.Compile(os.Getenv("SLUICE_SPECS"))
	if err != nil {
		t.Fatal(err)
	}
	focus, elsewhere := regexp.MustCompile("^"+s.focus+".*"+s.end), regexp.MustCompile("^"+s.elsewhere)
	selected := func(name string) bool {
		return focus.MatchString(name) && narrow.MatchString(name) && (s.elsewhere == "" || !elsewhere.MatchString(name))
	}
	skip := strings.Trim(s.elsewhere+"|"+s.skip, "|")
	name := s.name + "-" + mode
	report := reportFile(t, name+".json")
	args := []string{
		"--kubeconfig=" + c.Kubeconfig(), "--ginkgo.json-report=" + report,
		"--ginkgo.focus=" + s.focus + ".*(" + narrow.String() + ").*" + s.end,
		"--ginkgo.timeout=80m", "--ginkgo.no-color", "--ginkgo.v",
	}
	if skip != "" {
		args = append(args, "--ginkgo.skip="+skip)
	}
	output := runSuite(t, c, filepath.Join(os.Getenv("SLUICE_BIN"), "k8s", "e2e"), name, args...)
	results, err := specs.Ginkgo(report, selected)
	known := maps.Clone(s.known)
	maps.DeleteFunc(known, func(name, _ string) bool { return !selected(name) })
	judge(t, results, err, known, output)
}

// reportFile returns the path of a report to be written.
func reportFile(t *testing.T, name string) string {
	t.Helper()
	file, err := filepath.Abs(filepath.Join(os.Getenv("SLUICE_BIN"), "test", name))
	if err != nil {
		t.Fatal(err)
	}
	// Remove the report of an earlier run.
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return file
}

// runSuite runs a program with administrator rights, and returns the file with its output.
func runSuite(t *testing.T, c *cluster.Cluster, program, name string, args ...string) string {
	t.Helper()
	suite, err := c.MachineCommand(t.Context(), append([]string{program}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	suite.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig())
	return logSuite(t, suite, name)
}

// logSuite runs a suite, and returns the file with its output.
func logSuite(t *testing.T, suite *exec.Cmd, name string) string {
	t.Helper()
	output := reportFile(t, name+".log")
	log, err := os.Create(output)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	suite.Stdout, suite.Stderr = log, log
	begin := time.Now()
	// The report contains the failed specs.
	var exit *exec.ExitError
	if err := suite.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	t.Logf("%s took %.0f s", name, time.Since(begin).Seconds())
	return output
}

// judge makes each result a subtest. The file output is the suite's log.
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
				// The end of the output contains the expectation and the observation.
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
