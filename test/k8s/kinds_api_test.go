// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestAPIKindsThatAppearAreFoundByOneProcess runs a controller and a node: the node watches the kinds of cilium.io
// after the controller has published them.
func TestAPIKindsThatAppearAreFoundByOneProcess(t *testing.T) {
	a := newAPI(t)
	a.shop()
	n := newPolicyNode(t, a)
	a.do(http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": system}})
	w := &policyNode{t: t, dir: shortDir(t)}
	controller, _ := w.run("controller", "--kubernetes-kubeconfig="+a.ready.Kubeconfig,
		"--identity="+filepath.Join(n.dir, "identity.sock"))
	t.Cleanup(func() { stop(t, controller) })
	log := func(file string, words ...string) error {
		content, err := os.ReadFile(file)
		if err != nil {
			return err
		}
	lines:
		for line := range strings.Lines(string(content)) {
			for _, word := range words {
				if !strings.Contains(line, word) {
					continue lines
				}
			}
			return nil
		}
		return fmt.Errorf("the log has no line with %q", words)
	}
	controllerLog := filepath.Join(w.dir, "controller.log")
	eventually(t, "the controller is elected", func() error { return log(controllerLog, "elected") })
	nodeLog := filepath.Join(n.dir, "policy.log")
	eventually(t, "the node watches the existing kinds", func() error {
		return log(nodeLog, "policies are watched", "networkpolicies")
	})

	begin := time.Now()
	a.crds()
	a.do(http.MethodPost, cilium, cnp("deny", `{"endpointSelector":{"matchLabels":{"app":"db"}},"ingress":[{}]}`))
	served := time.Now()
	n.has("a policy of the new kind", "CiliumNetworkPolicy shop/deny")
	n.reaches("the policy is enforced", 80, false)
	t.Logf("the kind was served after %.1f s; its policy was enforced %.1f s later",
		served.Sub(begin).Seconds(), time.Since(served).Seconds())
	if err := log(nodeLog, "a kind of policy was published", "ciliumnetworkpolicies"); err != nil {
		t.Errorf("the node has found the kind by itself: %v", err)
	}
}
