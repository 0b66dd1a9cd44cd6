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

// TestAPIKindsThatAppearAreFoundByOneProcess runs the writer of status and a node: the
// node watches the kinds of cilium.io because the writer has published them.
func TestAPIKindsThatAppearAreFoundByOneProcess(t *testing.T) {
	a := newAPI(t)
	a.shop()
	n := newPolicyNode(t, a)
	a.do(http.MethodPost, "/api/v1/namespaces", object{"metadata": object{"name": system}})
	w := &policyNode{t: t, dir: shortDir(t)}
	writer, _ := w.run("policy", "--kubernetes-kubeconfig="+a.ready.Kubeconfig, "--kubernetes-status-write",
		"--sources-identity="+filepath.Join(n.dir, "identity.sock"))
	t.Cleanup(func() { stop(t, writer) })
	log := func(dir string, words ...string) error {
		content, err := os.ReadFile(filepath.Join(dir, "policy.log"))
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
	eventually(t, "the writer is elected", func() error { return log(w.dir, "elected") })
	eventually(t, "the node watches what there is", func() error {
		return log(n.dir, "policies are watched", "networkpolicies")
	})

	begin := time.Now()
	a.crds()
	a.do(http.MethodPost, cilium, cnp("deny", `{"endpointSelector":{"matchLabels":{"app":"db"}},"ingress":[{}]}`))
	served := time.Now()
	n.has("a policy of the new kind", "CiliumNetworkPolicy shop/deny")
	n.reaches("the policy is enforced", 80, false)
	t.Logf("the kind was served after %.1f s; its policy was in force %.1f s later",
		served.Sub(begin).Seconds(), time.Since(served).Seconds())
	if err := log(n.dir, "a kind of policy was published", "ciliumnetworkpolicies"); err != nil {
		t.Errorf("the node has found the kind by itself: %v", err)
	}
}
