// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"time"
)

// control stops the API server and its etcd, calls f, and starts both again.
func (n sluiceNode) control(f func()) {
	n.Helper()
	var start []func() error
	for _, program := range []string{"kube-apiserver", "etcd"} {
		again, err := n.c.Stop(program)
		n.must(err)
		start = append([]func() error{again}, start...)
	}
	f()
	for _, again := range start {
		n.must(again())
	}
	n.eventually("the API answers", func() error {
		_, err := n.c.Kubectl(n.Context(), "get", "--raw=/readyz")
		return err
	})
}

// inMachine runs a command with the mounts of the control plane.
func (n sluiceNode) inMachine(args ...string) {
	n.Helper()
	command, err := n.c.MachineCommand(n.Context(), args...)
	n.must(err)
	if out, err := command.CombinedOutput(); err != nil {
		n.Fatalf("%v: %v: %s", args, err, out)
	}
}

// testAPIServerRestored restores the API's etcd from a copy. Policies and Services that are newer than the copy are
// removed on every node, and older objects stay enforced, also after the revision of the restored etcd exceeds the
// revision before the restore.
func testAPIServerRestored(n sluiceNode) {
	last := fmt.Sprintf("node%d", n.c.Nodes())
	n.namespace("restored")
	n.serverOn("node1", "restored", "client")
	for _, name := range []string{"hp", "web"} {
		n.serverOn(last, "restored", name)
	}
	client, hp, web := n.ready("restored", "client"), n.ready("restored", "hp"), n.ready("restored", "web")
	at := func(p kubePod) string { return net.JoinHostPort(p.address(), "8080") }
	only := func(app string) string {
		return "{podSelector: {matchLabels: {app: " + app + "}}, policyTypes: [Ingress], ingress: []}"
	}
	allowed := func(what string, to kubePod) {
		n.Helper()
		n.eventually(what, func() error { return n.connects(client, at(to)) })
	}
	refused := func(what string, to kubePod) {
		n.Helper()
		n.eventually(what, func() error {
			if n.connects(client, at(to)) == nil {
				return errors.New("it connects")
			}
			return nil
		})
	}
	n.policy("restored", "old-deny", only("hp"))
	n.kubectl("--namespace=restored", "create", "configmap", "any")
	refused("before the copy", hp)
	allowed("before the copy", web)

	data, copied := filepath.Join(n.c.Dir(), "etcd"), filepath.Join(n.c.Dir(), "etcd-copy")
	n.control(func() { n.inMachine("cp", "-a", data, copied) })
	for i := range 30 { // more than the API server writes at its start
		n.kubectl("--namespace=restored", "patch", "configmap", "any", fmt.Sprintf(`--patch={"data":{"v":"%d"}}`, i))
	}
	n.kubectl("--namespace=restored", "delete", "networkpolicy", "old-deny")
	n.policy("restored", "new-deny", only("web"))
	n.apply(`
apiVersion: v1
kind: Service
metadata: {name: late, namespace: restored}
spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
`)
	allowed("after the copy", hp)
	refused("after the copy", web)
	// Change an object that each process follows: a bookmark would take a minute.
	n.kubectl("--namespace=restored", "annotate", "pods", "--all", "seen=yes")
	n.kubectl("annotate", "nodes", "--all", "seen=yes")

	n.control(func() {
		n.inMachine("sh", "-c", fmt.Sprintf("rm -rf %[1]s/* && cp -a %[2]s/. %[1]s/ && rm -rf %[2]s", data, copied))
	})
	// Kubernetes does not notice a restore, so restart its controllers.
	for _, program := range []string{"kube-controller-manager", "kube-scheduler"} {
		again, err := n.c.Stop(program)
		n.must(err)
		n.must(again())
	}
	for i := range n.c.Nodes() {
		if _, err := (sluiceNode{n.TB, n.c, i}).run("pkill", "-KILL", "-x", "kubelet"); err != nil {
			n.Fatal(err)
		}
	}
	restored := func(what string) {
		n.Helper()
		refused(what, hp)
		allowed(what, web)
		for i := range n.c.Nodes() {
			node := sluiceNode{n.TB, n.c, i}
			n.eventually(what+": the policies of "+node.name(), func() error {
				out, err := node.sluice("policy", "list")
				if err == nil && (strings.Contains(out, "new-deny") || !strings.Contains(out, "old-deny")) {
					err = errors.New(out)
				}
				return err
			})
			n.eventually(what+": the services of "+node.name(), func() error {
				out, err := node.sluice("service", "list")
				if err == nil && strings.Contains(out, "restored/late") {
					err = errors.New(out)
				}
				return err
			})
			n.eventually(what+": the status of "+node.name(), func() error {
				out, err := node.sluice("status")
				if err == nil && strings.Contains(out, "listed again") {
					err = errors.New(out)
				}
				return err
			})
		}
	}
	restored("after the restore")
	for i := range 100 {
		n.kubectl("--namespace=restored", "patch", "configmap", "any", fmt.Sprintf(`--patch={"data":{"v":"again-%d"}}`, i))
	}
	restored("the former revision was passed")
}

// testKindsAppear creates the kinds of cilium.io: a policy of these kinds is enforced within seconds on every node.
func testKindsAppear(n sluiceNode) {
	last := fmt.Sprintf("node%d", n.c.Nodes())
	n.namespace("kinds")
	n.serverOn("node1", "kinds", "client")
	n.serverOn(last, "kinds", "web")
	client, web := n.ready("kinds", "client"), n.ready("kinds", "web")
	to := net.JoinHostPort(web.address(), "8080")
	n.eventually("without policies", func() error { return n.connects(client, to) })
	n.kubectl("create", "--kustomize=../../deploy/kubernetes/crds")
	defer n.kubectl("delete", "--kustomize=../../deploy/kubernetes/crds", "--wait")
	n.eventually("the kind is served", func() error {
		_, err := n.c.Kubectl(n.Context(), "get", "ciliumnetworkpolicies", "--all-namespaces")
		return err
	})
	begin := time.Now()
	n.apply(`
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: deny, namespace: kinds}
spec: {endpointSelector: {matchLabels: {app: web}}, ingress: [{}]}
`)
	n.eventually("the policy is enforced", func() error {
		if n.connects(client, to) == nil {
			return errors.New("it connects")
		}
		return nil
	})
	n.Logf("a policy of a kind that was just created was enforced after %.1f s", time.Since(begin).Seconds())
}
