// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/probetest"
	"github.com/sluice-net/sluice/test/k8s/internal/machine"
)

// Ports of attempts. Each way has its own number, and so its own backend port: two connections from one client port to
// two addresses with the same backend port would conflict.
const (
	attemptPort     = 9100  // of the servers and of the Services
	attemptNodePort = 30100 // lowest node port
)

// attempts begins connections in every way.
type attempts struct {
	n       sluiceNode
	targets []probetest.Target
	ports   int // numbers in use
}

// attempts prepares connections by TCP and UDP of both families to a pod of the last node. The pods of pair must exist.
// The machine outside of the cluster connects to node ports and to a load balancer's address. The nodes connect to the
// pod. The pod "client" of pair connects to cluster IPs, to both pods and to the machine. The sockets of the test are
// not in the cgroup of a node: Sluice translates each packet, and the nodes themselves cannot connect to cluster IPs.
func (n sluiceNode) attempts() *attempts {
	n.Helper()
	const namespace = "asked"
	n.namespace(namespace)
	n.serverOn(fmt.Sprintf("node%d", n.c.Nodes()), namespace, "open")
	client, open := n.ready("pair", "client"), n.ready(namespace, "open")
	outside, err := n.c.MachinePID()
	n.must(err)
	a := &attempts{n: n}
	machineNetns, podNetns := fmt.Sprintf("/proc/%d/ns/net", outside), n.netns(client)
	type host struct{ netns, address, address6 string }
	var hosts []host
	for i := range n.c.Nodes() {
		pid, err := n.c.NodePID(i)
		n.must(err)
		hosts = append(hosts, host{
			fmt.Sprintf("/proc/%d/ns/net", pid), machine.NodeAddress(i), fmt.Sprintf("fd00:200::%d", 11+i),
		})
	}
	clusterIPs := strings.Fields(a.service(namespace, "open", 2*len(hosts)+4))
	balancers := []string{balancerAddress, balancerAddress6}
	n.via(0, balancers...)

	openNetns := n.netns(open)
	direct, isolated := addressesOf(open), n.ready("pair", "web")
	for i, h := range hosts {
		a.add(fmt.Sprintf("machine to the node port of node %d", i+1), machineNetns, openNetns, h.address, h.address6)
		a.add(fmt.Sprintf("node %d to the pod", i+1), h.netns, openNetns, direct...)
	}
	a.add("machine to the load balancer's address", machineNetns, openNetns, balancers...)
	a.add("pod to the cluster IP", podNetns, openNetns, clusterIPs...)
	a.add("pod to the pod", podNetns, openNetns, direct...)
	a.add("pod to the isolated pod", podNetns, n.netns(isolated), addressesOf(isolated)...)
	a.add("pod to the machine", podNetns, machineNetns, machineAddress, machineAddress6)
	n.eventually("every target answers", func() error { return probetest.Reach(n.Context(), a.targets...) })
	return a
}

func addressesOf(p kubePod) (all []string) {
	for _, a := range p.Status.PodIPs {
		all = append(all, a.IP)
	}
	return all
}

// service makes a Service of the pods of an application with a number of ports, and returns its cluster IPs.
func (a *attempts) service(namespace, app string, ports int) string {
	a.n.Helper()
	var b strings.Builder
	for i := range ports {
		for _, protocol := range []string{"TCP", "UDP"} {
			fmt.Fprintf(&b, "\n    - {name: %s-%d, protocol: %s, port: %[4]d, targetPort: %[4]d, nodePort: %[5]d}",
				strings.ToLower(protocol), i, protocol, attemptPort+i, attemptNodePort+i)
		}
	}
	a.n.apply(`
apiVersion: v1
kind: Service
metadata: {name: %s, namespace: %s}
spec:
  type: LoadBalancer
  loadBalancerClass: example.com/by-hand
  ipFamilyPolicy: RequireDualStack
  selector: {app: %s}
  ports:%s
`, app, namespace, app, b.String())
	a.n.patch(namespace, app, fmt.Sprintf(`{"status":{"loadBalancer":{"ingress":[{"ip":%q},{"ip":%q}]}}}`,
		balancerAddress, balancerAddress6), "--subresource=status")
	return a.n.kubectl("--namespace="+namespace, "get", "service", app, "--output=jsonpath={.spec.clusterIPs[*]}")
}

// add serves the next port in the network namespace of a server, and adds targets at addresses of it. Addresses of a
// node mean the node port with the same number.
func (a *attempts) add(name, from, server string, to ...string) {
	a.n.Helper()
	port := attemptPort + a.ports
	a.serve(server, port)
	if strings.Contains(name, "node port") {
		port = attemptNodePort + a.ports
	}
	a.ports++
	for _, address := range to {
		at := netip.AddrPortFrom(netip.MustParseAddr(address), uint16(port))
		for _, udp := range []bool{false, true} {
			protocol := "TCP"
			if udp {
				protocol = "UDP"
			}
			a.targets = append(a.targets, probetest.Target{
				Name: fmt.Sprintf("%s %s by %s", name, at, protocol), Netns: from, UDP: udp, To: []netip.AddrPort{at},
			})
		}
	}
}

// serve accepts connections, which the client ends, and returns datagrams.
func (a *attempts) serve(netns string, port int) {
	a.n.Helper()
	var l net.Listener
	var u *net.UDPConn
	a.n.must(inNetns(netns, func() (err error) {
		if l, err = net.Listen("tcp", fmt.Sprintf(":%d", port)); err != nil {
			return err
		}
		u, err = net.ListenUDP("udp", &net.UDPAddr{Port: port})
		return err
	}))
	a.n.Cleanup(func() { _ = errors.Join(l.Close(), u.Close()) })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(io.Discard, c)
				_ = c.Close()
			}()
		}
	}()
	go func() {
		message := make([]byte, 64)
		for {
			size, from, err := u.ReadFromUDPAddrPort(message)
			if err != nil {
				return
			}
			_, _ = u.WriteToUDPAddrPort(message[:size], from)
		}
	}()
}

// begin makes an attempt at each target every 100 ms until the returned function is called. No attempt may fail.
func (a *attempts) begin() (end func(during string)) {
	a.n.Helper()
	p, err := probetest.Start(100*time.Millisecond, probetest.Patience, a.targets...)
	a.n.must(err)
	stop := sync.OnceValue(p.Stop)
	a.n.Cleanup(func() { _ = stop() })
	p.Wait(a.n.Context(), 4)
	return func(during string) {
		a.n.Helper()
		p.Wait(a.n.Context(), 4)
		tried, failed := 0, 0
		for _, r := range stop() {
			tried, failed = tried+r.Tried, failed+len(r.Failed)
			if len(r.Failed) > 0 {
				a.n.Errorf("%s: %s: %d of %d attempts failed, the first %v", during, r.Name, len(r.Failed), r.Tried, r.Failed[0])
			}
		}
		a.n.Logf("%s: %d of %d new connections failed, in %d ways", during, failed, tried, len(a.targets))
		if failed > 0 {
			out, err := a.n.sluice("observe", "--verdict", "dropped", "--last", "30")
			a.n.Logf("the last packets that were dropped, %v:\n%s", err, out)
		}
	}
}
