// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Addresses of the machine outside of the cluster, and addresses that Services get in this test.
const (
	machineAddress, machineAddress6   = "10.200.0.1", "fd00:200::1"
	balancerAddress, balancerAddress6 = "192.0.2.10", "2001:db8::10"
	externalAddress                   = "203.0.113.10" // from the prefix that testdata allows
	proxyAddress                      = "192.0.2.20"
)

// curlOf returns a command that requests a path from a server.
func curlOf(to, path string) []string {
	return []string{"curl", "--silent", "--fail", "--globoff", "--max-time", "2", "http://" + to + path}
}

// dial requests a path from another server in a server's pod on the node, whose image has no curl.
func (n sluiceNode) dial(from kubePod, to, path string) (string, error) {
	host, port, err := net.SplitHostPort(to)
	if err != nil {
		return "", err
	}
	ask := url.Values{
		"host": {host}, "port": {port}, "request": {strings.TrimPrefix(path, "/")}, "protocol": {"http"}, "tries": {"1"},
	}
	out, err := n.run(curlOf(from.address()+":8080", "/dial?"+ask.Encode())...)
	if err != nil {
		return "", err
	}
	var answer struct{ Responses, Errors []string }
	if err := json.Unmarshal([]byte(out), &answer); err != nil || len(answer.Responses) != 1 {
		return "", fmt.Errorf("%s: %w", out, cmp.Or(err, errors.New("no answer")))
	}
	return answer.Responses[0], nil
}

// machine requests a path from the machine outside of the cluster.
func (n sluiceNode) machine(to, path string) (string, error) {
	out, err := n.c.InMachine(n.Context(), curlOf(to, path)...)
	return string(out), err
}

// via adds routes to the addresses, with a node as the gateway, on the machine outside of the cluster. The end of the
// test removes them.
func (n sluiceNode) via(node int, addresses ...string) {
	n.Helper()
	for _, a := range addresses {
		gateway := fmt.Sprintf("10.200.0.%d", 11+node)
		if strings.Contains(a, ":") {
			gateway = fmt.Sprintf("fd00:200::%d", 11+node)
		}
		_, err := n.c.InMachine(n.Context(), "ip", "route", "replace", a, "via", gateway)
		n.must(err)
		n.Cleanup(func() { _, _ = n.c.InMachine(contextOf(n), "ip", "route", "del", a) })
	}
}

// answers waits until each of the named servers has answered a request. Since the first of them did, no other server
// may have answered.
func (n sluiceNode) answers(what string, ask func() (string, error), want ...string) {
	n.Helper()
	missing := map[string]bool{}
	anew := func() {
		for _, w := range want {
			missing[w] = true
		}
	}
	anew()
	n.eventually(what, func() error {
		got, err := ask()
		if err != nil {
			return err
		}
		if delete(missing, got); !slices.Contains(want, got) {
			anew() // a change was not enforced yet
			return fmt.Errorf("%q answers, want %q", got, want)
		}
		if len(missing) > 0 {
			return fmt.Errorf("%v did not answer yet", missing)
		}
		return nil
	})
}

// silent waits until a request gets no answer.
func (n sluiceNode) silent(what string, ask func() (string, error)) {
	n.Helper()
	n.eventually(what, func() error {
		if got, err := ask(); err == nil {
			return fmt.Errorf("%q answers", got)
		}
		return nil
	})
}

// patch changes a service.
func (n sluiceNode) patch(namespace, name, patch string, args ...string) {
	n.Helper()
	n.kubectl(append([]string{
		"--namespace=" + namespace, "patch", "service", name, "--type=merge", "--patch=" + patch,
	}, args...)...)
}

// testServiceAddresses connects from another machine to the addresses of a Service other than its cluster IPs, via a
// node with a pod of the Service and via a node without one. Pods connect to all addresses. The test writes the
// status, as a load balancer controller does.
func testServiceAddresses(n sluiceNode) {
	n.namespace("lb")
	n.serverOn("node1", "lb", "client")
	n.serverOn("node2", "lb", "far")
	n.apply(`
apiVersion: v1
kind: Service
metadata: {name: lb, namespace: lb}
spec:
  type: LoadBalancer
  loadBalancerClass: example.com/by-hand
  allocateLoadBalancerNodePorts: false
  ipFamilyPolicy: RequireDualStack
  externalIPs: [%s]
  selector: {app: far}
  ports: [{port: 80, targetPort: 8080}]
`, externalAddress)
	client := n.ready("lb", "client")
	n.ready("lb", "far")
	ingress := func(entries string) {
		n.Helper()
		n.patch("lb", "lb", `{"status":{"loadBalancer":{"ingress":[`+entries+`]}}}`, "--subresource=status")
	}
	ingress(fmt.Sprintf(`{"ip":%q},{"ip":%q}`, balancerAddress, balancerAddress6))
	addresses := []string{balancerAddress, balancerAddress6}
	balancers := []string{net.JoinHostPort(balancerAddress, "80"), net.JoinHostPort(balancerAddress6, "80")}
	external := net.JoinHostPort(externalAddress, "80")
	ask := func(to, path string) func() (string, error) {
		return func() (string, error) { return n.machine(to, path) }
	}
	all := append(balancers, external)

	// Policy Cluster: each node forwards to the pod, which may be on the other node.
	for node := range 2 {
		n.via(node, append(addresses, externalAddress)...)
		for _, to := range all {
			n.answers(fmt.Sprintf("%s by node %d, Cluster", to, node+1), ask(to, "/hostname"), "far")
		}
	}
	for _, to := range all {
		n.answers("a pod at "+to, func() (string, error) { return n.dial(client, to, "/hostname") }, "far")
		n.answers("the node at "+to, func() (string, error) { return n.run(curlOf(to, "/hostname")...) }, "far")
	}

	// Policy Local: only the pod's node answers, and the pod sees the machine's address.
	n.patch("lb", "lb", `{"spec":{"externalTrafficPolicy":"Local"}}`)
	for i, to := range all {
		n.eventually(to+" shows the pod the machine, Local", func() error {
			got, err := n.machine(to, "/clientip")
			host, _, _ := net.SplitHostPort(got)
			if err == nil && host != []string{machineAddress, machineAddress6, machineAddress}[i] {
				err = fmt.Errorf("it sees %s", got)
			}
			return err
		})
		// The policy does not apply inside the cluster.
		n.answers("a pod of the other node at "+to+", Local", func() (string, error) {
			return n.dial(client, to, "/hostname")
		}, "far")
	}
	port := n.kubectl("--namespace=lb", "get", "service", "lb", "--output=jsonpath={.spec.healthCheckNodePort}")
	n.answers("the health check of the node with the pod", func() (string, error) {
		_, err := n.machine("10.200.0.12:"+port, "/healthz")
		return "healthy", err
	}, "healthy")
	n.silent("the health check of the node without", ask("10.200.0.11:"+port, "/healthz"))
	n.via(0, append(addresses, externalAddress)...)
	for _, to := range all {
		n.silent(to+" by a node without a pod, Local", ask(to, "/hostname"))
	}
	n.patch("lb", "lb", `{"spec":{"externalTrafficPolicy":"Cluster"}}`)

	// Source ranges apply only to load balancer addresses.
	n.patch("lb", "lb", `{"spec":{"loadBalancerSourceRanges":["198.51.100.0/24","10.244.0.0/16","fd00:244::/48"]}}`)
	for _, to := range balancers {
		n.silent(to+" for a machine outside of the ranges", ask(to, "/hostname"))
		n.answers("a pod in the ranges at "+to, func() (string, error) { return n.dial(client, to, "/hostname") }, "far")
	}
	n.answers(external+" has no ranges", ask(external, "/hostname"), "far")
	n.patch("lb", "lb", fmt.Sprintf(
		`{"spec":{"loadBalancerSourceRanges":["%s/32","%s/128"]}}`, machineAddress, machineAddress6))
	for _, to := range balancers {
		n.answers(to+" for a machine in the ranges", ask(to, "/hostname"), "far")
		n.silent("a pod outside of the ranges at "+to, func() (string, error) { return n.dial(client, to, "/hostname") })
	}
	n.patch("lb", "lb", `{"spec":{"loadBalancerSourceRanges":null}}`)

	// ipMode Proxy: connections from inside the cluster go to the load balancer instead of bypassing it.
	n.balancer()
	proxy := net.JoinHostPort(proxyAddress, "80")
	inside := map[string]func() (string, error){
		"a pod at " + proxy:    func() (string, error) { return n.dial(client, proxy, "/hostname") },
		"the node at " + proxy: func() (string, error) { return n.run(curlOf(proxy, "/hostname")...) },
	}
	for _, mode := range []struct{ name, answers string }{{"VIP", "far"}, {"Proxy", "balancer"}, {"VIP", "far"}} {
		ingress(fmt.Sprintf(`{"ip":%q,"ipMode":%q}`, proxyAddress, mode.name))
		for what, ask := range inside {
			n.answers(what+", ipMode "+mode.name, ask, mode.answers)
		}
	}
	n.silent("a removed address of the service", ask(balancers[0], "/hostname"))
}

// balancer answers at the proxy's address, as a load balancer on a separate machine does.
func (n sluiceNode) balancer() {
	n.Helper()
	pid, err := os.ReadFile(filepath.Join(n.c.Dir(), "machine.pid"))
	n.must(err)
	_, err = n.c.InMachine(n.Context(), "ip", "address", "replace", proxyAddress+"/32", "dev", "lo")
	n.must(err)
	var l net.Listener
	n.must(inNetns(fmt.Sprintf("/proc/%s/ns/net", strings.TrimSpace(string(pid))), func() (err error) {
		l, err = net.Listen("tcp", net.JoinHostPort(proxyAddress, "80"))
		return err
	}))
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(
		func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("balancer")) },
	)}
	done := make(chan struct{})
	go func() { _ = server.Serve(l); close(done) }()
	n.Cleanup(func() {
		_ = server.Close()
		<-done
		_, _ = n.c.InMachine(contextOf(n), "ip", "address", "del", proxyAddress+"/32", "dev", "lo")
	})
}

// testServicePolicies uses a Service with a pod on each node.
func testServicePolicies(n sluiceNode) {
	n.namespace("policies")
	n.serverOn("node1", "policies", "client")
	for i, name := range []string{"near", "far"} {
		n.serverOn(fmt.Sprintf("node%d", i+1), "policies", name)
		n.kubectl("--namespace=policies", "label", "pod", name, "tier=web")
	}
	n.apply(`
apiVersion: v1
kind: Service
metadata: {name: web, namespace: policies}
spec:
  type: NodePort
  selector: {tier: web}
  ports: [{port: 80, targetPort: 8080, nodePort: %d}]
`, nodePort)
	client := n.ready("policies", "client")
	n.ready("policies", "near")
	n.ready("policies", "far")
	service := n.kubectl("--namespace=policies", "get", "service", "web", "--output=jsonpath={.spec.clusterIP}") + ":80"
	atNode := fmt.Sprintf("%s:%d", nodeAddress, nodePort)
	inside := func() (string, error) { return n.dial(client, service, "/hostname") }
	outside := func() (string, error) { return n.machine(atNode, "/hostname") }
	n.answers("a pod at the service", inside, "near", "far")
	n.answers("another machine at a node port", outside, "near", "far")

	// A client keeps its backend, whichever node it is on.
	n.patch("policies", "web", `{"spec":{"sessionAffinity":"ClientIP"}}`)
	for who, ask := range map[string]func() (string, error){"a pod": inside, "another machine": outside} {
		n.eventually(who+" keeps its backend", func() error {
			first, err := ask()
			for range 20 {
				next, failed := ask()
				if err = errors.Join(err, failed); err != nil {
					return err
				}
				if next != first {
					return fmt.Errorf("%s answers after %s", next, first)
				}
			}
			return nil
		})
	}
	n.patch("policies", "web", `{"spec":{"sessionAffinity":"None"}}`)
	n.answers("a pod without affinity", inside, "near", "far")

	// internalTrafficPolicy: Local applies to the pods and the host of each node.
	n.patch("policies", "web", `{"spec":{"internalTrafficPolicy":"Local"}}`)
	for i, name := range []string{"near", "far"} {
		at := n
		at.index = i
		n.answers(fmt.Sprintf("node %d with a pod of its own, Local", i+1), func() (string, error) {
			return at.run(curlOf(service, "/hostname")...)
		}, name)
	}
	only := func(want string) {
		n.Helper()
		n.eventually("only "+want+" answers", func() error {
			for range 20 {
				if got, err := inside(); err != nil || got != want {
					return fmt.Errorf("%s answers, %w", got, err)
				}
			}
			return nil
		})
	}
	only("near")
	n.kubectl("--namespace=policies", "label", "pod", "near", "tier-")
	n.silent("a node without a pod of its own, Local", inside)
	n.answers("the node port uses all backends again", outside, "far")
	n.patch("policies", "web", `{"spec":{"internalTrafficPolicy":"Cluster"}}`)
	only("far")
}
