// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/test/k8s/cluster"
)

// outage is the time for which the API server and etcd are down in a scenario.
var outage = flag.Duration("outage", 15*time.Second, "how long the API server and etcd are down")

// image is the image of all pods of the scenarios.
const image = "registry.k8s.io/e2e-test-images/agnhost:2.63.0"

// testScenarios runs scenarios on a node, one after the other. After each of them, the node's state must match the
// API.
func testScenarios(t *testing.T, c *cluster.Cluster) {
	for _, s := range []struct {
		name string
		run  func(sluiceNode)
	}{
		{"Account", testAccount},
		{"ProbesUnderDefaultDeny", testProbes},
		{"HostNetwork", testHostNetwork},
		{"StaticPod", testStaticPod},
		{"HostPort", testHostPort},
		{"Services", testServices},
		{"SecondInterface", testSecondInterface},
		{"SandboxKilled", testSandboxKilled},
		{"ContainerdKilled", testContainerdKilled},
		{"ContainersKilled", testContainersKilled},
		{"Rollout", testRollout},
		{"APIServerAway", testAPIServerAway},
		{"EtcdAway", testEtcdAway},
		{"KindsAppear", testKindsAppear},
		{"APIServerRestored", testAPIServerRestored},
	} {
		t.Run(s.name, func(t *testing.T) {
			n := sluiceNode{t, c, 0}
			begin := time.Now()
			s.run(n)
			// The objects of a scenario are deleted with its namespace.
			n.kubectl("delete", "namespace", "--selector=scenario", "--ignore-not-found", "--wait")
			n.exact()
			t.Logf("took %.1f s", time.Since(begin).Seconds())
		})
	}
}

// namespace creates a namespace that is deleted after the scenario.
func (n sluiceNode) namespace(name string) {
	n.Helper()
	n.apply(`{apiVersion: v1, kind: Namespace, metadata: {name: %s, labels: {scenario: here}}}`, name)
	n.eventually("the namespace has its account", func() error {
		_, err := n.c.Kubectl(n.Context(), "--namespace="+name, "get", "serviceaccount", "default")
		return err
	})
}

// server creates a pod without labels that serves on port 8080, optionally on a given node.
func (n sluiceNode) server(namespace, name string, node ...string) {
	n.Helper()
	n.apply(`
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: %s}
spec:
  nodeName: "%s"
  terminationGracePeriodSeconds: 1
  containers: [{name: agnhost, image: "%s", args: [netexec, --http-port=8080]}]
`, name, namespace, strings.Join(node, ""), image)
}

// connects tries a connection from a pod.
func (n sluiceNode) connects(from kubePod, to string) error {
	_, err := n.c.Kubectl(n.Context(), "--namespace="+from.Metadata.Namespace, "exec", from.Metadata.Name, "--",
		"/agnhost", "connect", "--timeout=2s", to)
	return err
}

// denied requires that a connection from a pod times out, and is not refused by a server that it reached.
func (n sluiceNode) denied(from kubePod, to string) {
	n.Helper()
	if err := n.connects(from, to); err == nil || !strings.Contains(err.Error(), "TIMEOUT") {
		n.Errorf("%s → %s: %v, want TIMEOUT", from, to, err)
	}
}

// defaultDeny isolates all pods of a namespace in both directions.
func (n sluiceNode) defaultDeny(namespace string) {
	n.Helper()
	n.policy(namespace, "default-deny", "{podSelector: {}, policyTypes: [Ingress, Egress]}")
}

// testProbes: kubelet's probes come from the node, and no policy blocks them.
func testProbes(n sluiceNode) {
	n.namespace("closed")
	n.defaultDeny("closed")
	probes := map[string]string{
		"http": "httpGet: {port: 8080, path: /healthz}",
		"tcp":  "tcpSocket: {port: 8080}",
		"exec": `exec: {command: [/agnhost, connect, --timeout=2s, "127.0.0.1:8080"]}`,
		"grpc": "grpc: {port: 5000}",
	}
	for name, probe := range probes {
		args := "[netexec, --http-port=8080]"
		if name == "grpc" {
			args = "[grpc-health-checking]"
		}
		n.apply(`
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: closed}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: agnhost
    image: %s
    args: %s
    startupProbe: {periodSeconds: 1, failureThreshold: 60, %[4]s}
    readinessProbe: {periodSeconds: 1, %[4]s}
    livenessProbe: {periodSeconds: 1, failureThreshold: 2, %[4]s}
`, name, image, args, probe)
	}
	for name := range probes {
		if p := n.ready("closed", name); p.Status.ContainerStatuses[0].RestartCount != 0 {
			n.Errorf("%s was started again: its probe failed", p)
		}
	}
	n.server("default", "visitor")
	defer n.kubectl("delete", "pod", "visitor", "--wait")
	visitor := n.ready("default", "visitor")
	n.denied(visitor, n.pod("closed", "http").address()+":8080")
	n.denied(n.pod("closed", "http"), visitor.address()+":8080")
}

// testHostNetwork: to the node's pods, a pod with the host network is the node. The control plane's machine is not.
func testHostNetwork(n sluiceNode) {
	n.namespace("closed")
	n.defaultDeny("closed")
	n.server("closed", "web")
	n.apply(`
apiVersion: v1
kind: Pod
metadata: {name: host, namespace: closed}
spec:
  hostNetwork: true
  terminationGracePeriodSeconds: 1
  containers: [{name: agnhost, image: "%s", args: [pause]}]
`, image)
	to := n.ready("closed", "web").address() + ":8080"
	if err := n.connects(n.ready("closed", "host"), to); err != nil {
		n.Errorf("a pod in the network of the node: %v", err)
	}
	if out, err := n.c.InMachine(n.Context(), "curl", "--silent", "--max-time", "2", "http://"+to); err == nil {
		n.Errorf("the control plane's machine reaches an isolated pod: %s", out)
	}
}

// testStaticPod: kubelet starts the pod from a file, without the API's service account.
func testStaticPod(n sluiceNode) {
	n.namespace("static")
	n.must(n.write(fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: static}
spec:
  terminationGracePeriodSeconds: 1
  containers: [{name: agnhost, image: "%s", args: [netexec, --http-port=8080]}]
`, image), "sh", "-c", "cat >/etc/kubernetes/manifests/web.yaml"))
	n.eventually("the API has the static pod", func() error {
		_, err := n.c.Kubectl(n.Context(), "--namespace=static", "get", "pod", "web-node1")
		return err
	})
	web := n.ready("static", "web-node1")
	n.server("static", "client")
	if err := n.connects(n.ready("static", "client"), web.address()+":8080"); err != nil {
		n.Errorf("to a static pod: %v", err)
	}
	if _, err := n.run("rm", "/etc/kubernetes/manifests/web.yaml"); err != nil {
		n.Fatal(err)
	}
	n.kubectl("--namespace=static", "wait", "--for=delete", "--timeout=2m", "pod/web-node1")
}

// testHostPort: the datapath opens the host port, without another plugin.
func testHostPort(n sluiceNode) {
	const at = nodeAddress + ":18081"
	content, err := n.run("cat", "/etc/cni/net.d/05-sluice.conflist")
	if err != nil || strings.Contains(content, "portmap") {
		n.Errorf("the CNI configuration names another plugin: %v\n%s", err, content)
	}
	n.namespace("ports")
	n.apply(`
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: ports}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - {name: agnhost, image: "%s", args: [netexec, --http-port=8080], ports: [{containerPort: 8080, hostPort: 18081}]}
`, image)
	n.server("ports", "client")
	n.ready("ports", "web")
	from := map[string]func() error{
		"a pod": func() error { return n.connects(n.ready("ports", "client"), at) },
		"the node": func() error {
			_, err := n.run("curl", "--silent", "--fail", "--max-time", "2", "http://"+at+"/hostname")
			return err
		},
		"another machine": func() error {
			_, err := n.c.InMachine(n.Context(), "curl", "--silent", "--fail", "--max-time", "2", "http://"+at+"/hostname")
			return err
		},
	}
	for who, reach := range from {
		n.eventually(who+" reaches the port", reach)
	}
	n.defaultDeny("ports")
	if err := from["another machine"](); err == nil {
		n.Error("an isolated pod answers another machine at its hostPort")
	}
	if err := from["the node"](); err != nil {
		n.Errorf("an isolated pod does not answer its node at its hostPort: %v", err)
	}
	n.kubectl("--namespace=ports", "delete", "pod", "web", "--wait")
	for who, reach := range from {
		n.eventually("nothing answers "+who+" at the port", func() error {
			if reach() == nil {
				return errors.New("it does")
			}
			return nil
		})
	}
}

// testSecondInterface connects a second interface, as a plugin that calls others does.
func testSecondInterface(n sluiceNode) {
	n.namespace("second")
	n.server("second", "web")
	n.server("second", "client")
	web, client := n.ready("second", "web"), n.ready("second", "client")
	e := n.endpointOf(web)
	var list struct{ Plugins []map[string]any }
	content, err := n.run("cat", "/etc/cni/net.d/05-sluice.conflist")
	n.must(err)
	n.must(json.Unmarshal([]byte(content), &list))
	own := list.Plugins[0]
	own["cniVersion"], own["name"] = "1.0.0", "second"
	config, err := json.Marshal(own)
	n.must(err)
	call := func(command string) {
		n.Helper()
		n.must(n.write(string(config), "env", "CNI_COMMAND="+command, "CNI_CONTAINERID="+e.Owner.ContainerID,
			"CNI_NETNS="+e.NetworkNamespace, "CNI_IFNAME=net1", "CNI_PATH=/opt/cni/bin",
			"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=second;K8S_POD_NAME=web;K8S_POD_UID="+web.Metadata.UID,
			"/opt/cni/bin/sluice-cni"))
	}
	s := n.stream(client, web)
	before := n.routesOf(web)
	call("ADD")
	if after := n.routesOf(web); after != before {
		n.Errorf("the default routes were\n%s\nand are\n%s", before, after)
	}
	if err := n.connects(client, web.address()+":8080"); err != nil {
		n.Error(err)
	}
	// The API does not show the second interface, so the comparison after each scenario would report it.
	if err := n.differences(); err == nil {
		n.Error("a second interface, which the API does not show, is not reported")
	}
	call("DEL")
	if after := n.routesOf(web); after != before {
		n.Errorf("after DEL the default routes were\n%s\nand are\n%s", before, after)
	}
	s.unbroken("second interface")
}

// routesOf returns the default routes of a pod.
func (n sluiceNode) routesOf(p kubePod) string {
	n.Helper()
	netns := n.endpointOf(p).NetworkNamespace
	const show = "nsenter --net=$0 ip route show default; nsenter --net=$0 ip -6 route show default"
	out, err := n.run("sh", "-c", show, netns)
	n.must(err)
	return out
}

// task returns the process of a container or sandbox.
func (n sluiceNode) task(id string) int {
	n.Helper()
	out, err := n.run("ctr", "--namespace=k8s.io", "tasks", "list")
	n.must(err)
	for line := range strings.Lines(out) {
		if fields := strings.Fields(line); len(fields) == 3 && fields[0] == id {
			pid, err := strconv.Atoi(fields[1])
			n.must(err)
			return pid
		}
	}
	n.Fatalf("no container %s:\n%s", id, out)
	return 0
}

func (n sluiceNode) kill(pid int) {
	n.Helper()
	if _, err := n.run("kill", "-KILL", strconv.Itoa(pid)); err != nil {
		n.Fatal(err)
	}
}

// testSandboxKilled: a pod whose pause process is killed gets a new sandbox with new addresses, and the former
// addresses become free.
func testSandboxKilled(n sluiceNode) {
	n.namespace("sandbox")
	n.server("sandbox", "web")
	before := n.endpointOf(n.ready("sandbox", "web"))
	n.kill(n.task(before.Owner.ContainerID))
	n.eventually("the pod has a new sandbox", func() error {
		var all []endpoint
		if err := n.list(&all, "endpoint", "list"); err != nil {
			return err
		}
		for _, e := range all {
			if e.Pod.Name == "web" && e.Pod.Namespace == "sandbox" && e.Owner.ContainerID != before.Owner.ContainerID {
				return nil
			}
		}
		return fmt.Errorf("%+v", all)
	})
	n.server("sandbox", "client")
	if err := n.connects(n.ready("sandbox", "client"), n.ready("sandbox", "web").address()+":8080"); err != nil {
		n.Error(err)
	}
}

// pair creates two pods, on the first and on the last node, with a policy that applies to their traffic.
func (n sluiceNode) pair() *stream {
	n.Helper()
	n.namespace("pair")
	n.policy("pair", "within", "{podSelector: {}, policyTypes: [Ingress], ingress: [{from: [{podSelector: {}}]}]}")
	n.server("pair", "client", "node1")
	n.server("pair", "web", fmt.Sprintf("node%d", n.c.Nodes()))
	return n.stream(n.ready("pair", "client"), n.ready("pair", "web"))
}

// starts creates a pod, which must become Ready without help.
func (n sluiceNode) starts(name string) {
	n.Helper()
	begin := time.Now()
	n.server("pair", name)
	p := n.ready("pair", name)
	n.Logf("pod %s was Ready after %.1f s (%s)", name, time.Since(begin).Seconds(), p.times())
}

func testContainerdKilled(n sluiceNode) {
	s := n.pair()
	pid := func() int {
		out, err := n.run("pidof", "containerd")
		if err != nil {
			return 0
		}
		pid, err := strconv.Atoi(strings.TrimSpace(out))
		n.must(err)
		return pid
	}
	before := pid()
	n.kill(before)
	n.eventually("containerd runs again", func() error {
		if after := pid(); after == 0 || after == before {
			return fmt.Errorf("its process is %d", after)
		}
		return nil
	})
	n.starts("next")
	s.unbroken("containerd killed")
}

// sluicePod returns the node's pod of the DaemonSet that is not being deleted; zero if the DaemonSet has none during an
// update.
func (n sluiceNode) sluicePod() kubePod {
	n.Helper()
	var pods struct{ Items []kubePod }
	n.must(n.c.Get(n.Context(), &pods, "pods", "--namespace=sluice-system",
		"--selector=app.kubernetes.io/name=sluice", "--field-selector=spec.nodeName="+n.name()))
	for _, p := range pods.Items {
		if p.Metadata.DeletionTimestamp == nil {
			return p
		}
	}
	return kubePod{}
}

func testContainersKilled(n sluiceNode) {
	s := n.pair()
	n.killContainers(s, func(name string) { n.starts("after-" + name) })
	s.unbroken("each container killed")
}

// killContainers kills each container of the node once: kubelet's back-off grows with each further time.
func (n sluiceNode) killContainers(s *stream, after func(container string)) {
	n.Helper()
	for _, container := range n.sluicePod().Status.ContainerStatuses {
		_, id, _ := strings.Cut(container.ContainerID, "://")
		n.kill(n.task(id))
		after(container.Name)
		n.eventually(container.Name+" runs again", func() error {
			for _, now := range n.sluicePod().Status.ContainerStatuses {
				if now.Name == container.Name && (now.RestartCount == container.RestartCount || !now.Ready) {
					return fmt.Errorf("%+v", now)
				}
			}
			return nil
		})
		s.alive()
	}
}

// testRollout replaces the pod of Sluice while other pods start.
func testRollout(n sluiceNode) {
	s := n.pair()
	end := n.attempts().begin()
	before := n.sluicePod().Metadata.UID
	n.kubectl("--namespace=sluice-system", "rollout", "restart", "daemonset/sluice")
	var names []string
	for i := 0; len(names) < 5 || n.sluicePod().Metadata.UID == before; i++ {
		names = append(names, fmt.Sprintf("during-%d", i))
		n.server("pair", names[i])
	}
	begin := time.Now()
	for _, name := range names {
		n.ready("pair", name)
	}
	n.Logf("%d pods that were made during the roll were Ready %.1f s after it", len(names), time.Since(begin).Seconds())
	n.kubectl("--namespace=sluice-system", "rollout", "status", "--timeout=3m", "daemonset/sluice")
	end("rollout restart")
	s.unbroken("rollout restart")
}

// testAPIServerAway: while the API server is unavailable, traffic and Sluice continue. Pods that wait for the API
// server start afterwards.
func testAPIServerAway(n sluiceNode) {
	s := n.pair()
	n.server("pair", "waiting") // may start before, during or after the outage
	startAPI, err := n.c.Stop("kube-apiserver")
	n.must(err)
	n.Cleanup(func() { _ = startAPI() })
	for deadline := time.Now().Add(*outage); time.Now().Before(deadline); time.Sleep(time.Second) {
		s.alive()
		if out, err := n.sluice("endpoint", "list"); err != nil {
			n.Fatalf("%v: %s", err, out)
		}
	}
	n.must(startAPI())
	n.eventually("the API answers", func() error {
		_, err := n.c.Kubectl(n.Context(), "get", "--raw=/readyz")
		return err
	})
	n.ready("pair", "waiting")
	n.starts("after")
	s.unbroken(fmt.Sprintf("the API server unavailable for %s", *outage))
}

// testEtcdAway: while etcd is unavailable, pods with known labels start. Other pods wait, and start afterwards
// without intervention.
func testEtcdAway(n sluiceNode) {
	s := n.pair()
	scale := func(to int) {
		n.kubectl("--namespace=sluice-system", "scale", "deployment/etcd-dev", fmt.Sprintf("--replicas=%d", to))
	}
	// Identities of recently used labels are remembered, so use new labels.
	fresh := fmt.Sprintf("fresh-%x", time.Now().UnixNano())
	n.namespace(fresh)
	scale(0)
	n.Cleanup(func() {
		_, _ = n.c.Kubectl(contextOf(n.TB), "--namespace=sluice-system", "scale", "deployment/etcd-dev", "--replicas=1")
	})
	n.kubectl("--namespace=sluice-system", "wait", "--for=delete", "--timeout=2m", "pod",
		"--selector=app.kubernetes.io/name=etcd-dev")
	n.starts("known-labels")
	n.server(fresh, "new-labels")
	for deadline := time.Now().Add(*outage); time.Now().Before(deadline); time.Sleep(time.Second) {
		s.alive()
		if p := n.pod(fresh, "new-labels"); p.Status.Phase != "Pending" {
			n.Fatalf("a pod with labels without an identity in etcd is %s", p.Status.Phase)
		}
	}
	scale(1)
	begin := time.Now()
	n.ready(fresh, "new-labels")
	n.Logf("a pod with new labels was Ready %.1f s after etcd was started", time.Since(begin).Seconds())
	s.unbroken(fmt.Sprintf("etcd unavailable for %s", *outage))
}
