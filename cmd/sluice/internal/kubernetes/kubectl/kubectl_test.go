// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubectl

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
)

func decode[T any](t *testing.T, text string) T {
	t.Helper()
	var v T
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatal(err)
	}
	return v
}

const setText = `{"metadata": {"name": "sluice"}, "spec": {"template": {"spec": {
	"nodeSelector": {"kubernetes.io/os": "linux"}, "imagePullSecrets": [{"name": "registry"}],
	"containers": [{"name": "identity", "image": "a"}, {"name": "cni", "image": "b", "imagePullPolicy": "Always"}]}}},
	"status": {"desiredNumberScheduled": 3, "numberReady": 2, "updatedNumberScheduled": 1}}`

func podText(name, node, created, more string) string {
	return `{
	"metadata": {"name": "` + name + `", "uid": "u-` + name + `", "creationTimestamp": "` + created + `"` + more + `},
	"spec": {"nodeName": "` + node + `", "containers": [{"name": "datapath"}, {"name": "cni"}]},
	"status": {"phase": "Running", "containerStatuses": [
		{"name": "cni", "ready": true, "restartCount": 2, "state": {"running": {"startedAt": "2026-11-27T10:00:00Z"}}},
		{"name": "datapath", "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}}]}}`
}

func TestNodesAreShownWithAndWithoutAPod(t *testing.T) {
	nodes := decode[list[node]](t, `{"items": [
		{"metadata": {"name": "b", "labels": {"kubernetes.io/os": "linux"}}, "status": {
			"conditions": [{"type": "Ready", "status": "True"}], "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
			"addresses": [{"type": "Hostname", "address": "b"}, {"type": "InternalIP", "address": "10.0.0.2"}]}},
		{"metadata": {"name": "a", "labels": {"kubernetes.io/os": "linux"}}, "status": {
			"conditions": [{"type": "Ready", "status": "False", "message": "cni plugin not initialized"}]}},
		{"metadata": {"name": "w", "labels": {"kubernetes.io/os": "windows"}}}]}`)
	pods := decode[list[pod]](t, `{"items": [`+strings.Join([]string{
		podText("old", "b", "2026-11-27T12:00:00Z", `, "deletionTimestamp": "2026-11-27T13:00:00Z"`),
		podText("first", "b", "2026-11-27T10:00:00Z", ""), podText("second", "b", "2026-11-27T11:00:00Z", ""),
		podText("stray", "z", "2026-11-27T10:00:00Z", ""), podText("pending", "", "2026-11-27T10:00:00Z", ""),
	}, ",")+`]}`)
	all := join(decode[daemonSet](t, setText), pods.Items, nodes.Items, nil)

	var names []string
	for _, n := range all.Nodes {
		name := n.Name
		if n.Pod != nil {
			name += "/" + n.Pod.Name
		}
		names = append(names, name)
	}
	if want := []string{"a", "b/second", "w", "z/stray"}; !slices.Equal(names, want) {
		t.Fatalf("got %q, want %q", names, want)
	}
	a, b, w := all.Nodes[0], all.Nodes[1], all.Nodes[2]
	if !a.Selected || a.Problem != "the node is not Ready: cni plugin not initialized" {
		t.Errorf("node a: %+v", a)
	}
	if b.Problem != "" || b.Kubelet != 10250 || !slices.Equal(b.Addresses, []string{"10.0.0.2"}) {
		t.Errorf("node b: %+v", b)
	}
	if w.Selected || !strings.Contains(w.NoPod, "kubernetes.io/os=linux") {
		t.Errorf("node w: %+v", w)
	}
	d := all.DaemonSet
	if d.Image != "b" || d.PullPolicy != "Always" || d.Desired != 3 || d.Ready != 2 || d.Updated != 1 ||
		!slices.Equal(d.PullSecrets, []string{"registry"}) {
		t.Errorf("DaemonSet %+v", d)
	}
	datapath, cni := b.Pod.Containers[0], b.Pod.Containers[1]
	if datapath.Running || datapath.Waits != "CrashLoopBackOff: back-off 10s" ||
		!cni.Running || !cni.Ready || cni.Restarts != 2 {
		t.Errorf("containers %+v, %+v", datapath, cni)
	}
}

func TestAPodThatInitializesSaysWhatItWaitsFor(t *testing.T) {
	for init, want := range map[string]string{
		`{"name": "a", "state": {"terminated": {"exitCode": 0}}}, {"name": "b", "state": {"running": {}}}`: "b runs",

		`{"name": "a", "state": {"terminated": {"reason": "Error", "exitCode": 1}}}`:      "a: Error, exit code 1",
		`{"name": "a", "state": {"waiting": {"reason": "ErrImagePull", "message": "m"}}}`: "a: ErrImagePull: m",

		"": "",
	} {
		if want != "" {
			want = ": init container " + want
		}
		p := decode[pod](t, `{"spec": {"containers": [{"name": "cni"}]}, "status": {"phase": "Pending",
			"initContainerStatuses": [`+init+`],
			"containerStatuses": [{"name": "cni", "state": {"waiting": {"reason": "PodInitializing"}}}]}}`)
		if c := podOf(p).Containers[0]; c.Running || c.Waits != "PodInitializing"+want {
			t.Errorf("%s: got %q", init, c.Waits)
		}
	}
}

func TestCommandsRunInAContainerThatRuns(t *testing.T) {
	running, waiting := Container{Running: true}, Container{Waits: "ContainerCreating"}
	named := func(c Container, name string) Container {
		c.Name = name
		return c
	}
	for _, c := range []struct {
		containers []Container
		want, err  string
	}{
		{[]Container{named(running, "datapath"), named(running, "cni")}, "cni", ""},
		{[]Container{named(running, "datapath"), named(waiting, "cni")}, "datapath", ""},
		{[]Container{named(waiting, "cni")}, "", "container cni does not run: ContainerCreating"},
		{[]Container{named(running, "etcd")}, "", "the pod has no container cni"},
	} {
		got, err := Node{Pod: &Pod{Containers: c.containers}}.Container()
		if got != c.want || (err == nil) != (c.err == "") || err != nil && err.Error() != c.err {
			t.Errorf("%+v: got %q, %v, want %q, %q", c.containers, got, err, c.want, c.err)
		}
	}
	if _, err := (Node{}).Container(); err == nil {
		t.Error("a node without a pod has a container")
	}
}

func TestFailureIsWhatKubectlSaysItself(t *testing.T) {
	exit := exec.CommandContext(t.Context(), "sh", "-c", "exit 3").Run()
	for _, c := range []struct{ stderr, want string }{
		{
			"E1127 15:52:40.299968   31142 memcache.go:265] \"Unhandled Error\"\nThe connection to the server was refused\n",
			"The connection to the server was refused (exit code 3)",
		},
		{"sluice: no such flag\ncommand terminated with exit code 3\n", "sluice: no such flag (exit code 3)"},
		{`{"error":"the server is shutting down\nsee x"}` + "\n", "the server is shutting down see x (exit code 3)"},
		{"{}\n", "{} (exit code 3)"},
		{"W1127 15:52:40.299968 1 a.go:1] b\n", "W1127 15:52:40.299968 1 a.go:1] b (exit code 3)"},
		{"", "no reason is given (exit code 3)"},
	} {
		err := failure(exit, []byte(c.stderr))
		var failed *Error
		if !errors.As(err, &failed) || failed.Code != 3 || err.Error() != c.want {
			t.Errorf("%q: got %v, want %q", c.stderr, err, c.want)
		}
	}
}

func TestLinesComeWholeHoweverTheyAreWritten(t *testing.T) {
	var got []string
	l := lines{each: func(line []byte) error {
		got = append(got, string(line))
		return nil
	}}
	for _, part := range []string{"a", "b\nc", "\n\n", "de\nf"} {
		if _, err := l.Write([]byte(part)); err != nil {
			t.Fatal(err)
		}
	}
	if want := []string{"ab", "c", "", "de"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if _, err := l.Write(make([]byte, lineLimit+1)); err == nil {
		t.Error("a line without an end is kept")
	}
	refused := errors.New("enough")
	l = lines{each: func([]byte) error { return refused }}
	if _, err := l.Write([]byte("a\n")); !errors.Is(err, refused) {
		t.Errorf("got %v, want %v", err, refused)
	}
}

func TestOutputIsBounded(t *testing.T) {
	b := bounded{limit: 5}
	for _, part := range []string{"abc", "def", "g"} {
		if n, err := b.Write([]byte(part)); n != len(part) || err != nil {
			t.Fatalf("write of %q: %d, %v", part, n, err)
		}
	}
	if b.String() != "abcde" || !b.cut {
		t.Errorf("got %q, cut %v", b.String(), b.cut)
	}
}

func TestTextCanBeEnteredAgain(t *testing.T) {
	c := Client{Context: "my cluster"}
	got := c.Text("exec", "x", "--", "sluice", "observe", "--label=app in (a),it's")
	if want := `kubectl '--context=my cluster' exec x -- sluice observe '--label=app in (a),it'\''s'`; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// client returns a client that runs a script instead of kubectl.
func client(t *testing.T, script string) *Client {
	t.Helper()
	program := filepath.Join(t.TempDir(), "kubectl")
	if err := os.WriteFile(program, []byte("#!/bin/sh\n"+script), 0o700); err != nil { //nolint:gosec // it is executed
		t.Fatal(err)
	}
	return &Client{Program: program, inv: &invocation.Invocation{Timeout: time.Minute}}
}

// TestOutputAboveTheLimitIsNoAnswer: truncated output is an error.
func TestOutputAboveTheLimitIsNoAnswer(t *testing.T) {
	const limit = 100_000
	printing := func(bytes int) *Client {
		c := client(t, fmt.Sprintf("head -c %d /dev/zero", bytes))
		c.outputLimit = limit
		return c
	}
	for _, c := range []struct {
		bytes int
		err   string
	}{{limit, ""}, {limit + 1, "the output is longer than 100000 bytes"}} {
		out, err := printing(c.bytes).Run(t.Context())
		if len(out) != limit || (err == nil) != (c.err == "") || err != nil && err.Error() != c.err {
			t.Errorf("%d bytes: %d are kept, %v; want %q", c.bytes, len(out), err, c.err)
		}
	}
	var list struct{}
	err := printing(limit+1).Get(t.Context(), &list, "pods")
	if err == nil || !strings.Contains(err.Error(), "kubectl get pods: the output is longer than") {
		t.Errorf("a list that was cut: %v", err)
	}
}

// TestAnInterruptOfTheTerminalDoesNotReachKubectl: kubectl has its own process group, so that the last output of the
// command in the pod still arrives.
func TestAnInterruptOfTheTerminalDoesNotReachKubectl(t *testing.T) {
	var out, errOut bytes.Buffer
	// the process group is the third field after the name of the program
	if err := client(t, `read -r stat </proc/$$/stat; set -- ${stat##*) }; echo "$$ $3"`).Pipe(t.Context(), &out,
		&errOut); err != nil {
		t.Fatal(err)
	}
	var pid, group int
	if _, err := fmt.Sscan(out.String(), &pid, &group); err != nil || pid == 0 || pid != group {
		t.Errorf("process and group are %q, %v", out.String(), err)
	}
}
