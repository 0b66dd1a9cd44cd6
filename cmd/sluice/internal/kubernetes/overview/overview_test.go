// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package overview

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
)

// answerOf returns the status that a node prints.
func answerOf(warnings ...string) []byte {
	list, _ := json.Marshal(warnings)
	return fmt.Appendf(nil, `{
		"ready": true, "problems": [], "warnings": %s, "services": [{"name": "ipam", "serving": true}],
		"datapath": {"endpoints": [{"state": "ready", "count": 3}, {"state": "restoring", "count": 1}]},
		"policy": {"policies": 7}, "loadBalancer": {"services": 5}}`, list)
}

// withPod returns a node whose pod has two containers.
func withPod(name string, cniReady bool) nodeStatus {
	return nodeStatus{
		Name: name, Pod: "sluice-" + name, Selected: true, Problems: []string{}, containers: []string{"ipam", "cni"},
		Ready: map[string]bool{"ipam": true, "cni": cniReady},
	}
}

// shown returns the output for nodes.
func shown(t *testing.T, d kubectl.DaemonSet, nodes ...nodeStatus) (clusterStatus, string) {
	t.Helper()
	s := clusterStatus{Nodes: nodes, Problems: []string{}}
	s.assess(kubectl.Cluster{DaemonSet: d})
	var out bytes.Buffer
	if err := (&invocation.Invocation{Format: "table", Out: &out}).Show(s, s.table); err != nil {
		t.Fatal(err)
	}
	return s, out.String()
}

func TestEveryNodeIsOneLine(t *testing.T) {
	good, warned, silent, starting := withPod("a", true), withPod("b", true), withPod("c", true), withPod("d", false)
	good.read(answerOf(), nil)
	// The non-zero exit code is due to warnings, which are in the answer.
	warned.read(answerOf("sluice-policy: source file: gone"), &kubectl.Error{Code: 3})
	silent.read(nil, fmt.Errorf("%w within 20s", kubectl.ErrNoAnswer))
	starting.read(answerOf("sluice-policy: source file: gone"), nil)
	absent := nodeStatus{Name: "e", Selected: true, Problems: []string{"the node has no pod of Sluice"}}
	other := nodeStatus{Name: "w", Problems: []string{}}
	s, text := shown(t, kubectl.DaemonSet{Name: "sluice", Desired: 5, Ready: 4, Updated: 5},
		good, warned, silent, starting, absent, other)
	want := `NODE  POD       IPAM  CNI  ENDPOINTS  POLICIES  SERVICES  STATE
a     sluice-a  yes   yes  4          7         5         ok
b     sluice-b  yes   yes  4          7         5         1 warning
c     sluice-c  yes   yes  -          -         -         no answer
d     sluice-d  yes   no   4          7         5         not ready
e     -         -     -    -          -         -         no pod
w     -         -     -    -          -         -         not selected

6 nodes: 1 ok, 1 with warnings, 1 not ready, 1 no answer, 1 no pod, 1 not selected
Problem: DaemonSet sluice: 5 pods are wanted, 4 are ready, 5 are of its newest revision
Problem: c: sluice status: no answer within 20s
Problem: e: the node has no pod of Sluice
Warning: b, d: sluice-policy: source file: gone
`
	if text != want || s.Ready {
		t.Errorf("ready %v, got\n%s\nwant\n%s", s.Ready, text, want)
	}
}

// TestNodesOfAnEarlierReleaseAreShown: during an upgrade, a cluster has nodes of both releases, with different keys.
func TestNodesOfAnEarlierReleaseAreShown(t *testing.T) {
	n := withPod("a", true)
	n.read(bytes.Replace(answerOf("x"), []byte(`[{"state": "ready", "count": 3}, {"state": "restoring", "count": 1}]`),
		[]byte(`{"ready": 3}`), 1), nil)
	endpoints, policies, services := n.counts()
	if n.state() != "1 warning" || endpoints != "" || policies != "7" || services != "5" {
		t.Errorf("%s, %q endpoints, %q policies, %q services of %s", n.state(), endpoints, policies, services, n.Status)
	}
}

func TestReadyIsWithoutProblemsAlone(t *testing.T) {
	whole := kubectl.DaemonSet{Name: "sluice", Desired: 1, Ready: 1, Updated: 1}
	good := func() nodeStatus {
		n := withPod("a", true)
		n.read(answerOf(), nil)
		return n
	}
	if s, text := shown(t, whole, good(), nodeStatus{Name: "w"}); !s.Ready {
		t.Errorf("not ready:\n%s", text)
	}
	for what, spoil := range map[string]func(*nodeStatus, *kubectl.DaemonSet){
		"an old pod":           func(_ *nodeStatus, d *kubectl.DaemonSet) { d.Updated = 0 },
		"a container":          func(n *nodeStatus, _ *kubectl.DaemonSet) { n.Ready["cni"] = false },
		"a warning":            func(n *nodeStatus, _ *kubectl.DaemonSet) { n.read(answerOf("x"), nil) },
		"a node that is not":   func(n *nodeStatus, _ *kubectl.DaemonSet) { n.Problems = []string{"the node is not Ready"} },
		"no answer of a node":  func(n *nodeStatus, _ *kubectl.DaemonSet) { n.status = nil },
		"a node without a pod": func(n *nodeStatus, _ *kubectl.DaemonSet) { *n = nodeStatus{Name: "a", Selected: true} },
	} {
		n, d := good(), whole
		spoil(&n, &d)
		if s, text := shown(t, d, n); s.Ready {
			t.Errorf("%s: ready:\n%s", what, text)
		}
	}
}

func TestWhatIsNoStatusIsAProblem(t *testing.T) {
	for out, err := range map[string]error{
		"": errors.New("unknown command"), "null": nil, `{"error":"x"}`: nil, `{"services": [`: errors.New("killed"),
	} {
		n := withPod("a", true)
		n.read([]byte(out), err)
		if n.status != nil || n.Status != nil || len(n.Problems) != 1 || n.state() != "no answer" {
			t.Errorf("%q, %v: %+v", out, err, n)
		}
	}
}

func TestALineNamesAFewNodes(t *testing.T) {
	var nodes []string
	for i := range named + 3 {
		nodes = append(nodes, fmt.Sprint("n", i))
	}
	if got := nodesText(nodes[:2]); got != "n0, n1" {
		t.Errorf("got %q", got)
	}
	if got := nodesText(nodes); strings.Count(got, "n") < named || !strings.HasSuffix(got, "and 3 more nodes") {
		t.Errorf("got %q", got)
	}
}

func TestContainersThatWaitForTheSameAreNamedTogether(t *testing.T) {
	container := func(name, waits string) kubectl.Container {
		return kubectl.Container{Name: name, Running: waits == "", Waits: waits}
	}
	for want, containers := range map[string][]kubectl.Container{
		"container a does not run: x":                             {container("a", "x"), container("b", "")},
		"containers a, b do not run: x":                           {container("a", "x"), container("b", "x"), container("c", "")},
		"no container of the pod runs: x":                         {container("a", "x"), container("b", "x")},
		"container a does not run: x container b does not run: y": {container("a", "x"), container("b", "y")},
		"": {container("a", "")},
	} {
		var n nodeStatus
		n.lookAt(containers)
		if got := strings.Join(n.Problems, " "); got != want || len(n.containers) != len(containers) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
