// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package connectivity

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
	"github.com/sluice-net/sluice/cmd/sluice/internal/probe"
)

// twoNodes returns an environment of two nodes with both address families.
func twoNodes() environment {
	a := kubectl.Node{Name: "a", Addresses: []string{"10.0.0.1", "fd00::1"}, Kubelet: 10250}
	b := kubectl.Node{Name: "b", Addresses: []string{"10.0.0.2", "fd00::2"}, Kubelet: 10250}
	return environment{
		namespace: "test", nodes: []kubectl.Node{a, b}, all: []kubectl.Node{a, b},
		addresses: map[string][]string{
			client: {"10.1.0.1", "fd01::1"}, friend: {"10.1.0.2", "fd01::2"}, near: {"10.1.0.3", "fd01::3"},
			far: {"10.2.0.1", "fd02::1"}, hostPort: {"10.2.0.2", "fd02::2"},
		},
		clusterIP: []string{"10.96.0.1", "fd96::1"}, nodePort: 30001, hostPort: 64720,
		api: []string{"10.96.0.2"}, apiPort: 443, external: "example.com:443",
	}
}

func all(e environment) []check {
	checks := e.connections()
	for _, s := range e.stages() {
		checks = append(checks, slices.Concat(s.with, s.then)...)
	}
	return checks
}

func names(checks []check) []string {
	var all []string
	for _, c := range checks {
		all = append(all, c.name)
	}
	return all
}

func TestEveryCheckHasANameOfItsOwn(t *testing.T) {
	got := names(all(twoNodes()))
	slices.Sort(got)
	if compact := slices.Compact(slices.Clone(got)); len(compact) != len(got) || len(got) < 40 {
		t.Errorf("%d names, %d different: %q", len(got), len(compact), got)
	}
	for _, want := range []string{
		"pod to pod on the same node, IPv4", "pod to pod on another node, IPv6", "pod to Service, IPv6",
		"pod to NodePort of a, IPv4", "pod to NodePort of b, IPv6", "pod to hostPort of b, IPv4", "pod to its own node, IPv6",
		"DNS of the cluster", "pod to the API server, IPv4", "pod to the outside", "node to pod on another node, IPv4",
		"ingress denied on the same node, IPv4", "ingress denied from another node, IPv6",
		"ingress allowed by label from another node, IPv4", "egress denied to another node, IPv4",
		"egress denied through the Service, IPv6", "egress allowed by label, IPv6",
		"egress after the policy was deleted, IPv4", "ingress after the policy was deleted, IPv4",
	} {
		if !slices.Contains(got, want) {
			t.Errorf("no %q in %q", want, got)
		}
	}
}

// TestADenialComesAfterAConnection: a timeout proves a policy only if the same connection worked before.
func TestADenialComesAfterAConnection(t *testing.T) {
	e := twoNodes()
	before := map[string]check{}
	for _, c := range e.connections() {
		before[c.name] = c
	}
	denials := 0
	for _, c := range all(e) {
		if !c.denied {
			continue
		}
		denials++
		base, found := before[c.after]
		if !found || base.from != c.from || base.target != c.target || base.denied {
			t.Errorf("%q from %s to %s comes after %+v", c.name, c.from, c.target, base)
		}
	}
	if denials < 8 {
		t.Errorf("only %d denials", denials)
	}
}

func TestOneNodeAndOneFamilyHaveFewerChecks(t *testing.T) {
	e := twoNodes()
	e.nodes, e.all = e.nodes[:1], e.all[:1]
	delete(e.addresses, far)
	for name, addresses := range e.addresses {
		e.addresses[name] = addresses[:1]
	}
	e.external = ""
	for _, c := range all(e) {
		if strings.Contains(c.name, "IPv6") || strings.Contains(c.name, "another node") ||
			strings.Contains(c.name, "outside") || c.from == far || c.server == far {
			t.Errorf("there is %+v", c)
		}
	}
	if !slices.ContainsFunc(e.connections(), func(c check) bool {
		return c.name == "pod to Service, IPv4" && c.server == near
	}) {
		t.Error("the service of one node does not lead to its pod")
	}
	delete(e.addresses, client) // the client does not run
	for _, c := range all(e) {
		if c.from == client {
			t.Errorf("without the client there is %+v", c)
		}
	}
}

func TestOutcomesAreToldApart(t *testing.T) {
	answered := probe.Attempt{Outcome: probe.Connected, Server: near, Client: "10.1.0.1:4000"}
	silent := probe.Attempt{Outcome: probe.TimedOut, Error: "i/o timeout"}
	refused := probe.Attempt{Outcome: probe.Refused, Error: "connection refused"}
	resolved := probe.Attempt{Outcome: probe.Resolved, Addresses: []string{"10.96.0.1", "fd96::1"}}
	for _, c := range []struct {
		check check
		met   []probe.Attempt
		not   []probe.Attempt
	}{
		{check{server: near}, []probe.Attempt{answered}, []probe.Attempt{silent, refused, resolved}},
		{check{server: far}, nil, []probe.Attempt{answered, silent}},
		{check{kind: accepts}, []probe.Attempt{answered}, []probe.Attempt{silent, refused}},
		// Policies drop packets, so "refused" must come from the server.
		{check{server: near, denied: true}, []probe.Attempt{silent}, []probe.Attempt{answered, refused}},
		{
			check{kind: resolves, addresses: []string{"10.96.0.1"}},
			[]probe.Attempt{resolved},
			[]probe.Attempt{answered, silent},
		},
		{check{kind: resolves, addresses: []string{"10.96.0.9"}}, nil, []probe.Attempt{resolved}},
	} {
		for _, a := range c.met {
			if !c.check.met(a) {
				t.Errorf("%+v is not met by %+v", c.check, a)
			}
		}
		for _, a := range c.not {
			if c.check.met(a) {
				t.Errorf("%+v is met by %+v", c.check, a)
			}
		}
	}
}

// TestPodsAreRestricted: pods meet the restricted Pod Security Standard, except for the host port.
func TestPodsAreRestricted(t *testing.T) {
	e := twoNodes()
	leads := 0
	for _, p := range podPlans(e.nodes, 64720) {
		content, err := json.Marshal(podOf("test", p, kubectl.DaemonSet{Image: "x", PullPolicy: "Never"}))
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{
			`"runAsNonRoot":true`, `"drop":["ALL"]`, `"allowPrivilegeEscalation":false`, `"type":"RuntimeDefault"`,
			`"automountServiceAccountToken":false`, `"image":"x"`, `"imagePullPolicy":"Never"`,
		} {
			if !bytes.Contains(content, []byte(want)) {
				t.Errorf("no %s in %s", want, content)
			}
		}
		if bytes.Contains(content, []byte("hostPort")) != (p.name == hostPort) {
			t.Errorf("the port of the node of %s: %s", p.name, content)
		}
		if p.labels[service] != "" {
			leads++
			if p.name != e.farthest() {
				t.Errorf("the service leads to %s", p.name)
			}
		}
	}
	if leads != 1 {
		t.Errorf("the service leads to %d pods", leads)
	}
}

func TestReportNamesWhatFails(t *testing.T) {
	var out bytes.Buffer
	tester := tester{inv: &invocation.Invocation{Format: "table", Out: &out}}
	tester.add(t.Context(), result{Name: "good", From: client, Target: "10.0.0.1:80", OK: true})
	tester.add(t.Context(), result{
		Name: "bad", From: client, Target: "10.0.0.2:80", Expected: "an answer of far", Got: "timeout",
		Says: []string{"DROPPED (no-route)"}, Next: "kubectl exec x",
	})
	if err := tester.conclude(); !errors.Is(err, invocation.ErrReported) {
		t.Errorf("got %v", err)
	}
	want := `ok        good (client -> 10.0.0.1:80)
FAILED    bad
          tried     client -> 10.0.0.2:80
          expected  an answer of far
          got       timeout
          explain   DROPPED (no-route)
          next      kubectl exec x

1 of 2 checks passed, 0 were left out
failed: bad
The pods are removed now; --keep leaves them, for the commands above.
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}
