// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command cyclonus runs cyclonus's cases without SCTP against the cluster of KUBECONFIG, and writes a report with one
// result for each case.
//
// Cases, their steps and the expected results are cyclonus's own; only the execution of probes differs. For each pair
// of pods, port and protocol, cyclonus computes whether the policies of a step allow the connection. A case passes if
// the cluster agrees after each step.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/mattfenwick/cyclonus/pkg/connectivity"
	"github.com/mattfenwick/cyclonus/pkg/connectivity/probe"
	"github.com/mattfenwick/cyclonus/pkg/generator"
	"github.com/mattfenwick/cyclonus/pkg/kube"
	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"
)

// result is the format that the package specs of the test bed reads.
type result struct {
	Name, State     string
	Took            time.Duration
	Message, Output string
}

// options are the options of the command line.
type options struct {
	report, registry, probe string
	mode                    generator.ProbeMode
	run                     *regexp.Regexp
	known                   []string // names of cases that are not retried
}

func main() {
	o := options{run: regexp.MustCompile("")}
	flag.StringVar(&o.report, "report", "", "file of the report")
	flag.StringVar(&o.registry, "registry", "registry.k8s.io", "registry to pull e2e-test-images/agnhost:2.43 from")
	flag.StringVar(&o.probe, "probe", "/probe", "path of the probe program in the agnhost image")
	flag.Func("destination", "destination of the probes: pod-ip, service-ip or service-name", func(s string) (err error) {
		o.mode, err = generator.ParseProbeMode(s)
		return err
	})
	flag.Func("run", "run the cases whose names match this expression", func(s string) (err error) {
		o.run, err = regexp.Compile(s)
		return err
	})
	flag.Func("known", "name of a case that is expected to fail; may be repeated", func(s string) error {
		o.known = append(o.known, s)
		return nil
	})
	flag.Parse()
	if err := run(o); err != nil {
		fmt.Fprintln(os.Stderr, "cyclonus:", err)
		os.Exit(1)
	}
}

func run(o options) error {
	if o.report == "" || o.mode == "" {
		return errors.New("-report and -destination must be set")
	}
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		return err
	}
	cluster, err := newPods(config, o.probe)
	if err != nil {
		return err
	}
	defer cluster.close()

	namespaces := []string{"x", "y", "z"}
	resources, err := probe.NewDefaultResources(cluster, namespaces, []string{"a", "b", "c"}, []int{80, 81},
		[]v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP}, nil, 300, false, o.registry)
	if err != nil {
		return err
	}
	// Rules with addresses use this pod's address.
	peer, err := resources.GetPod("z", "c")
	if err != nil {
		return err
	}
	cases := generator.NewTestCaseGenerator(true, peer.IP, namespaces, nil, []string{generator.TagSCTPProtocol})
	results := runCases(o, cases.GenerateTestCases(), cluster, resources)
	for _, namespace := range namespaces {
		if err := cluster.DeleteNamespace(namespace); err != nil {
			return err
		}
	}
	content, err := json.Marshal(results)
	if err != nil {
		return err
	}
	return os.WriteFile(o.report, content, 0o600)
}

func runCases(o options, cases []*generator.TestCase, cluster kube.IKubernetes, resources *probe.Resources) []result {
	interpreter := connectivity.NewInterpreter(cluster, resources, &connectivity.InterpreterConfig{
		ResetClusterBeforeTestCase: true, VerifyClusterStateBeforeTestCase: true, BatchJobs: true,
		PerturbationWaitSeconds: 1, FailFast: true,
		// A pod reaches itself whatever the policies say, which cyclonus's tables do not take into account.
		IgnoreLoopback: true,
	})
	descriptions := make([]string, len(cases))
	for i, c := range cases {
		descriptions[i] = c.Description
	}
	results := []result{}
	for i, name := range names(descriptions) {
		if !o.run.MatchString(name) {
			continue
		}
		for _, step := range cases[i].Steps {
			step.Probe.Mode = o.mode
		}
		interpreter.Config.KubeProbeRetries = 60
		if slices.Contains(o.known, name) {
			interpreter.Config.KubeProbeRetries = 3
		}
		begin := time.Now()
		r := interpreter.ExecuteTestCase(cases[i])
		one := result{Name: name, State: "passed", Took: time.Since(begin)}
		if r.Err != nil {
			one.State, one.Message = "failed", r.Err.Error()
		} else if !r.Passed(true) {
			one.State = "failed"
			one.Message, one.Output = explain(r)
		}
		fmt.Printf("%s: %s after %.1f s %s\n%s\n", one.Name, one.State, one.Took.Seconds(), one.Message, one.Output)
		results = append(results, one)
	}
	return results
}

// explain returns the wrong probes of the last step, and its policies.
func explain(r *connectivity.Result) (message, output string) {
	step := r.Steps[len(r.Steps)-1]
	comparison := step.LastComparison()
	var wrong []string
	for _, key := range comparison.Wrapped.Keys() {
		if key.From == key.To {
			continue
		}
		item := comparison.Get(key.From, key.To)
		for what, is := range item.Kube.JobResults {
			if want := item.Simulated.JobResults[what]; want == nil || is.Combined != want.Combined {
				wrong = append(wrong, fmt.Sprintf("%s → %s %s is %s", key.From, key.To, what, is.Combined))
			}
		}
	}
	slices.Sort(wrong)
	policies, err := json.MarshalIndent(step.KubePolicies, "", " ")
	if err != nil {
		policies = []byte(err.Error())
	}
	return fmt.Sprintf("step %d: %d probes differ from the expectation", len(r.Steps), len(wrong)),
		fmt.Sprintf("%s\n%s\n%s", policies, step.SimulatedProbe.RenderTable(), strings.Join(wrong, "\n"))
}
