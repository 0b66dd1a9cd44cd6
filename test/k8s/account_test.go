// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"strings"
)

// testAccount uses the token of Sluice's containers as a compromised process could.
func testAccount(n sluiceNode) {
	const dir = "run/secrets/kubernetes.io/serviceaccount"
	var token string
	for _, container := range n.sluicePod().Status.ContainerStatuses {
		_, id, _ := strings.Cut(container.ContainerID, "://")
		content, err := n.run("cat", fmt.Sprintf("/proc/%d/root/%s/token", n.task(id), dir))
		switch container.Name {
		case "identity", "ipam", "policy", "loadbalancer":
			n.must(err)
			token = content
		default:
			if err == nil {
				n.Errorf("%s has a token of the API", container.Name)
			}
		}
	}
	as := func(args ...string) error {
		// Without the administrator's certificate.
		all := append([]string{
			"--kubeconfig=/dev/null", "--server=https://10.200.0.1:6443", "--insecure-skip-tls-verify",
			"--token=" + strings.TrimSpace(token),
		}, args...)
		_, err := n.c.Kubectl(n.Context(), all...)
		return err
	}
	const annotate = `--patch={"metadata":{"annotations":{"node.sluice.io/pod-addresses":null}}}`
	n.apply(`{apiVersion: v1, kind: Node, metadata: {name: elsewhere}}`)
	defer n.kubectl("delete", "node", "elsewhere")
	if err := as("patch", "node", "elsewhere", annotate); err == nil || !strings.Contains(err.Error(), "may only change") {
		n.Errorf("the token patched another Node: %v", err)
	}
	n.must(as("patch", "node", "node1", annotate))
	// The patch clears an existing condition and adds none.
	n.kubectl("patch", "node", "node1", "--subresource=status", "--type=strategic",
		`--patch={"status":{"conditions":[{"type":"NetworkUnavailable","status":"True","reason":"Tried"}]}}`)
	// Use curl, because kubectl would read the status first.
	_, err := n.c.InMachine(n.Context(), "curl", "--silent", "--show-error", "--fail-with-body",
		"--insecure", "--request", "PATCH",
		"--header", "Authorization: Bearer "+strings.TrimSpace(token),
		"--header", "Content-Type: application/strategic-merge-patch+json",
		"--data", `{"status":{"conditions":[{"type":"NetworkUnavailable","status":"False","reason":"Tried"}]}}`,
		"https://10.200.0.1:6443/api/v1/nodes/node1/status")
	n.must(err)
	for what, args := range map[string][]string{
		"change of labels":  {"label", "node", "node1", "tried=yes"},
		"other annotations": {"annotate", "node", "node1", "node.sluice.io/tried=yes"},
		"a taint":           {"taint", "node", "node1", "tried=yes:NoSchedule"},
		"a finalizer":       {"patch", "node", "node1", `--patch={"metadata":{"finalizers":["tried.example/yes"]}}`},
		"its addresses": {
			"patch", "node", "node1", "--subresource=status", "--type=merge",
			`--patch={"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.1"}]}}`,
		},
		"cordon":            {"patch", "node", "node1", `--patch={"spec":{"unschedulable":true}}`},
		"reading secrets":   {"get", "secrets", "--all-namespaces"},
		"making pods":       {"run", "tried", "--image=" + image},
		"deleting policies": {"delete", "networkpolicy", "--namespace=default", "tried"},
		"changing roles":    {"create", "clusterrolebinding", "tried", "--clusterrole=cluster-admin", "--user=tried"},
	} {
		err := as(args...)
		if err == nil || !strings.Contains(err.Error(), "orbidden") && !strings.Contains(err.Error(), "denied") {
			n.Errorf("%s: %v, want a refusal", what, err)
		}
	}
	for _, kind := range []string{"pods", "namespaces", "nodes", "networkpolicies", "endpointslices"} {
		n.must(as("get", kind, "--all-namespaces"))
	}
}
