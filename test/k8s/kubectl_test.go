// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/test/k8s/cluster"
	"golang.org/x/sys/unix"
)

// TestKubectlSluice uses the kubectl plugin as an administrator, on a cluster of two nodes.
func TestKubectlSluice(t *testing.T) {
	c := startSluiceAs(t, "overlay", cluster.Options{Nodes: 2, Mounts: []string{programs()}})
	for _, step := range []struct {
		name string
		test func(kubectlSluice)
	}{
		{"Status", kubectlSluice.testStatus},
		{"Connectivity", kubectlSluice.testConnectivity},
		{"Observe", kubectlSluice.testObserve},
		{"Explain", kubectlSluice.testExplain},
		{"Capture", kubectlSluice.testCapture},
		{"Bugreport", kubectlSluice.testBugreport},
		{"NodeThatHangs", kubectlSluice.testNodeThatHangs},
		{"NodeWithoutPod", kubectlSluice.testNodeWithoutPod},
	} {
		t.Run(step.name, func(t *testing.T) {
			n := sluiceNode{t, c, 0}
			step.test(newKubectlSluice(n))
			n.eventually("the node has no leftovers", n.exactNode)
		})
	}
}

// kubectlSluice runs `kubectl sluice`.
type kubectlSluice struct {
	sluiceNode
	home string // contains the plugin, and kubectl's files
}

func newKubectlSluice(n sluiceNode) kubectlSluice {
	n.Helper()
	p := kubectlSluice{n, n.TempDir()}
	n.must(os.Symlink(filepath.Join(programs(), "sluice"), filepath.Join(p.home, "kubectl-sluice")))
	return p
}

// command returns the command `kubectl sluice` with arguments, outside of the cluster.
func (p kubectlSluice) command(ctx context.Context, args ...string) *exec.Cmd {
	p.Helper()
	all := append([]string{"kubectl", "sluice"}, args...)
	cmd, err := p.c.NetworkCommand(ctx, append(all, "--kubeconfig="+p.c.Kubeconfig())...)
	p.must(err)
	cmd.Dir = p.home
	cmd.Env = []string{
		"HOME=" + p.home,
		"PATH=" + strings.Join([]string{p.home, filepath.Join(os.Getenv("SLUICE_BIN"), "k8s"), "/usr/bin", "/bin"}, ":"),
	}
	return cmd
}

// plugin runs `kubectl sluice` and returns its output and exit code.
func (p kubectlSluice) plugin(args ...string) (out, errOut string, code int) {
	p.Helper()
	cmd := p.command(p.Context(), args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		p.Fatal(err)
	}
	p.Logf("kubectl sluice %s: exit code %d\n%s%s", strings.Join(args, " "), cmd.ProcessState.ExitCode(), stdout.String(),
		stderr.String())
	return stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()
}

// shownNode contains the tested fields of a node in `kubectl sluice status -o json`.
type shownNode struct {
	Name, Pod string
	Problems  []string
	Status    *struct {
		Ready    bool
		Problems []string
		Services []struct{ Name string }
	}
}

// status returns the nodes in the output, and the exit code.
func (p kubectlSluice) status(args ...string) ([]shownNode, int) {
	p.Helper()
	out, errOut, code := p.plugin(append([]string{"status", "--output=json"}, args...)...)
	var shown struct{ Nodes []shownNode }
	if err := json.Unmarshal([]byte(out), &shown); err != nil {
		p.Fatalf("%v in %s%s", err, out, errOut)
	}
	return shown.Nodes, code
}

// healthy waits until `kubectl sluice status` reports no problems.
func (p kubectlSluice) healthy() {
	p.Helper()
	p.eventually("every node is healthy", func() error {
		if out, errOut, code := p.plugin("status"); code != 0 {
			return fmt.Errorf("exit code %d: %s%s", code, out, errOut)
		}
		return nil
	})
}

func (p kubectlSluice) testStatus() {
	p.healthy()
	nodes, code := p.status()
	if code != 0 || len(nodes) != 2 {
		p.Fatalf("exit code %d, nodes %+v", code, nodes)
	}
	for i, n := range nodes {
		if n.Name != fmt.Sprintf("node%d", i+1) || n.Status == nil || !n.Status.Ready || len(n.Status.Services) != 6 {
			p.Errorf("node %+v", n)
		}
	}

	if nodes, code := p.status("--node=node2"); code != 0 || len(nodes) != 1 || nodes[0].Name != "node2" {
		p.Errorf("of node2 alone: exit code %d, nodes %+v", code, nodes)
	}
}

// testNodeWithoutPod: a node whose machine never started. This is the last step, because controllers notice late that
// a node has been deleted.
func (p kubectlSluice) testNodeWithoutPod() {
	p.apply("{apiVersion: v1, kind: Node, metadata: {name: stranger, labels: {kubernetes.io/os: linux}}}")
	p.eventually("the node is named", func() error {
		nodes, code := p.status()
		if code != 3 || len(nodes) != 3 || nodes[2].Name != "stranger" || len(nodes[2].Problems) == 0 ||
			nodes[2].Status != nil {
			return fmt.Errorf("exit code %d, nodes %+v", code, nodes)
		}
		return nil
	})
}

// connectivity contains the tested fields of `kubectl sluice connectivity test -o json`.
type connectivity struct {
	Namespace string
	Nodes     []string
	Checks    []struct {
		Name, Expected, Got, Next string
		Explained                 []string
		OK                        bool
	}
	Failed  []string
	Skipped []struct{ Name, Reason string }
}

// connectivity runs the test.
func (p kubectlSluice) connectivity(args ...string) (connectivity, int) {
	p.Helper()
	out, errOut, code := p.plugin(append([]string{"connectivity", "test", "--output=json"}, args...)...)
	var r connectivity
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		p.Fatalf("%v in %s%s", err, out, errOut)
	}
	p.noNamespace()
	return r, code
}

// noNamespace requires that no run of the test has left a namespace.
func (p kubectlSluice) noNamespace() {
	p.Helper()
	if left := p.kubectl("get", "namespaces", "--selector=app.kubernetes.io/name=sluice-connectivity-test",
		"--output=name"); left != "" {
		p.Errorf("left is %s", left)
	}
}

func (p kubectlSluice) testConnectivity() {
	r, code := p.connectivity("--external=10.200.0.1:6443")
	if code != 0 || len(r.Failed)+len(r.Skipped) > 0 || len(r.Checks) < 40 || len(r.Nodes) != 2 {
		p.Errorf("exit code %d, %d checks, failed %q, left out %+v", code, len(r.Checks), r.Failed, r.Skipped)
	}

	// Without a DNS server only the name resolution fails; the address has no pod and does not answer.
	p.kubectl("--namespace=kube-system", "scale", "deployment/coredns", "--replicas=0")
	p.kubectl("--namespace=kube-system", "wait", "--for=delete", "--timeout=2m", "pod", "--selector=k8s-app=kube-dns")
	r, code = p.connectivity("--retry=5s", "--external=10.244.200.1:80")
	if code != 1 || !slices.Equal(r.Failed, []string{"DNS of the cluster", "pod to the outside"}) {
		p.Errorf("without a DNS server: exit code %d, failed %q", code, r.Failed)
	}
	for _, c := range r.Checks {
		if !c.OK && (c.Got == "" || c.Expected == "" || !strings.Contains(c.Next, "kubectl")) {
			p.Errorf("the failure says %+v", c)
		}
		explained := strings.Join(c.Explained, "\n")
		if c.Name == "pod to the outside" && (!strings.Contains(explained, "-> 10.244.200.1, tcp port 80") ||
			!strings.Contains(c.Next, "sluice explain --from=")) {
			p.Errorf("the failure says %+v", c)
		}
	}

	// An interrupt also removes the namespace.
	cmd := p.command(p.Context(), "connectivity", "test")
	output := &safeBuffer{}
	cmd.Stdout, cmd.Stderr = output, output
	p.must(cmd.Start())
	p.eventually("a check has passed", func() error { return output.contains("ok  ") })
	p.must(cmd.Process.Signal(unix.SIGINT))
	if err := cmd.Wait(); err == nil {
		p.Errorf("interrupted, the test ends with success: %s", output)
	}
	p.noNamespace()

	p.kubectl("--namespace=kube-system", "scale", "deployment/coredns", "--replicas=1")
	p.kubectl("--namespace=kube-system", "rollout", "status", "--timeout=2m", "deployment/coredns")
}

// safeBuffer can be read while a command writes to it.
type safeBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer // guarded by mu
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func (b *safeBuffer) contains(text string) error {
	if all := b.String(); !strings.Contains(all, text) {
		return fmt.Errorf("no %q in %s", text, all)
	}
	return nil
}

// observers returns the processes that `kubectl sluice observe` has started on a node.
func (p kubectlSluice) observers(node int) []string {
	p.Helper()
	return p.processes(node, "until-input-[e]nds")
}

// processes returns the processes on a node whose arguments, separated by one byte, match. A bracket in the
// expression prevents the shell from finding itself.
func (p kubectlSluice) processes(node int, expression string) []string {
	p.Helper()
	find := "grep -la '" + expression + "' /proc/[0-9]*/cmdline 2>/dev/null || true"
	out, err := p.c.InNode(p.Context(), node, "sh", "-c", find)
	p.must(err)
	return strings.Fields(string(out))
}

// noObservers waits until no observer is left on both nodes.
func (p kubectlSluice) noObservers(after string) {
	p.Helper()
	p.eventually("no observer is left after "+after, func() error {
		for node := range 2 {
			if left := p.observers(node); len(left) > 0 {
				return fmt.Errorf("on node%d there is %q", node+1, left)
			}
		}
		return nil
	})
}

// follow starts `kubectl sluice observe --follow`, and waits until both nodes are observed.
func (p kubectlSluice) follow(args ...string) (cmd *exec.Cmd, out, errOut *safeBuffer) {
	p.Helper()
	cmd = p.command(p.Context(), append([]string{"observe", "--follow", "--output=json"}, args...)...)
	out, errOut = &safeBuffer{}, &safeBuffer{}
	cmd.Stdout, cmd.Stderr = out, errOut
	// kubectl, which the command starts, may hold the pipes open a moment longer.
	cmd.WaitDelay = time.Minute
	p.must(cmd.Start())
	p.eventually("both nodes are observed", func() error {
		for node := range 2 {
			if len(p.observers(node)) == 0 {
				return fmt.Errorf("node%d is not: %s", node+1, errOut)
			}
		}
		return nil
	})
	return cmd, out, errOut
}

func (p kubectlSluice) testObserve() {
	p.namespace("shop")
	p.Cleanup(func() { _, _ = p.c.Kubectl(contextOf(p), "delete", "namespace", "shop") })
	for node, names := range map[string][]string{"node1": {"client", "near"}, "node2": {"web"}} {
		for _, name := range names {
			p.serverOn(node, "shop", name)
		}
	}
	client, near, web := p.ready("shop", "client"), p.ready("shop", "near"), p.ready("shop", "web")
	p.policy("shop", "closed", "{podSelector: {matchExpressions: [{key: app, operator: In, values: [near, web]}]}, "+
		"policyTypes: [Ingress]}")
	to := map[string]string{"node1": near.address(), "node2": web.address()}
	drop := func() {
		p.Helper()
		for _, address := range to {
			p.eventually("a policy denies it", func() error {
				if err := p.connects(client, address+":8080"); err == nil || !strings.Contains(err.Error(), "TIMEOUT") {
					return fmt.Errorf("%v, want TIMEOUT", err)
				}
				return nil
			})
		}
	}
	drop()

	out, errOut, code := p.plugin("observe", "--reason=policy-denied", "--address="+client.address(), "--output=json")
	if seen := p.dropsOf(out); code != 0 || errOut != "" || !maps.Equal(seen, to) {
		p.Errorf("exit code %d, drops %v, want %v: %s%s", code, seen, to, out, errOut)
	}
	p.inOrder(out)
	if out, _, code := p.plugin("observe", "--reason=policy-denied", "--node=node2"); code != 0 ||
		!strings.HasPrefix(out, "node2  ") || strings.Contains(out, "node1  ") || strings.Contains(out, "forwarded-to") {
		p.Errorf("of node2 alone: exit code %d: %s", code, out)
	}

	p.observeCriteria(client, drop)

	// An interrupt ends the command and its processes on the nodes.
	following, events, notes := p.follow("--reason=policy-denied", "--address="+client.address())
	seesDrops := func() {
		p.Helper()
		p.eventually("the drops of both nodes are shown", func() error {
			drop()
			if seen := p.dropsOf(events.String()); len(seen) != 2 {
				return fmt.Errorf("drops %v in %s%s", seen, events, notes)
			}
			return nil
		})
	}
	seesDrops()
	p.must(following.Process.Signal(unix.SIGINT))
	if err := following.Wait(); err != nil {
		p.Errorf("interrupted, it ends with %v: %s", err, notes)
	}
	p.noObservers("an interrupt")

	// If the command is killed, it cannot end its observers.
	following, _, _ = p.follow()
	p.must(following.Process.Kill())
	_ = following.Wait()
	p.noObservers("a kill")

	// A node's pod of Sluice is replaced while its events are followed.
	following, events, notes = p.follow("--reason=policy-denied", "--address="+client.address())
	seesDrops()
	p.kubectl("--namespace=sluice-system", "delete", "pod", "--selector=app.kubernetes.io/name=sluice",
		"--field-selector=spec.nodeName=node2")
	p.eventually("the new pod is followed", func() error { return notes.contains("the pod was replaced") })
	before := len(events.String())
	p.eventually("the drops of the new pod are shown", func() error {
		drop()
		if seen := p.dropsOf(events.String()[before:]); seen["node2"] == "" {
			return fmt.Errorf("drops %v since: %s", seen, notes)
		}
		return nil
	})
	p.must(following.Process.Signal(unix.SIGINT))
	if err := following.Wait(); err != nil {
		p.Errorf("interrupted, it ends with %v: %s", err, notes)
	}
	p.noObservers("an interrupt")
	p.Log(notes)
	p.kubectl("delete", "namespace", "shop")
	p.healthy()
}

// testExplain explains connections between pods of two nodes, before and after a policy of the receiver denies the
// sender. Both nodes are queried, and the verdict agrees with the real connection. A command on one node names the
// node that it did not query.
func (p kubectlSluice) testExplain() {
	p.namespace("shop")
	p.Cleanup(func() { _, _ = p.c.Kubectl(contextOf(p), "delete", "namespace", "shop") })
	p.serverOn("node1", "shop", "client")
	p.serverOn("node2", "shop", "web")
	p.apply(`{apiVersion: v1, kind: Service, metadata: {name: web, namespace: shop}, spec: {selector: {app: web}, ` +
		`ports: [{port: 80,
		targetPort: 8080}]}}`)
	client, web := p.ready("shop", "client"), p.ready("shop", "web")
	service := p.kubectl("--namespace=shop", "get", "service", "web", "--output=jsonpath={.spec.clusterIP}")

	type explained struct {
		Verdict string
		Answers []struct{ Node, Has, To, Error string }
	}
	explain := func(to, port string) (x explained) {
		p.Helper()
		out, errOut, code := p.plugin("explain", "--from=shop/client", "--to="+to, "--port="+port, "--output=json")
		if err := json.Unmarshal([]byte(out), &x); err != nil || code != 0 {
			p.Fatalf("exit code %d, %v: %s%s", code, err, out, errOut)
		}
		return x
	}
	want := func(to, port, verdict, last string) {
		p.Helper()
		p.eventually(fmt.Sprintf("the connection to %s is %s", to, verdict), func() error {
			x := explain(to, port)
			if x.Verdict != verdict || len(x.Answers) != 2 || x.Answers[0].Node != "node1" || x.Answers[0].Has != "sender" ||
				x.Answers[1].Node != "node2" || x.Answers[1].Has != last || x.Answers[1].To != web.address() {
				return fmt.Errorf("explained as %+v", x)
			}
			return nil
		})
	}
	want("shop/web", "8080", "forwarded", "receiver")
	want(web.address(), "8080", "forwarded", "receiver")
	want(service, "80", "forwarded", "backend")
	p.must(p.connects(client, web.address()+":8080"))

	p.policy("shop", "closed", "{podSelector: {matchLabels: {app: web}}, policyTypes: [Ingress]}")
	want("shop/web", "8080", "dropped", "receiver")
	want(service, "80", "dropped", "backend")
	if err := p.connects(client, web.address()+":8080"); err == nil || !strings.Contains(err.Error(), "TIMEOUT") {
		p.Errorf("the connection: %v, want TIMEOUT", err)
	}
	out, _, _ := p.plugin("explain", "--from=shop/client", "--to=shop/web", "--port=8080")
	if !strings.Contains(out, ": DROPPED by node2 (policy-denied)\n") || !strings.Contains(out,
		"NetworkPolicy shop/closed") {
		p.Errorf("explained as %s", out)
	}
	alone, err := p.sluice("explain", "--from", client.address(), "--to", web.address(), "--port", "8080")
	if err != nil || !strings.Contains(alone, "; node2, which has the receiver, was not asked\n") {
		p.Errorf("on the sender's node: %v: %s", err, alone)
	}
	// Both nodes follow the same API, so the sender's node knows that the receiver's policy denies the connection.
	alone, err = p.sluice("policy", "explain", "--from", client.address(), "--to", web.address(), "--port", "8080",
		"--output=wide")
	if err != nil || !strings.Contains(alone, ": DENIED by policy revision ") || !strings.Contains(alone,
		"NetworkPolicy shop/closed") {
		p.Errorf("by the policies of the sender's node: %v: %s", err, alone)
	}
}

// observeCriteria observes the denied connections of the pod client on node1, to its neighbour near and to web on
// node2.
func (p kubectlSluice) observeCriteria(client kubePod, drop func()) {
	p.Helper()
	observe := func(args ...string) string {
		p.Helper()
		out, errOut, code := p.plugin(append([]string{"observe", "--reason=policy-denied", "--output=json"}, args...)...)
		if code != 0 || errOut != "" {
			p.Errorf("%q: exit code %d: %s", args, code, errOut)
		}
		return out
	}
	const fromClient = "--from=shop/client"
	for _, c := range []struct {
		want string // the nodes that report events
		args []string
	}{
		{"node1 node2", []string{fromClient}},
		{"node2", []string{fromClient, "--to=shop/web"}},
		{"node1", []string{fromClient, "--to=shop/near", "--to-port=8080", "--protocol=tcp"}},
		{"node1", []string{fromClient, "--not", "--to=shop/web"}},
		{"node2", []string{fromClient, "--to=app in (near,web)", "--not", "--to=shop/near"}},
		{"", []string{fromClient, "--not", "--to-port=8080"}},
		{"", []string{"--to=shop/client"}},
		{"node1 node2", []string{"--pod=shop/client"}},
		{"node2", []string{"--pod=shop/client", "--not", "--pod=shop/near"}},
		{"node2", []string{"--pod=shop/web", "--from=" + client.address()}},
		{"node1", []string{"--not", "--pod=shop/web", fromClient}},
	} {
		seen := p.dropsOf(observe(c.args...))
		if got := strings.Join(slices.Sorted(maps.Keys(seen)), " "); got != c.want {
			p.Errorf("%q: events of %q, want %q", c.args, got, c.want)
		}
	}

	all := observe(fromClient)
	lines := slices.Collect(strings.Lines(all))
	if got, want := observe(fromClient, "--last=2"), strings.Join(lines[len(lines)-2:], ""); got != want {
		p.Errorf("the last two are %s, want %s", got, want)
	}
	before := time.Now().Format(time.RFC3339Nano)
	drop()
	if got := observe(fromClient, "--until="+before); got != all {
		p.Errorf("until %s the output is %s, want %s", before, got, all)
	}
	if seen := p.dropsOf(observe(fromClient, "--since="+before)); len(seen) != 2 {
		p.Errorf("since %s there are %v", before, seen)
	}

	// The file contains what standard output would contain.
	file := filepath.Join(p.home, "flows.json")
	if out := observe(fromClient, "--until="+before, "--output-file="+file); out != "" {
		p.Errorf("with an output file, standard output has %s", out)
	}
	p.fileIs(file, all)
	// Follow until a time, with events of both nodes in the file.
	end := time.Now().Add(5 * time.Second).Format(time.RFC3339)
	if out := observe(fromClient, "--follow", "--since="+before, "--until="+end, "--output-file="+file+".new"); out != "" {
		p.Errorf("with an output file, standard output has %s", out)
	}
	content, err := os.ReadFile(file + ".new")
	p.must(err)
	if seen := p.dropsOf(string(content)); len(seen) != 2 {
		p.Errorf("the file has %s", content)
	}
	p.noObservers("the end of the requested time")

	// A pod that is not in the API is searched by name.
	out, errOut, code := p.plugin("observe", "--from=shop/nobody")
	if code != 0 || out != "" || !strings.Contains(errOut, "pod shop/nobody not found") {
		p.Errorf("of no pod: exit code %d: %s%s", code, out, errOut)
	}
}

// fileIs requires a file that only its owner may read.
func (p kubectlSluice) fileIs(name, want string) {
	p.Helper()
	info, err := os.Stat(name)
	p.must(err)
	content, err := os.ReadFile(name)
	p.must(err)
	if string(content) != want || info.Mode().Perm() != 0o600 {
		p.Errorf("%s has mode %v and %s, want %s", name, info.Mode(), content, want)
	}
}

// dropsOf returns the destinations of drops by the reporting node.
func (p kubectlSluice) dropsOf(out string) map[string]string {
	p.Helper()
	seen := map[string]string{}
	for decoder := json.NewDecoder(strings.NewReader(out)); ; {
		var f struct {
			NodeName, Verdict string
			Destination       struct{ Address string }
		}
		err := decoder.Decode(&f)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return seen
		}
		p.must(err)
		if f.Verdict == "dropped" {
			seen[f.NodeName] = f.Destination.Address
		}
	}
}

// inOrder requires that the events are ordered by time.
func (p kubectlSluice) inOrder(out string) {
	p.Helper()
	var last time.Time
	for line := range strings.Lines(out) {
		var f struct{ Time time.Time }
		p.must(json.Unmarshal([]byte(line), &f))
		if f.Time.Before(last) {
			p.Errorf("an event of %s comes after one of %s", f.Time, last)
		}
		last = f.Time
	}
}

// bugreport makes a report and returns its files by path.
func (p kubectlSluice) bugreport(args ...string) (map[string]string, int) {
	p.Helper()
	file := filepath.Join(p.home, "report.tar.gz")
	_, _, code := p.plugin(append([]string{"bugreport", "--file=" + file}, args...)...)
	content, err := os.ReadFile(file)
	p.must(err)
	return p.unpack(content), code
}

// unpack returns the files of a report by path.
func (p kubectlSluice) unpack(content []byte) map[string]string {
	p.Helper()
	compressed, err := gzip.NewReader(bytes.NewReader(content))
	p.must(err)
	files := map[string]string{}
	for archive := tar.NewReader(compressed); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		p.must(err)
		text, err := io.ReadAll(archive)
		p.must(err)
		_, name, _ := strings.Cut(header.Name, "/")
		files[name] = string(text)
	}
}

func (p kubectlSluice) testBugreport() {
	// No program reads these keys, but a user may have put a password into one of them.
	p.kubectl("--namespace=sluice-system", "patch", "configmap", "sluice",
		`--patch={"data":{"old":"https://root:hunter2@10.0.0.1:2379","etcdPassword":"hunter2"}}`)
	p.apply(`{apiVersion: v1, kind: Secret, metadata: {name: etcd, namespace: sluice-system}, stringData: {key: hunter2}}`)
	files, code := p.bugreport()
	if code != 0 {
		p.Errorf("exit code %d: %s", code, files["manifest.json"])
	}
	want := []string{
		"manifest.json", "cluster/pods.json", "cluster/nodes.json", "cluster/events.json", "cluster/settings.json",
		"cluster/daemonset.json", "cluster/version.json",
	}
	for _, node := range []string{"node1", "node2"} {
		for _, name := range []string{
			"status.json", "endpoints.json", "identities.json", "cluster-nodes.json", "node-files.json", "pools.json",
			"allocations.json", "policies.json", "services.json", "backends.json", "maps.json", "check.json", "flows.json",
			"version.txt", "logs/identity.log", "logs/ipam.log", "logs/policy.log", "logs/loadbalancer.log",
			"logs/datapath.log", "logs/cni.log",
		} {
			want = append(want, "nodes/"+node+"/"+name)
		}
	}
	for _, name := range want {
		if files[name] == "" {
			p.Errorf("the report has no %s", name)
		}
	}
	// A pod that was replaced found everything installed.
	if _, there := files["nodes/node2/logs/install.log"]; !there || files["nodes/node1/logs/install.log"] == "" {
		p.Error("the report has no logs of the init container")
	}
	for name, text := range files {
		// The plain secret, its form in a Secret, and the first characters of a service account's token and of a
		// private key.
		for _, secret := range []string{"hunter2", "aHVudGVyMg", "eyJhbGciOi", "PRIVATE KEY"} {
			if strings.Contains(text, secret) {
				p.Errorf("%s has %q: %s", name, secret, text)
			}
		}
	}
	if !strings.Contains(files["cluster/settings.json"], "https://REDACTED@10.0.0.1:2379") {
		p.Errorf("settings: %s", files["cluster/settings.json"])
	}
	p.kubectl("--namespace=sluice-system", "patch", "configmap", "sluice",
		`--patch={"data":{"old":null,"etcdPassword":null}}`)
	p.kubectl("--namespace=sluice-system", "delete", "secret", "etcd")
	p.nodeReport()

	// Reports must work with a hanging process.
	resume := p.stop(p.processOf("ipam"))
	files, code = p.bugreport("--timeout=1s")
	var manifest struct {
		Missing []struct{ Name, Reason string }
	}
	p.must(json.Unmarshal([]byte(files["manifest.json"]), &manifest))
	pools := slices.IndexFunc(manifest.Missing, func(m struct{ Name, Reason string }) bool {
		return m.Name == "nodes/node1/pools.json" && m.Reason != ""
	})
	if code != 1 || pools < 0 || files["nodes/node2/pools.json"] == "" || files["nodes/node1/endpoints.json"] == "" {
		p.Errorf("exit code %d, missing %+v", code, manifest.Missing)
	}
	nodes, code := p.status("--timeout=1s")
	if code != 3 || nodes[0].Status == nil || nodes[1].Status == nil ||
		!strings.Contains(strings.Join(nodes[0].Status.Problems, "\n"), "sluice-ipam") {
		p.Errorf("with a process that hangs: exit code %d, nodes %+v", code, nodes)
	}
	resume()
	p.healthy()

	// Most data of a report come from the datapath. The data of other processes and the logs must be there.
	resume = p.stop(p.processOf("datapath"))
	files, code = p.bugreport("--timeout=1s")
	for _, name := range []string{"policies.json", "pools.json", "logs/datapath.log", "logs/cni.log"} {
		if files["nodes/node1/"+name] == "" {
			p.Errorf("with a datapath that hangs the report has no %s", name)
		}
	}
	if code != 1 || files["nodes/node1/endpoints.json"] != "" || files["nodes/node2/endpoints.json"] == "" ||
		!strings.Contains(files["manifest.json"], "nodes/node1/endpoints.json") {
		p.Errorf("with a datapath that hangs: exit code %d: %s", code, files["manifest.json"])
	}
	resume()
	p.healthy()
}

// nodeReport: a container with the sockets makes the report of its node, with the data that it can reach.
func (p kubectlSluice) nodeReport() {
	p.Helper()
	var pods struct{ Items []kubePod }
	p.must(p.c.Get(p.Context(), &pods, "pods", "--namespace=sluice-system", "--selector=app.kubernetes.io/name=sluice",
		"--field-selector=spec.nodeName=node1"))
	out := p.kubectl("--namespace=sluice-system", "exec", pods.Items[0].Metadata.Name, "--container=cni", "--", "sluice",
		"bugreport", "--file=-")
	files := p.unpack([]byte(out))
	for _, name := range []string{
		"status.json", "manifests.json", "settings/datapath.json", "settings/ipam.json", "endpoints.json",
		"machine/kernel.txt",
	} {
		if text, ok := files[name]; !ok || text == "" && name != "manifests.json" { // there may be no policies
			p.Errorf("the report of a node has no %s: %s", name, slices.Sorted(maps.Keys(files)))
		}
	}
	for name, text := range files {
		if strings.Contains(text, "eyJhbGciOi") {
			p.Errorf("%s of the report of a node has a token: %s", name, text)
		}
	}
	p.Logf("the report of a node: %s", files["manifest.json"])
}

// processOf returns the process of a container in Sluice's pod on the first node.
func (p kubectlSluice) processOf(container string) int {
	p.Helper()
	var pods struct{ Items []kubePod }
	p.must(p.c.Get(p.Context(), &pods, "pods", "--namespace=sluice-system", "--selector=app.kubernetes.io/name=sluice",
		"--field-selector=spec.nodeName=node1"))
	for _, pod := range pods.Items {
		for _, status := range pod.Status.ContainerStatuses {
			if status.Name == container && pod.Metadata.DeletionTimestamp == nil {
				_, id, _ := strings.Cut(status.ContainerID, "://")
				return p.task(id)
			}
		}
	}
	p.Fatalf("no container %s in %+v", container, pods)
	return 0
}

// stop stops a process on the first node until the returned function is called or the test ends.
func (p kubectlSluice) stop(pid int) (resume func()) {
	p.Helper()
	signal := func(ctx context.Context, name string) error {
		_, err := p.c.InNode(ctx, 0, "kill", "-"+name, strconv.Itoa(pid))
		return err
	}
	p.must(signal(p.Context(), "STOP"))
	var once sync.Once
	resume = func() {
		once.Do(func() {
			if err := signal(contextOf(p), "CONT"); err != nil {
				p.Error(err)
			}
		})
	}
	p.Cleanup(resume)
	return resume
}

// testNodeThatHangs: the container runtime of a node executes no commands.
func (p kubectlSluice) testNodeThatHangs() {
	out, err := p.run("pidof", "containerd")
	p.must(err)
	pid, err := strconv.Atoi(strings.TrimSpace(out))
	p.must(err)
	resume := p.stop(pid)
	nodes, code := p.status("--timeout=1s")
	if code != 3 || len(nodes) != 2 || nodes[0].Status != nil || len(nodes[0].Problems) == 0 ||
		!strings.Contains(strings.Join(nodes[0].Problems, "; "), "no answer within") || nodes[1].Status == nil {
		p.Errorf("exit code %d, nodes %+v", code, nodes)
	}
	_, errOut, code := p.plugin("observe", "--timeout=1s", "--reason=spoofed-ip")
	if code != 1 || !strings.Contains(errOut, "node1: no answer within") || strings.Contains(errOut, "node2") {
		p.Errorf("events: exit code %d: %s", code, errOut)
	}
	files, code := p.bugreport("--timeout=1s")
	if code != 1 || files["nodes/node1/status.json"] != "" || files["nodes/node2/status.json"] == "" ||
		!strings.Contains(files["manifest.json"], `"skipped: the 2 commands before it timed out"`) {
		p.Errorf("report: exit code %d: %s", code, files["manifest.json"])
	}
	resume()
	p.healthy()
}
