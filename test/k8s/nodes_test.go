// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"cmp"
	"context"
	"crypto/x509/pkix"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/test/k8s/cluster"
	"github.com/sluice-net/sluice/test/k8s/internal/machine"
	"github.com/sluice-net/sluice/test/k8s/internal/pki"
)

// hookPort is the node port of testWebhook.
const hookPort = nodePort + 1

// TestSluiceConnectsTwoNodes: in each routing mode, pods, services and policies work between two nodes, also after
// failures and changes of a node.
func TestSluiceConnectsTwoNodes(t *testing.T) {
	for _, mode := range []string{"overlay", "native"} {
		t.Run(mode, func(t *testing.T) {
			c := startSluiceAs(t, mode, cluster.Options{Nodes: 2, Mounts: []string{programs()}})
			for _, s := range []struct {
				name string
				run  func(sluiceNode)
			}{
				{"KindsAppear", testKindsAppear}, // the other steps create the kinds of cilium.io
				{"Traffic", testTwoNodes},
				{"Webhook", testWebhook},
				{"NodeLabels", testNodeLabels},
				{"ServiceAddresses", testServiceAddresses},
				{"ServicePolicies", testServicePolicies},
				{"ContainersKilled", testContainersKilledAcrossNodes},
				{"Rollout", testRolloutAcrossNodes},
				{"Drain", testDrain},
				{"APIServerAway", testAPIServerAway},
				{"EtcdAway", testEtcdAway},
				{"Rejoin", testRejoin},
				{"APIServerRestored", testAPIServerRestored},
			} {
				t.Run(s.name, func(t *testing.T) {
					n := sluiceNode{t, c, 0}
					begin := time.Now()
					s.run(n)
					n.kubectl("delete", "namespace", "--selector=scenario", "--ignore-not-found", "--wait")
					for i := range 2 {
						sluiceNode{t, c, i}.exact()
					}
					t.Logf("took %.1f s", time.Since(begin).Seconds())
				})
			}
			t.Run("Uninstall", func(t *testing.T) { testUninstall(sluiceNode{t, c, 0}, sluiceNode{t, c, 1}) })
		})
	}
}

// shareEtcd forwards connections from the control plane's address to the etcd of one node, which listens only on
// loopback.
func shareEtcd(t testing.TB, c *cluster.Cluster) {
	t.Helper()
	const namespace, deployment = "--namespace=sluice-system", "deployment/etcd-dev"
	if _, err := c.Kubectl(t.Context(), namespace, "rollout", "status", "--timeout=3m", deployment); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var forwarding sync.WaitGroup
	forwarding.Go(func() {
		// The port-forward ends when its pod ends.
		for ctx.Err() == nil {
			forward, err := c.KubectlCommand(ctx, namespace, "port-forward", "--address=10.200.0.1", deployment, "64715")
			if err != nil {
				t.Error(err)
				return
			}
			_ = forward.Run()                  // fails while there is no pod
			time.Sleep(500 * time.Millisecond) // a new pod takes longer than this
		}
	})
	t.Cleanup(func() {
		stop()
		forwarding.Wait()
	})
}

// serverOn makes a pod on a node that serves on port 8080.
func (n sluiceNode) serverOn(node, namespace, name string) {
	n.Helper()
	n.apply(`
apiVersion: v1
kind: Pod
metadata: {name: %[1]s, namespace: %[2]s, labels: {app: %[1]s}}
spec:
  nodeName: %[3]s
  terminationGracePeriodSeconds: 1
  containers: [{name: agnhost, image: "%[4]s", args: [netexec, --http-port=8080]}]
`, name, namespace, node, image)
}

// testTwoNodes has the clients on the first node and the server on the second.
func testTwoNodes(n sluiceNode) {
	n.namespace("shop")
	n.serverOn("node1", "shop", "client")
	n.serverOn("node1", "shop", "near")
	n.serverOn("node2", "shop", "web")
	n.apply(`
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  type: NodePort
  ipFamilyPolicy: RequireDualStack
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080, nodePort: %d}]
`, nodePort)
	client, web := n.ready("shop", "client"), n.ready("shop", "web")
	n.ready("shop", "near")
	for _, at := range web.Status.PodIPs {
		n.eventually("a pod of the other node answers", func() error {
			return n.connects(client, net.JoinHostPort(at.IP, "8080"))
		})
	}
	addresses := strings.Fields(n.kubectl("--namespace=shop", "get", "service", "web",
		"--output=jsonpath={.spec.clusterIPs[*]}"))
	if len(addresses) != 2 {
		n.Fatalf("the service has the addresses %v", addresses)
	}
	for _, address := range addresses {
		n.eventually("a service of the other node answers a pod", func() error {
			return n.connects(client, net.JoinHostPort(address, "80"))
		})
	}
	curl := func(to string) []string {
		return []string{"curl", "--silent", "--fail", "--globoff", "--max-time", "2", "http://" + to + "/hostname"}
	}
	n.eventually("a service of the other node answers the node", func() error {
		_, err := n.run(curl(net.JoinHostPort(addresses[0], "80"))...)
		return err
	})
	atNode := fmt.Sprintf("%s:%d", nodeAddress, nodePort)
	outside := func() error {
		out, err := n.c.InMachine(n.Context(), curl(atNode)...)
		if err == nil && string(out) != "web" {
			err = fmt.Errorf("%s answers", out)
		}
		return err
	}
	n.eventually("the node port of the first node leads to the second", outside)
	n.kubectl("--namespace=shop", "patch", "service", "web", `--patch={"spec":{"externalTrafficPolicy":"Local"}}`)
	n.eventually("a node without a pod does not answer, with Local", func() error {
		if outside() == nil {
			return errors.New("it does")
		}
		return nil
	})

	// Select by labels of a pod that is not on this node, directly and through the service.
	const only = "{podSelector: {matchLabels: {app: client}}, policyTypes: [Egress], egress: " +
		"[{to: [{podSelector: {matchLabels: {app: %s}}}], ports: [{port: 8080}]}]}"
	direct, through := net.JoinHostPort(web.address(), "8080"), net.JoinHostPort(addresses[0], "80")
	n.policy("shop", "to-web", fmt.Sprintf(only, "web"))
	for _, to := range []string{direct, through} {
		if err := n.connects(client, to); err != nil {
			n.Errorf("to %s, which a rule allows: %v", to, err)
		}
	}
	n.denied(client, net.JoinHostPort(n.pod("shop", "near").address(), "8080"))
	n.kubectl("--namespace=shop", "delete", "networkpolicy", "to-web")
	n.policy("shop", "to-near", fmt.Sprintf(only, "near"))
	n.denied(client, direct)
	n.denied(client, through)
}

// testWebhook makes the API server call an isolated pod. The server runs outside of both nodes, as in most clusters
// with several nodes.
func testWebhook(n sluiceNode) {
	n.kubectl("apply", "--server-side", "--kustomize=../../deploy/kubernetes/crds")
	n.namespace("hook")
	dir := n.TempDir()
	authority, err := pki.New(dir)
	n.must(err)
	n.must(authority.Issue("tls", pkix.Name{CommonName: "hook"}, nodeAddress))
	bundle, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	n.must(err)
	n.kubectl("--namespace=hook", "create", "secret", "generic", "tls",
		"--from-file="+filepath.Join(dir, "tls.crt"), "--from-file="+filepath.Join(dir, "tls.key"))
	n.apply(`
apiVersion: v1
kind: Pod
metadata: {name: hook, namespace: hook, labels: {app: hook}}
spec:
  nodeName: node1
  terminationGracePeriodSeconds: 1
  containers:
    - name: agnhost
      image: "%s"
      args: [webhook, --port=8443, --tls-cert-file=/tls/tls.crt, --tls-private-key-file=/tls/tls.key]
      volumeMounts: [{name: tls, mountPath: /tls}]
  volumes: [{name: tls, secret: {secretName: tls}}]
---
apiVersion: v1
kind: Service
metadata: {name: hook, namespace: hook}
spec:
  type: NodePort
  externalTrafficPolicy: Local
  selector: {app: hook}
  ports: [{port: 443, targetPort: 8443, nodePort: %d}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: hook}
webhooks:
  - name: hook.sluice.test
    admissionReviewVersions: [v1]
    sideEffects: None
    timeoutSeconds: 2
    failurePolicy: Fail
    namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: hook}}
    rules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]
    clientConfig: {url: "https://%s:%d/always-deny", caBundle: %s}
`, image, hookPort, nodeAddress, hookPort, base64.StdEncoding.EncodeToString(bundle))
	n.ready("hook", "hook")
	create := func(want string) func() error {
		return func() error {
			_, err := n.c.Kubectl(n.Context(), "--namespace=hook", "create", "configmap", "asked")
			if err == nil || !strings.Contains(err.Error(), want) {
				return fmt.Errorf("creating a ConfigMap: %w, want %q", err, want)
			}
			return nil
		}
	}
	const answered, silent = "this webhook denies all requests", "failed calling webhook"
	n.eventually("the API server asks the pod", create(answered))
	n.policy("hook", "isolated", "{podSelector: {}, policyTypes: [Ingress]}")
	n.eventually("the API server does not reach the pod under default deny", create(silent))
	n.apply(`
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: api, namespace: hook}
spec:
  endpointSelector: {matchLabels: {app: hook}}
  ingress: [{fromEntities: [kube-apiserver], toPorts: [{ports: [{port: "8443", protocol: TCP}]}]}]
`)
	n.eventually("the API server reaches the pod by a rule for it", create(answered))
	n.kubectl("delete", "validatingwebhookconfiguration", "hook")
}

// testNodeLabels uses rules about the second node that follow its labels.
func testNodeLabels(n sluiceNode) {
	n.kubectl("apply", "--server-side", "--kustomize=../../deploy/kubernetes/crds")
	n.namespace("pools")
	n.serverOn("node1", "pools", "web")
	n.serverOn("node1", "pools", "client")
	web, client := n.ready("pools", "web"), n.ready("pools", "client")
	second := n
	second.index = 1
	// kubelet serves on the address of its node.
	kubelet := machine.NodeAddress(1) + ":10250"
	check := func(when string, let bool) {
		n.Helper()
		for what, try := range map[string]func() error{
			"the second node reaches a pod": func() error {
				_, err := second.run("curl", "--silent", "--fail", "--max-time", "2", "http://"+web.address()+":8080/hostname")
				return err
			},
			"a pod reaches the second node": func() error { return n.connects(client, kubelet) },
		} {
			n.eventually(fmt.Sprintf("%s, %s: %t", when, what, let), func() error {
				if err := try(); (err == nil) != let {
					return fmt.Errorf("the answer is %w", cmp.Or(err, errors.New("one")))
				}
				return nil
			})
		}
	}
	check("without a policy", true)
	n.apply(`
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: from-front, namespace: pools}
spec:
  endpointSelector: {matchLabels: {app: web}}
  ingress: [{fromNodes: [{matchLabels: {pool: front}}]}]
---
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: to-front, namespace: pools}
spec:
  endpointSelector: {matchLabels: {app: client}}
  egress: [{toNodes: [{matchLabels: {pool: front}}]}]
`)
	check("with policies about another pool", false)
	n.kubectl("label", "node", "node2", "pool=front")
	check("in the pool", true)
	n.kubectl("label", "node", "node2", "pool=back", "--overwrite")
	check("in another pool", false)
	n.kubectl("label", "node", "node2", "pool-")
}

// testContainersKilledAcrossNodes kills each container of each node once.
func testContainersKilledAcrossNodes(n sluiceNode) {
	s := n.pair()
	for ; n.index < 2; n.index++ {
		n.killContainers(s, func(container string) {
			name := fmt.Sprintf("after-%s-%s", n.name(), container)
			n.serverOn(n.name(), "pair", name)
			n.ready("pair", name)
		})
	}
	s.unbroken("each container of both nodes killed")
}

// testRolloutAcrossNodes replaces the pods of Sluice while others start.
func testRolloutAcrossNodes(n sluiceNode) {
	s := n.pair()
	end := n.attempts().begin()
	n.kubectl("--namespace=sluice-system", "rollout", "restart", "daemonset/sluice")
	var names []string
	for i := range 10 {
		names = append(names, fmt.Sprintf("during-%d", i))
		n.serverOn(fmt.Sprintf("node%d", i%2+1), "pair", names[i])
	}
	n.kubectl("--namespace=sluice-system", "rollout", "status", "--timeout=3m", "daemonset/sluice")
	for _, name := range names {
		n.ready("pair", name)
	}
	client := n.ready("pair", "client")
	for _, name := range names {
		if err := n.connects(client, n.ready("pair", name).address()+":8080"); err != nil {
			n.Errorf("%s, which was made during the roll: %v", name, err)
		}
	}
	end("rollout restart on both nodes")
	s.unbroken("rollout restart on both nodes")
}

// testDrain drains the second node: only DaemonSets remain on it, and the status writers do not return.
func testDrain(n sluiceNode) {
	const writers = "--selector=app.kubernetes.io/name=sluice-status"
	n.kubectl("--namespace=sluice-system", "rollout", "status", "--timeout=2m", "deployment/sluice-status")
	n.kubectl("drain", "node2", "--ignore-daemonsets", "--force", "--delete-emptydir-data", "--timeout=2m")
	defer n.kubectl("uncordon", "node2")
	n.kubectl("--namespace=sluice-system", "rollout", "status", "--timeout=2m", "deployment/sluice-status")
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(time.Second) {
		var pods struct{ Items []kubePod }
		n.must(n.c.Get(n.Context(), &pods, "pods", "--namespace=sluice-system", writers,
			"--field-selector=spec.nodeName=node2"))
		for _, p := range pods.Items {
			if p.Metadata.DeletionTimestamp == nil {
				n.Fatalf("%s is on the node that was drained", p)
			}
		}
	}
	var pods struct{ Items []kubePod }
	n.must(n.c.Get(n.Context(), &pods, "pods", "--namespace=sluice-system", writers))
	if len(pods.Items) != 2 {
		n.Errorf("there are %d writers of status, want both on the other node", len(pods.Items))
	}
}

// testRejoin removes the second node from the cluster and adds it again with other ranges.
func testRejoin(n sluiceNode) {
	n.namespace("pair")
	ranges := func() string { return n.kubectl("get", "node", "node2", "--output=jsonpath={.spec.podCIDRs}") }
	n.serverOn("node1", "pair", "stays")
	stays := n.ready("pair", "stays")
	n.serverOn("node2", "pair", "old")
	old, before := n.ready("pair", "old"), ranges()
	n.kubectl("drain", "node2", "--ignore-daemonsets", "--force", "--delete-emptydir-data", "--timeout=2m")
	n.kubectl("delete", "node", "node2")
	second := n
	second.index = 1
	if _, err := second.run("pkill", "-KILL", "-x", "kubelet"); err != nil {
		n.Fatal(err)
	}
	n.eventually("the node is here again", func() error {
		_, err := n.c.Kubectl(n.Context(), "wait", "--for=condition=Ready", "--timeout=5s", "node/node2")
		return err
	})
	after := ranges()
	if after == before {
		n.Fatalf("the controller manager assigned the same ranges %s to the node again: the test proves nothing", after)
	}
	n.kubectl("--namespace=sluice-system", "rollout", "status", "--timeout=3m", "daemonset/sluice")
	n.serverOn("node2", "pair", "new")
	fresh := n.ready("pair", "new")
	n.eventually("a pod of the other node reaches one with an address of the new range", func() error {
		return n.connects(stays, fresh.address()+":8080")
	})
	if n.connects(stays, old.address()+":8080") == nil {
		n.Errorf("the address of %s still answers, although its node was removed", old)
	}
	n.eventually("the node has only the new ranges", func() error {
		var pools []struct{ Prefix string }
		if err := second.list(&pools, "ipam", "pools"); err != nil {
			return err
		}
		for _, p := range pools {
			if !strings.Contains(after, p.Prefix) {
				return fmt.Errorf("the pools are %+v, the Node has %s", pools, after)
			}
		}
		return nil
	})
	n.Logf("the ranges were %s and are %s", before, after)
}
