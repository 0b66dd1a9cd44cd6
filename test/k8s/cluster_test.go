// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/test/k8s/cluster"
	"github.com/sluice-net/sluice/test/k8s/internal/rights"
	"github.com/sluice-net/sluice/test/k8s/internal/wait"
	"golang.org/x/sys/unix"
)

// victim is the variable that makes this program the process that TestKilledHarnessLeavesNothing kills.
const victim = "SLUICE_K8S_VICTIM"

func TestMain(m *testing.M) {
	if os.Getenv(victim) != "" {
		os.Exit(beVictim())
	}
	os.Exit(m.Run())
}

// beVictim starts a cluster with a program in it, as the test suites do, prints its directory and keeper, and waits
// to be killed.
func beVictim() int {
	c, err := cluster.Start(context.Background(), cluster.Options{NoCNI: true})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	suite, err := c.MachineCommand(context.Background(), "tail", "--follow", filepath.Join(c.Dir(), "config.json"))
	if err == nil {
		err = suite.Start()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println(c.Dir(), c.KeeperPID())
	select {}
}

func start(t testing.TB, o cluster.Options) *cluster.Cluster {
	t.Helper()
	begin := time.Now()
	c, err := cluster.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.Logs(60))
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		for _, left := range leftovers(t, c.Dir()) {
			t.Errorf("after Close %s is left", left)
		}
	})
	t.Logf("a cluster was ready after %.1f s", time.Since(begin).Seconds())
	return c
}

// leftovers returns everything that exists of the cluster with the run directory.
func leftovers(t testing.TB, dir string) []string {
	t.Helper()
	var left []string
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		left = append(left, dir)
	}
	for _, pattern := range []string{"/sys/fs/cgroup/sluice-k8s-", "/sys/fs/cgroup/*/sluice-k8s-"} {
		cgroups, err := filepath.Glob(pattern + filepath.Base(dir))
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, cgroups...)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, dir) {
			left = append(left, "the mount "+line)
		}
	}
	// Processes of a node would keep its cgroup alive.
	return append(left, running(t, dir)...)
}

func TestPodsRunOnAReadyNode(t *testing.T) {
	c := start(t, cluster.Options{})
	ctx := t.Context()

	var nodes struct {
		Items []struct {
			Metadata struct{ Name string }
			Status   struct {
				Conditions []struct{ Type, Status string }
				NodeInfo   struct{ KubeletVersion, ContainerRuntimeVersion string }
			}
		}
	}
	if err := c.Get(ctx, &nodes, "nodes"); err != nil {
		t.Fatal(err)
	}
	if len(nodes.Items) != 1 || nodes.Items[0].Metadata.Name != "node1" {
		t.Fatalf("nodes: %+v, want node1 alone", nodes)
	}
	info := nodes.Items[0].Status.NodeInfo
	t.Logf("kubelet %s, %s", info.KubeletVersion, info.ContainerRuntimeVersion)
	for _, condition := range nodes.Items[0].Status.Conditions {
		if condition.Type == "Ready" && condition.Status != "True" {
			t.Errorf("node1 is not Ready: %+v", nodes)
		}
	}

	testPods(t, c)
	testRights(t, c, "kube-system", "k8s-app=kube-dns", nil)
	// From the control plane's machine, via portmap.
	if err := c.Eventually(within(t, time.Minute), "the pod's hostPort answers", func() error {
		out, err := c.InMachine(ctx, "curl", "--silent", "--fail", "--max-time", "2", "http://10.200.0.11:18080/hostname")
		if err == nil && string(out) != "web" {
			err = fmt.Errorf("%q answers, want web", out)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

// testPods starts a pod with a service. Another pod connects to both by name and by the addresses of both families.
func testPods(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	ctx := t.Context()
	if err := c.Apply(ctx, []byte(`
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: default, labels: {app: web}}
spec:
  containers:
  - name: web
    image: registry.k8s.io/e2e-test-images/agnhost:2.63.0
    args: [netexec, --http-port=8080]
    ports: [{containerPort: 8080, hostPort: 18080}]
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: default}
spec:
  containers:
  - name: client
    image: registry.k8s.io/e2e-test-images/agnhost:2.63.0
    args: [pause]
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec:
  ipFamilyPolicy: RequireDualStack
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
`)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Kubectl(ctx, "wait", "--for=condition=Ready", "--timeout=2m", "pod/web", "pod/client"); err != nil {
		t.Fatal(err)
	}
	pods := addresses(t, c, "pod/web", "{.status.podIPs[*].ip}")
	services := addresses(t, c, "service/web", "{.spec.clusterIPs[*]}")
	// Use the name of the service, its address, and the API's name: this tests DNS, kube-proxy and the network
	// together.
	web, api := "web.default.svc.cluster.local", "kubernetes.default.svc.cluster.local"
	for _, way := range []struct{ from, to string }{
		{"web", web + ":80"},
		{"client", web + ":80"},
		{"client", api + ":443"},
		{"client", net.JoinHostPort(pods[0], "8080")},
		{"client", net.JoinHostPort(pods[1], "8080")},
		{"client", net.JoinHostPort(services[0], "80")},
		{"client", net.JoinHostPort(services[1], "80")},
	} {
		if err := c.Eventually(within(t, time.Minute), way.from+" reaches "+way.to, func() error {
			_, err := c.Kubectl(ctx, "exec", way.from, "--", "/agnhost", "connect", "--timeout=3s", way.to)
			return err
		}); err != nil {
			t.Error(err)
		}
	}
	for _, pod := range pods {
		// From outside of the node.
		url := "http://" + net.JoinHostPort(pod, "8080") + "/hostname"
		out, err := c.InMachine(ctx, "curl", "--silent", "--fail", "--max-time", "5", url)
		if err != nil || string(out) != "web" {
			t.Errorf("%q answers at %s, want web: %v", out, url, err)
		}
	}
	if _, err := c.Kubectl(ctx, "exec", "web", "--", "/agnhost", "connect", "--timeout=2s", web+":81"); err == nil ||
		!strings.Contains(err.Error(), "REFUSED") && !strings.Contains(err.Error(), "TIMEOUT") {
		t.Errorf("an unused port of the service answers the pod: %v", err)
	}
}

// addresses returns both addresses of an object, IPv4 first.
func addresses(t *testing.T, c *cluster.Cluster, object, path string) []string {
	t.Helper()
	out, err := c.Kubectl(t.Context(), "get", object, "--output=jsonpath="+path)
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Fields(string(out))
	if len(all) != 2 || strings.Contains(all[0], ":") || !strings.Contains(all[1], ":") {
		t.Fatalf("%s has the addresses %q, want one of each family", object, all)
	}
	return all
}

// testRights compares the kernel's view of the rights of the selected pods' containers with their manifests. users
// contains the user of each container that changes its user.
func testRights(t *testing.T, c *cluster.Cluster, namespace, selector string, users map[string]int) {
	ctx := t.Context()
	var pods struct {
		Items []struct {
			Spec struct {
				NodeName        string
				Containers      []rights.Container
				SecurityContext struct{ SeccompProfile struct{ Type string } }
			}
			Status struct {
				ContainerStatuses []struct{ Name, ContainerID string }
			}
		}
	}
	if err := c.Get(ctx, &pods, "pods", "--namespace="+namespace, "--selector="+selector); err != nil {
		t.Fatal(err)
	}
	if len(pods.Items) == 0 || len(pods.Items[0].Status.ContainerStatuses) == 0 {
		t.Fatalf("no container of %s: %+v", selector, pods)
	}
	for _, pod := range pods.Items {
		var node int
		if _, err := fmt.Sscanf(pod.Spec.NodeName, "node%d", &node); err != nil {
			t.Fatalf("a pod of %s is on the node %q: %v", selector, pod.Spec.NodeName, err)
		}
		ids := map[string]string{}
		for _, status := range pod.Status.ContainerStatuses {
			ids[status.Name] = status.ContainerID
		}
		for _, container := range pod.Spec.Containers {
			content, err := c.ProcessStatus(ctx, node-1, ids[container.Name])
			if err != nil {
				t.Fatal(err)
			}
			process, err := rights.Parse(content)
			if err != nil {
				t.Fatal(err)
			}
			if container.SecurityContext.SeccompProfile.Type == "" {
				container.SecurityContext.SeccompProfile = pod.Spec.SecurityContext.SeccompProfile
			}
			user, changes := users[container.Name]
			if !changes {
				user = -1
			}
			for _, d := range rights.Differences(container, process, user) {
				t.Error(d)
			}
			t.Logf("%s: %+v", container.Name, process)
		}
	}
}

// startSluice starts a cluster of one node with Sluice as its network, and waits until it is ready, including its DNS
// server.
func startSluice(t testing.TB, o cluster.Options) *cluster.Cluster {
	t.Helper()
	return startSluiceAs(t, "cluster", o)
}

// joinsLater is a label of nodes that initially have no network.
const joinsLater = "joins-later"

// startSluiceAs deploys Sluice from a directory of testdata, on a cluster in which other objects were created before.
func startSluiceAs(
	t testing.TB, kustomization string, o cluster.Options, before ...func(*cluster.Cluster),
) *cluster.Cluster {
	t.Helper()
	o.NoCNI = true
	for _, name := range []string{"sluice", "sluice-devetcd"} {
		o.Images = append(o.Images, filepath.Join(os.Getenv("SLUICE_BIN"), "images", name+"-"+runtime.GOARCH+".tar"))
	}
	c := start(t, o)
	for _, prepare := range before {
		prepare(c)
	}
	begin := time.Now()
	if _, err := c.Kubectl(t.Context(), "apply", "--kustomize=testdata/"+kustomization); err != nil {
		t.Fatal(err)
	}
	if o.Nodes > 1 && kustomization != "store" {
		shareEtcd(t, c)
	}
	for _, args := range [][]string{
		{"--namespace=sluice-system", "rollout", "status", "--timeout=3m", "daemonset/sluice"},
		{"wait", "--for=condition=Ready", "--timeout=2m", "node", "--selector=!" + joinsLater},
		{"--namespace=kube-system", "rollout", "status", "--timeout=2m", "deployment/coredns"},
	} {
		if _, err := c.Kubectl(t.Context(), args...); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("Sluice and the DNS server were ready after %.1f s", time.Since(begin).Seconds())
	return c
}

// TestSluiceServesACluster deploys Sluice on clusters without a network, one with Debian's containerd and one with
// containerd 2. The scenarios share the first cluster.
func TestSluiceServesACluster(t *testing.T) {
	for version, program := range map[string]string{
		"1.6": "", "2": filepath.Join(os.Getenv("SLUICE_BIN"), "k8s", "containerd"),
	} {
		t.Run("containerd "+version, func(t *testing.T) {
			c := startSluice(t, cluster.Options{Containerd: program, Mounts: []string{programs()}})
			runtimes, err := c.Kubectl(t.Context(), "get", "nodes",
				"--output=jsonpath={.items[*].status.nodeInfo.containerRuntimeVersion}")
			if err != nil || !strings.HasPrefix(string(runtimes), "containerd://"+version+".") {
				t.Errorf("the node's runtime is %q, want containerd %s: %v", runtimes, version, err)
			}
			testPods(t, c)
			// It starts as root and changes to this user.
			testRights(t, c, "sluice-system", "app.kubernetes.io/name=sluice", map[string]int{"datapath": 65706})
			if program == "" {
				testScenarios(t, c)
			}
			t.Run("Uninstall", func(t *testing.T) { testUninstall(sluiceNode{t, c, 0}) })
		})
	}
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// TestKilledHarnessLeavesNothing runs two clusters at the same time, which have the same addresses and names.
func TestKilledHarnessLeavesNothing(t *testing.T) {
	kill := map[string]func(harness, keeper int) error{
		"harness": func(harness, _ int) error { return unix.Kill(harness, unix.SIGKILL) },
		"harness and keeper": func(harness, keeper int) error {
			return errors.Join(unix.Kill(harness, unix.SIGKILL), unix.Kill(keeper, unix.SIGKILL))
		},
	}
	for name, kill := range kill {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			harness := exec.Command("/proc/self/exe")
			harness.Env = append(os.Environ(), victim+"=1")
			harness.Stderr = os.Stderr
			out, err := harness.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := harness.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				_ = harness.Process.Kill()
				_ = harness.Wait()
			})
			var dir string
			var keeper int
			if _, err := fmt.Fscan(bufio.NewReader(out), &dir, &keeper); err != nil {
				t.Fatalf("the harness started no cluster: %s", err)
			}
			seen := leftovers(t, dir)
			suite := func(s string) bool { return strings.Contains(s, "tail --follow") }
			if len(seen) < 10 || !slices.ContainsFunc(seen, suite) {
				t.Fatalf("a running cluster with a suite shows only %q", seen)
			}
			if err := kill(harness.Process.Pid, keeper); err != nil {
				t.Fatal(err)
			}
			if name != "harness" {
				// No process is left to remove the files; the next start removes them.
				waitUntil(t, func() error { return none(running(t, dir)) })
				if err := cluster.RemoveDead(); err != nil {
					t.Fatal(err)
				}
			}
			waitUntil(t, func() error { return none(leftovers(t, dir)) })
		})
	}
}

func waitUntil(t *testing.T, try func() error) {
	t.Helper()
	if err := wait.Until(time.Minute, try); err != nil {
		t.Fatal(err)
	}
}
