// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/test/k8s/cluster"
	"github.com/sluice-net/sluice/test/k8s/internal/machine"
)

// prober continuously connects to the node ports of a Deployment, as an external load balancer does: to the second
// node if the first does not answer.
type prober struct {
	stop func()

	mu                    sync.Mutex
	asked, again, failed  int           // guarded by mu
	failures              []string      // guarded by mu
	silent, longestSilent time.Duration // guarded by mu; time without an answer
}

func (n sluiceNode) askPorts(ports ...string) *prober {
	p, end := &prober{}, make(chan struct{})
	ask := func(at string) error {
		_, err := n.c.InMachine(n.Context(), "curl", "--silent", "--fail", "--max-time", "1", "http://"+at+"/hostname")
		return err
	}
	for _, at := range ports {
		n.eventually("kube-proxy leads "+at+" to the pods", func() error { return ask(at) })
	}
	var asking sync.WaitGroup
	asking.Go(func() {
		last := time.Now()
		for {
			select {
			case <-end:
				return
			case <-time.After(50 * time.Millisecond):
			}
			var second error
			first := ask(ports[0])
			if first != nil {
				second = ask(ports[1])
			}
			p.mu.Lock()
			p.asked++
			switch {
			case first == nil:
				last = time.Now()
			case second == nil:
				p.again++
				last = time.Now()
			default:
				p.failed++
				p.failures = append(p.failures, fmt.Sprintf("%s: %v; %v", time.Now().Format(time.StampMilli), first, second))
			}
			p.longestSilent = max(p.longestSilent, time.Since(last))
			p.mu.Unlock()
		}
	})
	p.stop = sync.OnceFunc(func() {
		close(end)
		asking.Wait()
	})
	n.Cleanup(p.stop)
	return p
}

// TestMigration: a cluster is migrated from the reference plugins and kube-proxy to Sluice, node by node. A Deployment
// answers throughout, pods of both networks reach each other, and existing policies are enforced on a node once it has
// been migrated.
func TestMigration(t *testing.T) {
	var images []string
	for _, name := range []string{"sluice", "sluice-devetcd"} {
		images = append(images, filepath.Join(os.Getenv("SLUICE_BIN"), "images", name+"-"+runtime.GOARCH+".tar"))
	}
	c := start(t, cluster.Options{Nodes: 2, Mounts: []string{programs()}, Images: images})
	n := sluiceNode{t, c, 0}
	n.kubectl("apply", "--server-side", "--kustomize=../../deploy/kubernetes/crds")
	n.namespace("shop")
	n.apply(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: shop}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 5
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector: {matchLabels: {app: web}}
      containers:
        - name: agnhost
          image: "%s"
          args: [netexec, --http-port=8080, --delay-shutdown=3]
          readinessProbe: {httpGet: {port: 8080, path: /hostname}, periodSeconds: 1}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: web, namespace: shop}
spec: {minAvailable: 1, selector: {matchLabels: {app: web}}}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {type: NodePort, selector: {app: web}, ports: [{port: 80, targetPort: 8080, nodePort: %d}]}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: db, namespace: shop}
spec:
  podSelector: {matchLabels: {app: db}}
  policyTypes: [Ingress]
  ingress:
    - from: [{podSelector: {matchLabels: {app: friend}}}]
    - from: [{ipBlock: {cidr: 10.244.0.0/16}}] # pods of the other network, meanwhile
---
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: vault, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: vault}}
  ingress: [{fromEndpoints: [{matchLabels: {app: friend}}]}]
`, image, nodePort)
	n.kubectl("--namespace=shop", "rollout", "status", "--timeout=2m", "deployment/web")
	var ports []string
	for i := range 2 {
		ports = append(ports, fmt.Sprintf("%s:%d", machine.NodeAddress(i), nodePort))
	}
	p := n.askPorts(ports...)

	n.kubectl("apply", "--kustomize=testdata/migrate")
	shareEtcd(t, c)
	for i := range 2 {
		m := n
		m.index = i
		m.migrate()
		m.serverOn(m.name(), "shop", "db")
		m.ready("shop", "db")
		m.serverOn(m.name(), "shop", "friend")
		m.serverOn(fmt.Sprintf("node%d", 2-i), "shop", "peer")
		db, friend, peer := m.ready("shop", "db"), m.ready("shop", "friend"), m.ready("shop", "peer")
		m.eventually("pods of both nodes reach each other", func() error {
			return errors.Join(m.connects(friend, peer.address()+":8080"), m.connects(peer, friend.address()+":8080"),
				m.connects(friend, db.address()+":8080"), m.connects(peer, db.address()+":8080"))
		})
		m.kubectl("--namespace=shop", "delete", "pod", "db", "friend", "peer", "--wait")
	}
	// The previous network leaves its routes, and the masquerade exception for its pods.
	for i := range 2 {
		m := n
		m.index = i
		for family, pods := range map[string]string{"-4": "10.244.0.0/16", "-6": "fd00:244::/48"} {
			if out, err := m.run("ip", family, "route", "flush", "root", pods, "proto", "boot"); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		}
	}
	n.kubectl("--namespace=shop", "patch", "networkpolicy", "db", "--type=json",
		`--patch=[{"op":"remove","path":"/spec/ingress/1"}]`)
	for _, app := range []string{"db", "vault"} {
		n.serverOn("node2", "shop", app)
	}
	n.serverOn("node1", "shop", "friend")
	n.serverOn("node1", "shop", "stranger")
	friend, stranger := n.ready("shop", "friend"), n.ready("shop", "stranger")
	for _, app := range []string{"db", "vault"} {
		to := n.ready("shop", app).address() + ":8080"
		n.eventually("a friend reaches "+app, func() error { return n.connects(friend, to) })
		n.denied(stranger, to)
	}
	p.stop()
	t.Logf("%d requests, of which %d went to the second node and %d to none; the longest time without an answer was %s",
		p.asked, p.again, p.failed, p.longestSilent.Round(time.Millisecond))
	if p.failed > 0 || p.asked < 100 {
		t.Errorf("%d of %d requests were answered by no node:\n%s", p.failed, p.asked, strings.Join(p.failures, "\n"))
	}
	for i := range 2 {
		sluiceNode{t, c, i}.exact()
	}
}

// migrate moves a node from its previous network to Sluice.
func (n sluiceNode) migrate() {
	n.Helper()
	begin := time.Now()
	n.kubectl("drain", n.name(), "--ignore-daemonsets", "--force", "--delete-emptydir-data", "--timeout=3m",
		"--pod-selector=app.kubernetes.io/name!=etcd-dev")
	const file = "/etc/cni/net.d/10-reference.conflist"
	if _, err := n.run("mv", file, file+".disabled"); err != nil {
		n.Fatal(err)
	}
	n.kubectl("label", "node", n.name(), "network=sluice")
	n.eventually("the node has its pod of Sluice", func() error {
		_, err := n.c.Kubectl(n.Context(), "--namespace=sluice-system", "wait", "--for=condition=Ready", "--timeout=5s",
			"pod", "--selector=app.kubernetes.io/name=sluice", "--field-selector=spec.nodeName="+n.name())
		return err
	})
	n.kubectl("wait", "--for=condition=Ready", "--timeout=1m", "node/"+n.name())
	n.kubectl("uncordon", n.name())
	n.Logf("%s was migrated in %.1f s, from %s on", n.name(), time.Since(begin).Seconds(), begin.Format(time.StampMilli))
}
