// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// testUninstall removes Sluice from the nodes as docs/install.md describes, while pods are connected, without
// removing another network's files. If there are several nodes, the state directory of the last one is a separate
// file system.
func testUninstall(nodes ...sluiceNode) {
	n := nodes[0]
	const foreign = `{"cniVersion": "1.0.0", "name": "other", "plugins": [{"type": "loopback"}]}`
	n.must(n.write(foreign, "sh", "-c", "cat >/etc/cni/net.d/10-other.conflist"))
	plugins := strings.Fields(n.look("ls", "/opt/cni/bin"))
	if !slices.Contains(plugins, "sluice-cni") || !slices.Contains(plugins, "portmap") {
		n.Fatalf("the node has the plugins %v", plugins)
	}
	if got := n.leftovers(); len(got) < 10 {
		n.Fatalf("of a running Sluice is seen only %q", got)
	}

	const mountPoint = "/var/lib/sluice"
	if last := nodes[len(nodes)-1]; len(nodes) > 1 {
		last.look("mount", "--bind", mountPoint, mountPoint)
		n.Cleanup(func() { _, _ = last.c.InNode(contextOf(n.TB), last.index, "umount", mountPoint) })
	}
	const ours = "--namespace=sluice-system"
	n.kubectl(ours, "delete", "daemonset", "sluice", "--cascade=foreground")
	n.kubectl("apply", "--kustomize=../../deploy/kubernetes/uninstall")
	n.kubectl(ours, "rollout", "status", "--timeout=2m", "daemonset/sluice-uninstall")
	n.Logf("uninstall printed\n%s", n.kubectl(ours, "logs", "daemonset/sluice-uninstall", "--container=uninstall"))
	// The pod stays Ready: the second pass has found nothing that it cannot remove.
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(time.Second) {
		var pods struct{ Items []kubePod }
		n.must(n.c.Get(n.Context(), &pods, "pods", ours, "--selector=app.kubernetes.io/name=sluice-uninstall"))
		if len(pods.Items) != len(nodes) {
			n.Fatalf("%d pods run, want one on each of %d nodes", len(pods.Items), len(nodes))
		}
		for _, p := range pods.Items {
			for _, s := range p.Status.ContainerStatuses {
				if s.RestartCount > 0 || !s.Ready {
					n.Fatalf("%s: container %s: ready %t, %d restarts", p, s.Name, s.Ready, s.RestartCount)
				}
			}
		}
	}
	n.kubectl("delete", "--kustomize=../../deploy/kubernetes/uninstall", "--wait")
	for _, cluster := range []string{"testdata/cluster", "testdata/store"} { // with another etcd, and without
		n.kubectl("delete", "--kustomize="+cluster, "--ignore-not-found", "--wait")
	}

	for i, node := range nodes {
		n.eventually("nothing of Sluice is left on "+node.name(), func() error {
			left := node.leftovers()
			if len(nodes) > 1 && i == len(nodes)-1 {
				left = slices.DeleteFunc(left, func(l string) bool { return l == "ls /var/lib: sluice" })
				left = append(left, strings.Fields(node.look("ls", "-A", mountPoint))...)
			}
			return none(left)
		})
	}
	if got := n.look("cat", "/etc/cni/net.d/10-other.conflist"); got != foreign {
		n.Errorf("the other network's configuration is %s", got)
	}
	want := slices.DeleteFunc(plugins, func(name string) bool { return name == "sluice-cni" })
	if got := strings.Fields(n.look("ls", "/opt/cni/bin")); !slices.Equal(got, want) {
		n.Errorf("the plugins are %v, want %v", got, want)
	}
	got := n.kubectl("get", "namespaces,clusterroles,clusterrolebindings,"+
		"validatingadmissionpolicies,validatingadmissionpolicybindings", "--output=name")
	if strings.Contains(got, "sluice") {
		n.Errorf("the API still has %s", got)
	}
}

// look returns the output of a command on the node.
func (n sluiceNode) look(args ...string) string {
	n.Helper()
	out, err := n.run(args...)
	n.must(err)
	return out
}

// leftovers returns the lines of the node's state that mention Sluice.
func (n sluiceNode) leftovers() (all []string) {
	n.Helper()
	for command, ours := range map[string]func(string) bool{
		"ip -oneline link": func(l string) bool { return strings.Contains(l, ": sl") },
		"ip -oneline addr show dev lo": func(l string) bool {
			return !strings.Contains(l, " 127.0.0.1/8 ") && !strings.Contains(l, " ::1/128 ")
		},
		"ip rule":                    ofSluice,
		"ip -6 rule":                 ofSluice,
		"ip route show table all":    ofSluice,
		"ip -6 route show table all": ofSluice,
		"nft list tables":            ofSluice,
		"cat /proc/mounts":           func(l string) bool { return strings.Contains(l, " /run/sluice") },
		"ls /run":                    ofSluice,
		"ls /var/lib":                func(l string) bool { return strings.TrimSpace(l) == "sluice" },
		"ls /var/log":                ofSluice,
		"ls /etc/cni/net.d":          ofSluice,
		"ls /opt/cni/bin":            ofSluice,
		"ls /sys/fs/bpf":             ofSluice,
		"ps -e -o comm=":             func(l string) bool { return strings.HasPrefix(l, "sluice") && l != "sluice-k8s\n" },
	} {
		for line := range strings.Lines(n.look(strings.Fields(command)...)) {
			if ours(line) {
				all = append(all, fmt.Sprintf("%s: %s", command, strings.TrimSpace(line)))
			}
		}
	}
	slices.Sort(all)
	return all
}

// ofSluice reports whether a line contains Sluice's name, or the number of its routes and rules in the kernel.
func ofSluice(line string) bool {
	return strings.Contains(line, "sluice") || strings.Contains(line, "proto 92")
}
