// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"net"
	"strings"
)

// Addresses at which other machines connect to a node port.
const (
	nodeAddress = "10.200.0.11"
	nodePort    = 30080
)

// testServices without kube-proxy, for every kind of client, and with a policy that applies to the answering pod.
func testServices(n sluiceNode) {
	n.namespace("shop")
	for _, name := range []string{"web-0", "web-1"} {
		n.server("shop", name)
		n.kubectl("--namespace=shop", "label", "pod", name, "app=web")
	}
	n.server("shop", "client")
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
	client := n.ready("shop", "client")
	for _, name := range []string{"web-0", "web-1"} {
		n.ready("shop", name)
	}
	addresses := strings.Fields(n.kubectl("--namespace=shop", "get", "service", "web",
		"--output=jsonpath={.spec.clusterIPs[*]}"))
	if len(addresses) != 2 {
		n.Fatalf("the service has the addresses %v", addresses)
	}
	clients := map[string]func(to, path string) (string, error){
		"a pod":           func(to, path string) (string, error) { return n.dial(client, to, path) },
		"the node":        func(to, path string) (string, error) { return n.run(curlOf(to, path)...) },
		"another machine": n.machine,
	}
	atNode := fmt.Sprintf("%s:%d", nodeAddress, nodePort)
	// Both pods answer eventually, because each connection selects one.
	both := func(who, to string) {
		n.Helper()
		seen := map[string]int{}
		n.eventually(fmt.Sprintf("both pods answer %s at %s", who, to), func() error {
			name, err := clients[who](to, "/hostname")
			if seen[name]++; err != nil {
				return err
			}
			if seen["web-0"] == 0 || seen["web-1"] == 0 {
				return fmt.Errorf("answers %v", seen)
			}
			return nil
		})
	}
	for _, address := range addresses {
		both("a pod", net.JoinHostPort(address, "80"))
		both("the node", net.JoinHostPort(address, "80"))
	}
	for who := range clients {
		both(who, atNode)
	}

	// The pod sees the client's address if its node may not forward the connection.
	n.kubectl("--namespace=shop", "patch", "service", "web", `--patch={"spec":{"externalTrafficPolicy":"Local"}}`)
	n.eventually("the pod sees the machine that asks", func() error {
		ip, err := clients["another machine"](atNode, "/clientip")
		if err == nil && (!strings.HasPrefix(ip, "10.200.0.") || strings.HasPrefix(ip, nodeAddress+":")) {
			err = fmt.Errorf("it sees %s", ip)
		}
		return err
	})

	// The policy applies to the pod, not to the Service address.
	const only = "{podSelector: {}, policyTypes: [Egress], egress: " +
		"[{to: [{podSelector: {matchLabels: {app: %s}}}], ports: [{port: 8080}]}]}"
	n.policy("shop", "to-web", fmt.Sprintf(only, "web"))
	if err := n.connects(client, addresses[0]+":80"); err != nil {
		n.Errorf("a rule for the pods of a service does not allow its address: %v", err)
	}
	n.kubectl("--namespace=shop", "delete", "networkpolicy", "to-web")
	n.policy("shop", "to-db", fmt.Sprintf(only, "db"))
	n.denied(client, addresses[0]+":80")
	n.kubectl("--namespace=shop", "delete", "networkpolicy", "to-db")

	// Without a pod, the service refuses connections.
	n.kubectl("--namespace=shop", "label", "pod", "--selector=app=web", "app-")
	n.eventually("a service without pods refuses", func() error {
		if err := n.connects(client, addresses[0]+":80"); err == nil || !strings.Contains(err.Error(), "REFUSED") {
			return fmt.Errorf("%v, want REFUSED", err)
		}
		return nil
	})
}
