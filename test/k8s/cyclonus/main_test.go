// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/mattfenwick/cyclonus/pkg/connectivity/probe"
	"github.com/mattfenwick/cyclonus/pkg/generator"
	"github.com/mattfenwick/cyclonus/pkg/kube"
	"github.com/mattfenwick/cyclonus/pkg/worker"
	v1 "k8s.io/api/core/v1"
)

// open is a mock cluster that allows everything.
type open struct{ *kube.MockKubernetes }

func (open) ExecuteRemoteCommand(_, _, _ string, command []string) (string, string, error, error) {
	var asked worker.Batch
	if err := json.Unmarshal([]byte(command[len(command)-1]), &asked); err != nil {
		return "", "", nil, err
	}
	var all []*worker.Result
	for _, r := range asked.Requests {
		all = append(all, &worker.Result{Request: r})
	}
	answer, err := json.Marshal(all)
	return string(answer), "", nil, err
}

func TestACasePassesOnlyIfTheClusterDoesAsItSays(t *testing.T) {
	const allow, deny = "should support allow-all policy", "should support a 'default-deny-all' policy"
	cluster, namespaces := open{kube.NewMockKubernetes(1)}, []string{"x", "y", "z"}
	resources, err := probe.NewDefaultResources(cluster, namespaces, []string{"a", "b", "c"}, []int{80, 81},
		[]v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP}, nil, 5, false, "registry")
	if err != nil {
		t.Fatal(err)
	}
	g := generator.NewTestCaseGenerator(true, "192.168.1.1", namespaces, nil, []string{generator.TagSCTPProtocol})
	o := options{
		mode: generator.ProbeModePodIP, known: []string{deny},
		run: regexp.MustCompile("^(" + regexp.QuoteMeta(allow) + "|" + regexp.QuoteMeta(deny) + ")$"),
	}
	states := map[string]string{}
	for _, r := range runCases(o, g.GenerateTestCases(), cluster, resources) {
		states[r.Name] = r.State
		if r.State == "failed" && !strings.Contains(r.Output, "x/a → y/b TCP/80 is allowed") {
			t.Errorf("%s: %s\n%s", r.Name, r.Message, r.Output)
		}
	}
	if len(states) != 2 || states[allow] != "passed" || states[deny] != "failed" {
		t.Errorf("on a cluster that allows everything: %v", states)
	}
}

func TestEachCaseHasANameOfItsOwn(t *testing.T) {
	if got := names([]string{"a", "b", "a", "a"}); !slices.Equal(got, []string{"a", "b", "a #2", "a #3"}) {
		t.Errorf("names %q", got)
	}
	var all []string
	namespaces := []string{"x", "y", "z"}
	g := generator.NewTestCaseGenerator(true, "10.0.0.1", namespaces, nil, []string{generator.TagSCTPProtocol})
	for _, c := range g.GenerateTestCases() {
		all = append(all, c.Description)
	}
	all = names(all)
	slices.Sort(all)
	if distinct := len(slices.Compact(slices.Clone(all))); len(all) != 216 || distinct != 216 {
		t.Errorf("%d cases with %d names, want 216", len(all), distinct)
	}
}
