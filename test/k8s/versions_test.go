// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/test/k8s/cluster"
)

// TestNodesOfTwoVersions upgrades one of two nodes from the images and manifests of an earlier version in the
// checkout SLUICE_OLD_NODES (scripts/test-k8s-upgrade), then the other node, downgrades both, and upgrades them in
// the other order. Connections between the nodes survive, and at each step pods of both nodes communicate under
// policies and through services.
func TestNodesOfTwoVersions(t *testing.T) {
	old := os.Getenv("SLUICE_OLD_NODES")
	if old == "" {
		t.Fatal("SLUICE_OLD_NODES is not set: see make test-k8s-upgrade")
	}
	var images []string
	for _, name := range []string{"sluice", "sluice-devetcd"} {
		images = append(images, filepath.Join(os.Getenv("SLUICE_BIN"), "images", name+"-"+runtime.GOARCH+".tar"),
			filepath.Join(old, "upgrade", name+"-earlier.tar"))
	}
	c := start(t, cluster.Options{NoCNI: true, Nodes: 2, Mounts: []string{programs()}, Images: images})
	v := versions{sluiceNode{t, c, 0}, filepath.Join(old, "upgrade")}
	v.kubectl("apply", "--kustomize="+v.earlier)
	shareEtcd(t, c)
	v.kubectl("--namespace=sluice-system", "wait", "--for=condition=Ready", "--timeout=3m", "pod",
		"--selector=app.kubernetes.io/name=sluice")
	v.kubectl("wait", "--for=condition=Ready", "--timeout=2m", "node", "--all")
	v.kubectl("--namespace=kube-system", "rollout", "status", "--timeout=2m", "deployment/coredns")

	s := v.pair()
	back := v.stream(v.ready("pair", "web"), v.ready("pair", "client"))
	v.shop()
	for i, step := range []struct {
		name, kustomization, node string
		same                      bool // afterwards both nodes have the same version
	}{
		{"the first node to this version", "testdata/versions", "node1", false},
		{"the second one, too", "testdata/versions", "node2", true},
		{"the first node back", v.earlier, "node1", false},
		{"the second one back", v.earlier, "node2", false},
		{"the second node to this version", "testdata/versions", "node2", false},
		{"the first one, too", "testdata/versions", "node1", true},
	} {
		v.replace(step.kustomization, step.node)
		s.alive()
		back.alive()
		v.talk(fmt.Sprintf("of-%d", i))
		if step.same {
			for index := range 2 {
				sluiceNode{t, c, index}.exact()
			}
		}
		t.Logf("%s: done", step.name)
	}
	s.unbroken("each node upgraded, taken back and upgraded again")
	back.unbroken("the other way")
}

// versions is a cluster of two nodes, each with one of two versions.
type versions struct {
	sluiceNode

	earlier string // kustomization
}

// replace applies a version, and replaces the pod of Sluice on one node.
func (v versions) replace(kustomization, node string) {
	v.Helper()
	v.kubectl("apply", "--kustomize="+kustomization)
	for _, what := range []string{"deployment/etcd-dev", "deployment/sluice-status"} {
		v.kubectl("--namespace=sluice-system", "rollout", "status", "--timeout=3m", what)
	}
	v.kubectl("--namespace=sluice-system", "delete", "pod", "--selector=app.kubernetes.io/name=sluice",
		"--field-selector=spec.nodeName="+node)
	v.eventually("the new pod is ready on "+node, func() error {
		var pods struct{ Items []kubePod }
		if err := v.c.Get(v.Context(), &pods, "pods", "--namespace=sluice-system",
			"--selector=app.kubernetes.io/name=sluice", "--field-selector=spec.nodeName="+node); err != nil {
			return err
		}
		if len(pods.Items) != 1 || pods.Items[0].Metadata.DeletionTimestamp != nil {
			return fmt.Errorf("%d pods", len(pods.Items))
		}
		for _, condition := range pods.Items[0].Status.Conditions {
			if condition.Type == "Ready" && condition.Status == "True" {
				return nil
			}
		}
		return fmt.Errorf("it is not Ready: %+v", pods.Items[0].Status)
	})
}

// shop creates a server on each node that only pods with a label can reach, on one port.
func (v versions) shop() {
	v.Helper()
	v.namespace("shop")
	for _, node := range []string{"node1", "node2"} {
		v.serverOn(node, "shop", "server-"+node)
		v.apply(`
apiVersion: v1
kind: Service
metadata: {name: server-%[1]s, namespace: shop}
spec:
  ipFamilyPolicy: RequireDualStack
  selector: {app: server-%[1]s}
  ports: [{port: 80, targetPort: 8080}]
`, node)
		v.ready("shop", "server-"+node)
	}
	v.policy("shop", "servers", "{podSelector: {matchExpressions: [{key: app, operator: In, values: "+
		"[server-node1, server-node2]}]}, policyTypes: [Ingress], ingress: [{from: [{podSelector: {matchLabels: "+
		"{access: granted}}}], ports: [{port: 8080}]}]}")
}

// talk creates two pods on each node, one with the label and one without. They connect to the servers on both nodes
// by address and by service, in both families.
func (v versions) talk(name string) {
	v.Helper()
	type try struct {
		from kubePod
		to   []string
	}
	var granted, others []try
	for _, node := range []string{"node1", "node2"} {
		allowed, other := name+"-"+node, name+"-other-"+node
		v.serverOn(node, "shop", allowed)
		v.serverOn(node, "shop", other)
		v.kubectl("--namespace=shop", "label", "pod", allowed, "access=granted")
		var to []string
		for _, at := range []string{"node1", "node2"} {
			for _, a := range v.pod("shop", "server-"+at).Status.PodIPs {
				to = append(to, net.JoinHostPort(a.IP, "8080"))
			}
			for a := range strings.FieldsSeq(v.kubectl("--namespace=shop", "get", "service", "server-"+at,
				"--output=jsonpath={.spec.clusterIPs[*]}")) {
				to = append(to, net.JoinHostPort(a, "80"))
			}
		}
		granted = append(granted, try{v.ready("shop", allowed), to})
		others = append(others, try{v.ready("shop", other), to})
	}
	for _, t := range granted {
		for _, to := range t.to {
			v.eventually(fmt.Sprintf("%s reaches %s", t.from, to), func() error { return v.connects(t.from, to) })
		}
	}
	for _, t := range others {
		for _, to := range t.to {
			v.denied(t.from, to)
		}
		// The label applies on the other node, whatever its version.
		v.kubectl("--namespace=shop", "label", "pod", t.from.Metadata.Name, "access=granted")
		for _, to := range t.to {
			v.eventually(fmt.Sprintf("%s, which has the label now, reaches %s", t.from, to), func() error {
				return v.connects(t.from, to)
			})
		}
		v.kubectl("--namespace=shop", "delete", "pod", t.from.Metadata.Name)
	}
	for _, t := range granted {
		v.kubectl("--namespace=shop", "delete", "pod", t.from.Metadata.Name)
	}
}
