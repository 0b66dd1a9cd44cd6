// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// serviceAddresses are the service's addresses, one of each family.
var serviceAddresses = []netip.Addr{netip.MustParseAddr("10.96.7.10"), netip.MustParseAddr("fd00:96:7::10")}

const (
	servicePort = 80
	backendPort = 8080
)

// sluice runs the program against the node, and fails the test if the exit code differs.
func (n *testNode) sluice(t *testing.T, code int, stdin string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	program := filepath.Join(binDir(), "sluice")
	cmd := exec.CommandContext(ctx, program, append(args, "--instance", n.Instance())...) //nolint:gosec // ours
	cmd.Stdin = strings.NewReader(stdin)
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if got := cmd.ProcessState.ExitCode(); got != code {
		t.Fatalf("sluice %s: exit code %d (%v), want %d\n%s%s", strings.Join(args, " "), got, err, code, out, errOut.String())
	}
	return string(out)
}

// endpointOf is an endpoint of a service, with the conditions in its slice.
type endpointOf struct {
	pod.Pod
	conditions string
}

// serviceManifests returns a service with TCP and UDP, and a slice in each family with the backends, all of them
// ready.
func serviceManifests(backends ...pod.Pod) string {
	var all []endpointOf
	for _, p := range backends {
		all = append(all, endpointOf{p, "ready: true"})
	}
	return serviceWithEndpoints(all...)
}

// serviceWithEndpoints is serviceManifests with endpoints in any state.
func serviceWithEndpoints(endpoints ...endpointOf) string {
	var b strings.Builder
	fmt.Fprintf(&b, `apiVersion: v1
kind: Service
metadata: {name: web, namespace: test}
spec:
  clusterIP: %[1]s
  clusterIPs: ["%[1]s", "%[2]s"]
  ipFamilies: [IPv4, IPv6]
  ipFamilyPolicy: RequireDualStack
  selector: {app: web}
  ports:
    - {name: tcp, protocol: TCP, port: %[3]d, targetPort: %[4]d}
    - {name: udp, protocol: UDP, port: %[3]d, targetPort: %[4]d}
`, serviceAddresses[0], serviceAddresses[1], servicePort, backendPort)
	for i, family := range []string{"IPv4", "IPv6"} {
		fmt.Fprintf(&b, `---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-%s, namespace: test, labels: {kubernetes.io/service-name: web}}
addressType: %s
ports: [{name: tcp, protocol: TCP, port: %d}, {name: udp, protocol: UDP, port: %[3]d}]
endpoints:
`, strings.ToLower(family), family, backendPort)
		for _, e := range endpoints {
			fmt.Fprintf(&b, "  - {addresses: [\"%s\"], conditions: {%s}}\n", e.Addresses()[i], e.conditions)
		}
		if len(endpoints) == 0 {
			b.WriteString("  []\n")
		}
	}
	return b.String()
}

// serveName answers each connection and each datagram with the pod's name.
func serveName(t *testing.T, p pod.Pod) {
	t.Helper()
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	at := netip.AddrPortFrom(netip.IPv6Unspecified(), backendPort)
	l, err := p.Listen(at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	u, err := p.ListenPacket(at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = u.Close() })
	wg.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return // the listener was closed
			}
			_, _ = io.WriteString(c, p.Name)
			_ = c.Close()
		}
	})
	wg.Go(func() {
		buf := make([]byte, 16)
		for {
			_, sender, err := u.ReadFromUDPAddrPort(buf)
			if err != nil {
				return // the socket was closed
			}
			_, _ = u.WriteToUDPAddrPort([]byte(p.Name), sender)
		}
	})
}

// askTCP connects to a service and returns the name of the backend. The peer address of the socket must be the
// service.
func askTCP(ctx context.Context, from pod.Pod, to netip.AddrPort) (string, error) {
	c, err := from.Dial(ctx, to)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if peer := c.RemoteAddr().String(); peer != to.String() {
		return "", fmt.Errorf("connected to %s, the socket says %s", to, peer)
	}
	deadline, _ := ctx.Deadline()
	_ = c.SetDeadline(deadline)
	name, err := io.ReadAll(c)
	return string(name), err
}

// askUDP sends a datagram from an unconnected socket. The source of the answer must be the service.
func askUDP(ctx context.Context, from pod.Pod, to netip.AddrPort) (string, error) {
	unspecified := netip.IPv4Unspecified()
	if to.Addr().Is6() {
		unspecified = netip.IPv6Unspecified()
	}
	u, err := from.ListenPacket(netip.AddrPortFrom(unspecified, 0))
	if err != nil {
		return "", err
	}
	defer u.Close()
	deadline, _ := ctx.Deadline()
	_ = u.SetDeadline(deadline)
	if _, err := u.WriteToUDPAddrPort([]byte("?"), to); err != nil {
		return "", err
	}
	buf := make([]byte, 256)
	size, sender, err := u.ReadFromUDPAddrPort(buf)
	if err != nil {
		return "", err
	}
	if sender = netip.AddrPortFrom(sender.Addr().Unmap(), sender.Port()); sender != to {
		return "", fmt.Errorf("asked %s, and %s answers", to, sender)
	}
	return string(buf[:size]), nil
}

var asks = map[string]func(context.Context, pod.Pod, netip.AddrPort) (string, error){"tcp": askTCP, "udp": askUDP}

// wantBackends connects to the service in every family and protocol until all backends have answered, but at least 32
// times. No other backend may answer.
func wantBackends(t *testing.T, from pod.Pod, backends ...pod.Pod) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for _, address := range serviceAddresses {
		for protocol, ask := range asks {
			to, seen := netip.AddrPortFrom(address, servicePort), map[string]int{}
			for i := 0; i < 32 || len(seen) < len(backends) && ctx.Err() == nil; i++ {
				name, err := ask(ctx, from, to)
				if err != nil {
					t.Fatalf("%s asks %s by %s: %v, after %v", from.Name, to, protocol, err, seen)
				}
				seen[name]++
			}
			for _, b := range backends {
				if seen[b.Name] == 0 {
					t.Errorf("%s asks %s by %s: %s has not answered: %v", from.Name, to, protocol, b.Name, seen)
				}
				delete(seen, b.Name)
			}
			if len(seen) > 0 {
				t.Errorf("%s asks %s by %s: others answered: %v", from.Name, to, protocol, seen)
			}
		}
	}
}

// wantRefused requires that connecting to the service, in every family and protocol, fails as for a closed port.
func wantRefused(t *testing.T, from pod.Pod) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for _, address := range serviceAddresses {
		for protocol, ask := range asks {
			to := netip.AddrPortFrom(address, servicePort)
			if name, err := ask(ctx, from, to); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("%s asks %s by %s: %q, %v, want ECONNREFUSED", from.Name, to, protocol, name, err)
			}
		}
	}
}

// TestServiceLeadsToItsBackends: after the command line has applied the service, sockets of pods and of the node reach
// its backends, even if one of Sluice's processes is down.
func TestServiceLeadsToItsBackends(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "one", "two")
	client, one, two := pods[0], pods[1], pods[2]
	host := pod.Pod{Name: "host", Netns: n.Netns()}
	serveName(t, one)
	serveName(t, two)

	n.sluice(t, 0, serviceManifests(one, two), "service", "apply", "-f", "-")
	wantBackends(t, client, one, two)
	wantBackends(t, host, one, two)
	// A backend that connects to the service may reach itself, inside its namespace.
	wantBackends(t, one, one, two)
	out := n.sluice(t, 0, "", "service", "list")
	if !strings.Contains(out, "10.96.7.10,fd00:96:7::10") || !strings.Contains(out, " 4/4 ") {
		t.Errorf("the service is listed as\n%s", out)
	}
	n.sluice(t, 0, "", "status")

	// Reduce to one backend, then to none.
	n.sluice(t, 0, serviceManifests(two), "service", "apply", "-f", "-", "--wait-drained")
	wantBackends(t, client, two)
	n.sluice(t, 0, serviceManifests(), "service", "apply", "-f", "-", "--wait-drained")
	wantRefused(t, client)
	wantRefused(t, host)
	n.sluice(t, 0, serviceManifests(one, two), "service", "apply", "-f", "-")
	wantBackends(t, client, one, two)

	// The address of a deleted service leads nowhere.
	n.sluice(t, 0, serviceManifests(), "service", "delete", "-f", "-")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	mark := n.counters(t)
	dialed := make(chan error, 1)
	dialing, stop := context.WithCancel(ctx)
	go func() {
		_, err := askTCP(dialing, client, netip.AddrPortFrom(serviceAddresses[0], servicePort))
		dialed <- err
	}()
	n.waitForPackets(t, mark)
	stop()
	if err := <-dialed; err == nil {
		t.Error("a service that was deleted answers")
	}
}

// connectedSocket is a connected UDP socket, and the backend that answered it.
type connectedSocket struct {
	from, backend string
	conn          *net.UDPConn
	direct        bool // connected to the backend's own address
}

// connectedSockets are the connected sockets of a test.
type connectedSockets struct{ all []connectedSocket }

// open connects a socket and returns the answering backend.
func (s *connectedSockets) open(t *testing.T, from pod.Pod, to netip.AddrPort, direct bool) string {
	t.Helper()
	c, err := from.DialUDP(to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	name, err := askConnected(c)
	if err != nil {
		t.Fatalf("%s asks %s: %v", from.Name, to, err)
	}
	s.all = append(s.all, connectedSocket{from.Name, name, c, direct})
	return name
}

// openBoth connects sockets of a family to the service until several are connected to each of two backends.
func (s *connectedSockets) openBoth(t *testing.T, from pod.Pod, address netip.Addr, one, two pod.Pod) {
	t.Helper()
	to, seen := netip.AddrPortFrom(address, servicePort), map[string]int{}
	for tries := 0; tries < 500 && (seen[one.Name] < 3 || seen[two.Name] < 3); tries++ {
		seen[s.open(t, from, to, false)]++
	}
	if len(seen) != 2 {
		t.Fatalf("%s is led to %v, want both backends", from.Name, seen)
	}
}

// wantEnded requires that the sockets of a backend's service connections are ended, and that each other socket is
// answered by its backend.
func (s *connectedSockets) wantEnded(t *testing.T, when, backend string) {
	t.Helper()
	for _, c := range s.all {
		name, err := askConnected(c.conn)
		switch ended := c.backend == backend && !c.direct; {
		case ended && !errors.Is(err, unix.ECONNABORTED) && !errors.Is(err, unix.EDESTADDRREQ):
			t.Errorf("%s: the socket of %s to %s: %q, %v, want it ended", when, c.from, backend, name, err)
		case !ended && (err != nil || name != c.backend):
			t.Errorf("%s: the socket of %s to %s (itself: %t): %q, %v", when, c.from, c.backend, c.direct, name, err)
		}
	}
}

// TestConnectedUDPSocketsOfARemovedBackendAreEnded: sockets in pods and on the host are ended before `--wait-drained`
// returns. Sockets of the other backend continue, and so does a socket that was connected to the removed backend
// directly (INV-99).
func TestConnectedUDPSocketsOfARemovedBackendAreEnded(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "one", "two")
	client, one, two := pods[0], pods[1], pods[2]
	serveName(t, one)
	serveName(t, two)
	n.sluice(t, 0, serviceManifests(one, two), "service", "apply", "-f", "-")

	var sockets connectedSockets
	for i, address := range serviceAddresses {
		for _, from := range []pod.Pod{client, {Name: "host", Netns: n.Netns()}} {
			sockets.openBoth(t, from, address, one, two)
			sockets.open(t, from, netip.AddrPortFrom(one.Addresses()[i], backendPort), true)
		}
	}
	n.sluice(t, 0, serviceManifests(two), "service", "apply", "-f", "-", "--wait-drained")
	sockets.wantEnded(t, "after the removal", one.Name)
}

// TestConnectedUDPSocketsOfATerminatingBackendStay: such sockets continue while the endpoint serves, also across a
// restart of the datapath, and are ended once it no longer serves. New sockets are connected to the other backend.
func TestConnectedUDPSocketsOfATerminatingBackendStay(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "one", "two")
	client, one, two := pods[0], pods[1], pods[2]
	serveName(t, one)
	serveName(t, two)
	n.sluice(t, 0, serviceManifests(one, two), "service", "apply", "-f", "-")
	var sockets connectedSockets
	for _, address := range serviceAddresses {
		for _, from := range []pod.Pod{client, {Name: "host", Netns: n.Netns()}} {
			sockets.openBoth(t, from, address, one, two)
		}
	}

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for _, c := range []struct{ when, conditions, ended string }{
		{"while it terminates", "ready: false, serving: true, terminating: true", ""},
		{"when it serves no more", "ready: false, serving: false, terminating: true", one.Name},
	} {
		n.sluice(t, 0, serviceWithEndpoints(endpointOf{one, c.conditions}, endpointOf{two, "ready: true"}),
			"service", "apply", "-f", "-", "--wait-drained")
		sockets.wantEnded(t, c.when, c.ended)
		wantBackends(t, client, two)
		if err := errors.Join(n.Kill(ctx, devnode.Datapath), n.Start(ctx, devnode.Datapath)); err != nil {
			t.Fatal(err)
		}
		sockets.wantEnded(t, c.when+", after a restart", c.ended)
	}
	if out := n.sluice(t, 0, "", "service", "get", "test/web"); !strings.Contains(out, "; draining ") {
		t.Errorf("the service is shown as\n%s", out)
	}
	n.sluice(t, 0, serviceManifests(two), "service", "apply", "-f", "-", "--wait-drained")
	sockets.wantEnded(t, "after the removal", one.Name)
}

// askConnected sends a question over a connected datagram socket.
func askConnected(c *net.UDPConn) (string, error) {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	if _, err := c.Write([]byte("?")); err != nil {
		return "", err
	}
	buf := make([]byte, 256)
	size, err := c.Read(buf)
	return string(buf[:size]), err
}

// waitForPackets returns when the count of packets exceeds the mark.
func (n *testNode) waitForPackets(t *testing.T, mark map[datapathv1.Reason]uint64) {
	t.Helper()
	servicetest.EventuallyNil(t, "a packet is counted", func() error {
		for reason, packets := range n.counters(t) {
			if packets > mark[reason] {
				return nil
			}
		}
		return errors.New("no packet")
	})
}

// TestServiceIsServedWhileItsProcessesAreKilled: the kernel has the service, and restarted processes continue from
// its state.
func TestServiceIsServedWhileItsProcessesAreKilled(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "one", "two")
	client, one, two := pods[0], pods[1], pods[2]
	serveName(t, one)
	serveName(t, two)
	n.sluice(t, 0, serviceManifests(one, two), "service", "apply", "-f", "-")
	wantBackends(t, client, one, two)

	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	for _, killed := range [][]string{
		{devnode.LoadBalancer}, {devnode.Datapath}, {devnode.LoadBalancer, devnode.Datapath},
	} {
		for _, service := range killed {
			if err := n.Kill(ctx, service); err != nil {
				t.Fatal(err)
			}
		}
		wantBackends(t, client, one, two)
		for _, service := range killed {
			if err := n.Start(ctx, service); err != nil {
				t.Fatal(err)
			}
		}
		wantBackends(t, client, one, two)
	}
	// Both processes work with each other again.
	n.sluice(t, 0, serviceManifests(one), "service", "apply", "-f", "-", "--wait-drained")
	wantBackends(t, client, one)
	if out := n.sluice(t, 0, "", "map", "dump", "sl_ns"); strings.Count(out, "\n") < 4 {
		t.Errorf("the namespaces of the node and of three pods are\n%s", out)
	}
}

// TestPolicySeesTheBackendOfAService: a policy that denies a pod also denies connections to it through the service,
// and the service's other backend answers (INV-98).
func TestPolicySeesTheBackendOfAService(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "one", "two")
	client, one, two := pods[0], pods[1], pods[2]
	serveName(t, one)
	serveName(t, two)
	n.sluice(t, 0, serviceManifests(one, two), "service", "apply", "-f", "-")
	wantBackends(t, client, one, two)
	enforce(t, n.policies(t), `apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: closed}
spec: {podSelector: {matchLabels: {app: two}}, policyTypes: [Ingress]}
`)
	flows := n.observe(t, &datapathv1.ObserveRequest{})
	for _, address := range serviceAddresses {
		source, _ := sameFamily(client, address)
		denied, _ := sameFamily(two, address)
		n.wantDeniedBackend(t, flows, client, netip.AddrPortFrom(address, servicePort), one.Name,
			func(f *datapathv1.Flow) bool {
				return f.GetVerdict() == datapathv1.Verdict_VERDICT_DROPPED && f.GetReason() == policyDenied &&
					isFlow(f, source, denied, backendPort)
			})
	}
}

// wantDeniedBackend connects to a service repeatedly until the datapath reports the expected drop. Until then only
// one backend may answer.
func (n *testNode) wantDeniedBackend(t *testing.T, flows *flowLog, from pod.Pod, to netip.AddrPort, answers string,
	match func(*datapathv1.Flow) bool,
) {
	t.Helper()
	type answer struct {
		name string
		err  error
	}
	answered := 0
	for found := false; !found || answered == 0; {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		mark, result := flows.mark(), make(chan answer, 1)
		go func() {
			name, err := askTCP(ctx, from, to)
			result <- answer{name, err}
		}()
		dropped := func() error {
			for _, f := range flows.since(mark) {
				if match(f) {
					return nil
				}
			}
			return errors.New("no such drop")
		}
		var got *answer
		servicetest.EventuallyNil(t, fmt.Sprintf("%s is answered at %s, or a packet is dropped", from.Name, to),
			func() error {
				select {
				case a := <-result:
					got = &a
					return nil
				default:
					return dropped()
				}
			})
		cancel()
		switch {
		case got == nil:
			found = true
			if a := <-result; a.err == nil {
				t.Fatalf("%s: %s answers although a packet was dropped", to, a.name)
			}
		case got.err != nil || got.name != answers:
			t.Fatalf("%s: %q answers (%v), want %q or a drop", to, got.name, got.err, answers)
		default:
			answered++
		}
	}
}

// TestExplainKnowsServices: `sluice explain` evaluates the backends of the service with an address, with the rules
// that apply to its packets, and reports when no backend is left.
func TestExplainKnowsServices(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "one", "two")
	client, one, two := pods[0], pods[1], pods[2]
	serveName(t, one)
	serveName(t, two)
	n.sluice(t, 0, serviceManifests(one, two), "service", "apply", "-f", "-")
	n.wantExplainedConnection(t, client, netip.AddrPortFrom(serviceAddresses[1], servicePort))
	enforce(t, n.policies(t), `apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: out}
spec:
  podSelector: {matchLabels: {app: client}}
  policyTypes: [Egress]
  egress: [{to: [{podSelector: {}}], ports: [{port: 8080}]}]
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: in}
spec:
  podSelector: {matchLabels: {app: one}}
  policyTypes: [Ingress]
  ingress: [{from: [{podSelector: {matchLabels: {app: client}}}]}]
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: closed}
spec: {podSelector: {matchLabels: {app: two}}, policyTypes: [Ingress]}
`)
	for i, address := range serviceAddresses {
		ask := func(from, address string, port int, want ...string) {
			t.Helper()
			out := n.sluice(t, 0, "", "explain", "--from", from, "--to", address, "--port", fmt.Sprint(port))
			text := strings.Join(strings.Fields(out), " ")
			for _, w := range want {
				if !strings.Contains(text, w) {
					t.Errorf("from %s to %s: no %q in\n%s", from, address, w, out)
				}
			}
		}
		backend := func(p pod.Pod) string { return netip.AddrPortFrom(p.Addresses()[i], backendPort).String() }
		own := client.Addresses()[i].String()
		frontend := netip.AddrPortFrom(address, servicePort).String() + "/TCP, cluster-ip"
		ask(own, address.String(), servicePort, ": DEPENDS ON THE BACKEND", "Service test/web, port tcp",
			"Frontend "+frontend, "Backends 2, for connections from this node",
			backend(one)+": FORWARDED (forwarded-to-pod) egress forwarded by NetworkPolicy test/out spec.egress[0]"+
				" ingress forwarded by NetworkPolicy test/in spec.ingress[0]",
			backend(two)+": DROPPED (policy-denied) egress forwarded by NetworkPolicy test/out spec.egress[0]"+
				" ingress dropped by NetworkPolicy test/closed isolation")
		// A connection of a pod through the service to itself is not evaluated by a policy.
		ask(two.Addresses()[i].String(), address.String(), servicePort, backend(two)+": FORWARDED inside the pod")
	}
	n.sluice(t, 0, serviceManifests(), "service", "apply", "-f", "-")
	own, address := client.Addresses()[0].String(), serviceAddresses[0].String()
	out := n.sluice(t, 0, "", "explain", "--from", own, "--to", address, "--port", fmt.Sprint(servicePort))
	if !strings.Contains(out, ": REFUSED (no backend)") || !strings.Contains(out, "refused: no backend") {
		t.Errorf("without a backend\n%s", out)
	}
	n.sluice(t, 0, serviceManifests(), "service", "delete", "-f", "-")
	out = n.sluice(t, 0, "", "explain", "--from", own, "--to", address, "--port", fmt.Sprint(servicePort))
	if strings.Contains(out, "Service") || !strings.Contains(out, ": DROPPED (policy-denied)") {
		t.Errorf("without the service\n%s", out)
	}
}

// wantExplainedConnection connects to a service and requires that `sluice explain` finds the connection with its
// backend.
func (n *testNode) wantExplainedConnection(t *testing.T, from pod.Pod, to netip.AddrPort) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := from.Dial(ctx, to)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	own := c.LocalAddr().(*net.TCPAddr).AddrPort()
	out := n.sluice(t, 0, "", "explain", "--from", own.Addr().String(), "--to", to.Addr().String(),
		"--port", fmt.Sprint(to.Port()), "--source-port", fmt.Sprint(own.Port()))
	found := regexp.MustCompile(`(?m)^Connection: (\S+) -> \S+:(\d+) tcp, `).FindAllStringSubmatch(out, -1)
	if len(found) != 1 || found[0][1] != own.String() || found[0][2] != fmt.Sprint(backendPort) {
		t.Errorf("the connection from %v is not found in\n%s", own, out)
	}
}
