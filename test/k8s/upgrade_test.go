// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/sluice-net/sluice/test/k8s/cluster"
)

// TestClusterIsUpgraded upgrades a cluster from an earlier version to this version, downgrades it, and upgrades it
// again. The images and manifests of the earlier version are in the checkout SLUICE_OLD (scripts/test-k8s-upgrade). A
// TCP connection must survive, and pods that are created during each step must start.
func TestClusterIsUpgraded(t *testing.T) {
	old := os.Getenv("SLUICE_OLD")
	if old == "" {
		t.Fatal("SLUICE_OLD is not set: see make test-k8s-upgrade")
	}
	var images []string
	for _, name := range []string{"sluice", "sluice-devetcd"} {
		images = append(images, filepath.Join(os.Getenv("SLUICE_BIN"), "images", name+"-"+runtime.GOARCH+".tar"),
			filepath.Join(old, "upgrade", name+"-earlier.tar"))
	}
	c := start(t, cluster.Options{NoCNI: true, Mounts: []string{programs()}, Images: images})
	n := sluiceNode{t, c, 0}
	apply := func(kustomization string) {
		n.Helper()
		n.kubectl("apply", "--kustomize="+kustomization)
		for _, what := range []string{"deployment/etcd-dev", "daemonset/sluice"} {
			n.kubectl("--namespace=sluice-system", "rollout", "status", "--timeout=3m", what)
		}
	}
	earlier := filepath.Join(old, "upgrade")
	apply(earlier)
	n.kubectl("wait", "--for=condition=Ready", "--timeout=2m", "node", "--all")
	n.kubectl("--namespace=kube-system", "rollout", "status", "--timeout=2m", "deployment/coredns")
	s := n.pair()
	client := n.ready("pair", "client")
	for i, step := range []struct{ name, kustomization string }{
		{"to this version", "testdata/cluster"}, {"back", earlier}, {"to this version again", "testdata/cluster"},
	} {
		// Delete an object that exists only in one of the versions.
		n.kubectl("--namespace=sluice-system", "delete", "deployment", "sluice-status", "--ignore-not-found")
		var during []string
		for j := range 3 {
			during = append(during, fmt.Sprintf("during-%d-%d", i, j))
		}
		n.kubectl("apply", "--kustomize="+step.kustomization)
		for _, name := range during {
			n.server("pair", name)
		}
		apply(step.kustomization)
		for _, name := range during {
			p := n.ready("pair", name)
			if err := n.connects(client, p.address()+":8080"); err != nil {
				t.Errorf("%s: %s, which was made meanwhile: %v", step.name, name, err)
			}
		}
		s.alive()
		if step.kustomization != earlier {
			n.exact()
		}
		t.Logf("%s: done", step.name)
	}
	s.unbroken("upgraded, back, and upgraded again")
}
