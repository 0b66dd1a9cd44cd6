// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/test/k8s/cluster"
)

// TestSluiceConnectsTwoNodes by a tunnel and by routes: pods, services and policies.
func TestSluiceConnectsTwoNodes(t *testing.T) {
	for _, mode := range []string{"overlay", "native"} {
		t.Run(mode, func(t *testing.T) {
			c := startSluiceAs(t, mode, cluster.Options{Nodes: 2, Mounts: []string{programs()}})
			testTwoNodes(sluiceNode{t, c, 0})
		})
	}
}

// shareEtcd leads from the address of the control plane to the etcd of one node, which
// listens on loopback alone.
func shareEtcd(t testing.TB, c *cluster.Cluster) {
	t.Helper()
	const namespace, deployment = "--namespace=sluice-system", "deployment/etcd-dev"
	if _, err := c.Kubectl(t.Context(), namespace, "rollout", "status", "--timeout=3m", deployment); err != nil {
		t.Fatal(err)
	}
	forward, err := c.KubectlCommand(t.Context(), namespace, "port-forward", "--address=10.200.0.1", deployment, "64715")
	if err == nil {
		err = forward.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = forward.Process.Kill()
		_ = forward.Wait()
	})
}

// serverOn makes a pod on a node that answers at port 8080.
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

	// By labels of a pod that this node does not have, directly and through the service.
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
