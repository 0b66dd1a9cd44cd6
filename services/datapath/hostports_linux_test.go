// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	rpcclient "github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	loadbalancerv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/client"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/record"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/sockets"
	"github.com/sluice-net/sluice/services/datapath/internal/service/translation"
)

// Addresses of the node on its uplink.
var (
	uplink4 = netip.MustParseAddr("192.0.2.1")
	uplink6 = netip.MustParseAddr("2001:db8::1")
)

// newServiceWorld creates a node with addresses that translates services. No load balancer sends frontends.
func newServiceWorld(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	w.frontends, w.cgroup = silentBalancer{}, kerneltest.NewCgroup(t)
	w.start(false)
	t.Cleanup(func() {
		if err := sockets.Detach(w.config().BPFDir); err != nil {
			t.Error(err)
		}
	})
	w.outside()
	if err := w.node.Node.Host.SyncAddrs(); err != nil {
		t.Fatal(err)
	}
	return w
}

// hostPort returns the mapping of a host port to a port of a pod.
func hostPort(hostIP netip.Addr, port uint16, p workload.Protocol, to uint16) endpoint.PortMapping {
	return endpoint.PortMapping{HostIP: hostIP, HostPort: port, Protocol: p, ContainerPort: to}
}

// podWithPorts creates a pod with host ports.
func (w *world) podWithPorts(name string, ms ...endpoint.PortMapping) *pod {
	w.t.Helper()
	return w.podWith(name, func(s *endpoint.Spec) { s.PortMappings = ms })
}

// attachedSockets waits until the socket programs are attached.
func (w *world) attachedSockets() {
	w.t.Helper()
	select {
	case <-w.node.Services.Attached():
	case <-time.After(patience):
		w.t.Fatal("the socket programs are not attached")
	}
}

// asks fails unless every TCP address is reached from the namespace.
func asks(t *testing.T, when string, from *netns.Namespace, to ...netip.AddrPort) {
	t.Helper()
	for _, at := range to {
		if err := talk(from, at, patience); err != nil {
			t.Errorf("%s: %v is not reached: %v", when, at, err)
		}
	}
}

// hostPorts returns the host port frontends in the kernel with their backends.
func (w *world) hostPorts() (lines []string) {
	w.t.Helper()
	fs, err := w.node.Kernel.Services.List()
	if err != nil {
		w.t.Fatal(err)
	}
	for _, f := range fs {
		if f.Kind == frontend.HostPort {
			lines = append(lines, fmt.Sprintf("%v of %s to %v and %v", f.Key, f.Service, f.Inside.Backends[0].AddrPort,
				f.Outside.Backends[0].AddrPort))
		}
	}
	return lines
}

// TestKernelHostPortsLeadToTheirPod connects to host ports from the node and from its pods, without sluice-loadbalancer
// and across a restart, until the pod is deleted.
func TestKernelHostPortsLeadToTheirPod(t *testing.T) {
	w := newServiceWorld(t)
	web := w.podWithPorts("web",
		hostPort(netip.Addr{}, 8080, workload.TCP, 80), hostPort(netip.Addr{}, 8080, workload.UDP, 53))
	one := w.podWithPorts("one", hostPort(uplink4, 8080, workload.TCP, 80))
	asker := w.pod("asker")
	plain := w.podWith("plain", func(s *endpoint.Spec) { s.LeaveSockets = true })
	w.attachedSockets()
	v4, v6 := web.spec.Addrs[0], web.spec.Addrs[1]
	web.echoAt(netip.AddrPortFrom(v4, 80))
	web.echoAt(netip.AddrPortFrom(v6, 80))
	udp := web.listen("udp", netip.AddrPortFrom(v4, 53).String()).(net.PacketConn)
	t.Cleanup(func() { udp.Close() })
	node4 := netip.AddrPortFrom(w.node.Ranges.NodeAddrs()[0], 8080)
	node6 := netip.AddrPortFrom(uplink6, 8080)
	local := netip.MustParseAddrPort("127.0.0.1:8080")
	works := func(when string) {
		t.Helper()
		asks(t, when+", from the node", w.home, node4, node6, local, netip.MustParseAddrPort("[::1]:8080"))
		asks(t, when+", from a pod", asker.ns, node4, node6)
		asks(t, when+", from a pod by packets", plain.ns, node4, node6)
		// Nothing listens in the pod that has the host port on one address only.
		for _, from := range []*netns.Namespace{w.home, asker.ns, plain.ns} {
			err := talk(from, netip.AddrPortFrom(uplink4, 8080), patience)
			if !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("%s: the host port on one address reaches another pod: %v", when, err)
			}
		}
		if err := talk(asker.ns, local, patience); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s: to the loopback address inside a pod: %v", when, err)
		}
	}
	works("at first")
	want := []string{
		fmt.Sprintf("0.0.0.0:8080/tcp of web/eth0 to %[1]v:80 and %[1]v:80", v4),
		fmt.Sprintf("0.0.0.0:8080/udp of web/eth0 to %[1]v:53 and %[1]v:53", v4),
		fmt.Sprintf("192.0.2.1:8080/tcp of one/eth0 to %[1]v:80 and %[1]v:80", one.spec.Addrs[0]),
		fmt.Sprintf("[::]:8080/tcp of web/eth0 to [%[1]v]:80 and [%[1]v]:80", v6),
		fmt.Sprintf("[::]:8080/udp of web/eth0 to [%[1]v]:53 and [%[1]v]:53", v6),
	}
	if got := w.hostPorts(); !slices.Equal(got, want) {
		t.Errorf("host ports\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if findings, err := w.node.Kernel.Services.Audit(false); len(findings) > 0 || err != nil {
		t.Errorf("audit: %q, %v", findings, err)
	}

	w.stop()
	asks(t, "without the datapath", w.home, node4, node6)
	asks(t, "without the datapath", asker.ns, node4, node6)
	w.start(false)
	works("after a restart")
	if got := w.hostPorts(); !slices.Equal(got, want) {
		t.Errorf("after a restart: host ports\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	w.attachedSockets()

	// A connected UDP socket must not keep sending to an address that another pod may get.
	c := w.dial(w.home, "udp", netip.MustParseAddrPort("192.0.2.1:8080"))
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if n, _, err := udp.ReadFrom(make([]byte, 8)); n != 1 || err != nil {
		t.Fatalf("the pod receives %d bytes, %v", n, err)
	}
	w.del(web)
	if got := w.hostPorts(); !slices.Equal(got, want[2:3]) {
		t.Errorf("after the deletion of web: host ports %q, want %q", got, want[2:3])
	}
	if err := talk(w.home, node4, patience); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("to a released host port: %v, want connection refused", err)
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 8)); !errors.Is(err, unix.ECONNABORTED) {
		t.Errorf("read from a connected socket: %v, want that the socket was ended", err)
	}
	// The port can be used again immediately, without a restart.
	again := w.podWithPorts("again", hostPort(netip.Addr{}, 8080, workload.TCP, 80))
	again.echoAt(netip.AddrPortFrom(again.spec.Addrs[0], 80))
	asks(t, "by another pod", w.home, node4)
	asks(t, "of another pod", asker.ns, node4)
}

// TestKernelHostPortsAreRefusedThatAreTaken requests host ports that another pod or the node uses, and host ports while
// services are off.
func TestKernelHostPortsAreRefusedThatAreTaken(t *testing.T) {
	w := newServiceWorld(t)
	w.podWithPorts("web", hostPort(netip.Addr{}, 8080, workload.TCP, 80))
	before := len(w.node.Endpoints.Report.List())
	refused := func(name string, is error, text string, m endpoint.PortMapping) {
		t.Helper()
		s := w.spec(name, w.home) // the request is refused before the namespace matters
		s.PortMappings = []endpoint.PortMapping{m}
		s.Netns = pathOf(w.pod(name + "-ns").ns)
		before++
		for _, validateOnly := range []bool{true, false} {
			_, err := w.node.Endpoints.Lifecycle.Create(t.Context(), s, validateOnly)
			if !errors.Is(err, is) || !strings.Contains(err.Error(), text) {
				t.Errorf("%s: %v, want %v with %q", name, err, is, text)
			}
		}
		if n := len(w.node.Endpoints.Report.List()); n != before {
			t.Errorf("%s: %d endpoints, want %d", name, n, before)
		}
	}
	refused("taken", endpoint.ErrHostPort, "by endpoint web/eth0", hostPort(netip.Addr{}, 8080, workload.TCP, 80))
	refused("tunnel", endpoint.ErrInvalid, "between nodes", hostPort(netip.Addr{}, 4789, workload.UDP, 80))
	refused("foreign", endpoint.ErrInvalid, "not an address of this node",
		hostPort(netip.MustParseAddr("198.51.100.1"), 8080, workload.TCP, 80))
	if lines := w.hostPortWarnings(); len(lines) > 0 {
		t.Errorf("warnings %q", lines)
	}

	w.stop()
	w.frontends, w.cgroup = nil, ""
	w.start(false)
	if lines := w.hostPortWarnings(); len(lines) != 1 || !strings.Contains(lines[0], "web/eth0") {
		t.Errorf("with services off: warnings %q, want one about web", lines)
	}
	refused("off", endpoint.ErrLoadBalancingOff, "loadBalancing.mode is off",
		hostPort(netip.Addr{}, 8081, workload.TCP, 80))
}

// TestKernelHostPortsAndServicesKeepTheirPorts applies a complete listing of sluice-loadbalancer, which must not remove
// host ports. A node port cannot take the port of a host port, and gets it when it becomes free.
func TestKernelHostPortsAndServicesKeepTheirPorts(t *testing.T) {
	w := newWorld(t)
	socket := filepath.Join(t.TempDir(), "lb.sock")
	b := &balancer{heard: make(chan *loadbalancerv1.WatchFrontendsRequest)}
	nodePort := &loadbalancerv1.Frontend{
		Key: &loadbalancerv1.FrontendKey{
			Family: loadbalancerv1.IPFamily_IP_FAMILY_IPV4, Port: 30080, Protocol: netv1.Protocol_PROTOCOL_TCP,
		},
		Kind: loadbalancerv1.FrontendKind_FRONTEND_KIND_NODE_PORT, Namespace: "shop", Name: "web",
		Inside: &loadbalancerv1.BackendList{
			Backends:  []*loadbalancerv1.Backend{{Address: "10.99.0.9", Port: 8080}},
			WhenEmpty: loadbalancerv1.EmptyAction_EMPTY_ACTION_REJECT,
		},
	}
	b.snapshot = frontendsOf("first run", 7, "10.96.0.1")
	b.snapshot.Steps = append([]*loadbalancerv1.FrontendStep{
		{Step: &loadbalancerv1.FrontendStep_Upsert{Upsert: nodePort}},
	}, b.snapshot.Steps...)
	cc, err := rpcclient.Dial(socket, rpcclient.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cc.Close() })
	w.frontends, w.state = client.NewLoadBalancer(cc), record.OpenFrontends(filepath.Join(w.dir, "frontends.json"))
	w.start(false)
	mine := w.podWithPorts("mine", hostPort(netip.Addr{}, 30080, workload.TCP, 80))
	has := func(kind frontend.Kind) func() error {
		return func() error {
			f, ok, err := w.node.Kernel.Services.Lookup(frontend.Key{
				Addr: netip.IPv4Unspecified(), Port: 30080, Protocol: frontend.TCP, Node: true,
			})
			if err == nil && (!ok || f.Kind != kind) {
				err = fmt.Errorf("port 30080 is %+v, %v", f, ok)
			}
			return err
		}
	}
	stop := b.serve(t, socket)
	var reason string
	for m := range b.heard {
		if r := m.GetRefused(); r != nil {
			reason = r.GetReason()
		}
		if a := m.GetAck(); a.GetEnforced() == 7 && a.GetEnded() == 7 {
			break
		}
	}
	if !strings.Contains(reason, "host port of endpoint mine/eth0") {
		t.Errorf("the node port was refused with %q", reason)
	}
	refused := w.node.Services.Frontends.Status().Refused()
	if len(refused) != 1 || !strings.HasPrefix(refused[0], "0.0.0.0:30080/tcp: ") {
		t.Errorf("refused are %q", refused)
	}
	if err := has(frontend.HostPort)(); err != nil {
		t.Error(err)
	}
	// The service has the cluster IP, and a pod cannot use the service's port on that address.
	s := w.podWithPorts("other", hostPort(netip.Addr{}, 30081, workload.TCP, 80)).spec
	s.Owner.ContainerID, s.PortMappings[0].HostPort = "third", 30080
	if _, err := w.node.Endpoints.Lifecycle.Create(t.Context(), s, true); !errors.Is(err, endpoint.ErrHostPort) {
		t.Errorf("a port of another pod: %v", err)
	}

	w.del(mine)
	for m := range b.heard { // from a new subscription
		if m.GetAck().GetEnforced() == 7 {
			break
		}
	}
	go func() { // until the stream ends
		for range b.heard { //nolint:revive // only drain
		}
	}()
	t.Cleanup(func() { stop(); close(b.heard) })
	servicetest.EventuallyNil(t, "the service has its node port", has(frontend.NodePort))
	if _, err := w.node.Endpoints.Lifecycle.Create(t.Context(), s, true); !errors.Is(err, endpoint.ErrHostPort) ||
		!strings.Contains(err.Error(), "by service shop/web") {
		t.Errorf("a port of a service: %v", err)
	}
}

// TestKernelSocketsOfAPodAreLeftAsTheyAre tests a pod whose request disables the socket programs. Its connections are
// translated per packet instead, which creates a translation entry.
func TestKernelSocketsOfAPodAreLeftAsTheyAre(t *testing.T) {
	w := newServiceWorld(t)
	web := w.podWithPorts("web", hostPort(netip.Addr{}, 8080, workload.TCP, 80))
	web.echoAt(netip.AddrPortFrom(web.spec.Addrs[0], 80))
	w.attachedSockets()
	led, left := w.pod("led"), w.podWith("left", func(s *endpoint.Spec) { s.LeaveSockets = true })
	at := netip.AddrPortFrom(uplink4, 8080)
	translations := func(of *pod) (n int) {
		t.Helper()
		err := w.node.Kernel.Translations.Each(func(x translation.Translation) error {
			if x.Source.Addr() == of.spec.Addrs[0] {
				n++
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	flags := func(when string) {
		t.Helper()
		all, err := w.node.Kernel.Namespaces.List()
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range []*pod{web, led, left} {
			i := slices.IndexFunc(all, func(n sockets.Namespace) bool { return n.Slot == p.ep.Slot })
			if i < 0 || all[i].Leave != p.spec.LeaveSockets {
				t.Errorf("%s: the entry of %s's namespace is wrong in %+v", when, p.owner, all)
			}
		}
	}
	for _, when := range []string{"at first", "after a restart", "after another one"} {
		flags(when)
		asks(t, when, led.ns, at)
		if n := translations(led); n != 0 {
			t.Errorf("%s: %d translation entries for a pod whose sockets are translated", when, n)
		}
		had := translations(left)
		asks(t, when, left.ns, at)
		if n := translations(left); n != had+1 {
			t.Errorf("%s: %d new translation entries, want 1", when, n-had)
		}
		if e, err := w.node.Endpoints.Report.Get(left.owner); err != nil || !e.Spec.LeaveSockets {
			t.Errorf("%s: the endpoint is %+v, %v", when, e.Spec, err)
		}
		w.stop()
		w.start(false)
		w.attachedSockets()
		if err := w.node.Services.NameSockets(true); err != nil {
			t.Fatal(err)
		}
	}
	// An entry that another process overwrote is repaired.
	cookie, err := left.ns.Cookie()
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(
		w.node.Kernel.Namespaces.Set(sockets.Namespace{Cookie: cookie, Slot: left.ep.Slot}), w.node.Services.NameSockets(false),
	)
	if err != nil {
		t.Fatal(err)
	}
	flags("after the audit")
}

// TestKernelKilledWithHostPortsGivesThemUp kills the process before or after it writes or removes a frontend. No
// frontend may remain that would block the port for another container.
func TestKernelKilledWithHostPortsGivesThemUp(t *testing.T) {
	n := newNode(t)
	cgroup := kerneltest.NewCgroup(t)
	enterable(t, cgroup)
	for _, dir := range []string{cgroup, filepath.Dir(filepath.Dir(cgroup))} {
		if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // the service runs as another user
			t.Fatal(err)
		}
	}
	start := func() {
		t.Helper()
		n.run("--load-balancing-mode=on", "--load-balancing-cgroup="+cgroup)
		servicetest.EventuallyNil(t, "calls are answered", func() error {
			_, err := n.datapath.GetStatus(t.Context(), &datapathv1.GetStatusRequest{})
			return err
		})
	}
	frontends := func() (have []*datapathv1.KernelFrontend) {
		t.Helper()
		stream, err := n.datapath.ListFrontends(t.Context(), &datapathv1.ListFrontendsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for {
			m, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return have
			}
			if err != nil {
				t.Fatal(err)
			}
			have = append(have, m.GetFrontend())
		}
	}
	start()
	for i, point := range []string{
		"datapath/create/intent", "datapath/create/activate", "datapath/create/host-ports", "datapath/create/ready",
		"datapath/delete/cut", "datapath/delete/unpublish", "datapath/delete/tombstone",
	} {
		r := n.request(fmt.Sprintf("killed-%d", i), byte(i+2), n.pod())
		// The next container requests the same port.
		r.PortMappings = []*datapathv1.PortMapping{{HostPort: 8080, ContainerPort: 80, Protocol: netv1.Protocol_PROTOCOL_TCP}}
		remove := &datapathv1.DeleteEndpointRequest{Owner: r.GetOwner()}
		n.Faults.KillAt(point, 0)
		_, err := n.datapath.CreateEndpoint(t.Context(), r)
		if deletes := strings.HasPrefix(point, "datapath/delete/"); deletes != (err == nil) {
			t.Fatalf("%s: create: %v", point, err)
		} else if deletes {
			if got := frontends(); len(got) != 2 || got[0].GetKind() != datapathv1.FrontendKind_FRONTEND_KIND_HOST_PORT {
				t.Errorf("%s: before it the kernel has %v, want a host port of each family", point, got)
			}
			_, _ = n.datapath.DeleteEndpoint(t.Context(), remove) // the process is killed, or answers just before
		}
		n.Exit()
		start()
		if _, err := n.datapath.DeleteEndpoint(t.Context(), remove); err != nil {
			t.Fatalf("%s: %v", point, err)
		}
		if got := frontends(); len(got) > 0 {
			t.Errorf("%s: the kernel has %v", point, got)
		}
	}
	n.nothingIsLeft()
}

// TestKernelUDPFlowOfAHostPortFollowsItsPod keeps a UDP flow open, translated per packet, while the pod with the host
// port is deleted and another pod gets the port, which it was refused before. The flow reaches the new pod, and nothing
// after that pod is deleted.
func TestKernelUDPFlowOfAHostPortFollowsItsPod(t *testing.T) {
	w := newServiceWorld(t)
	port := hostPort(netip.Addr{}, 8053, workload.UDP, 53)
	plain := w.podWith("plain", func(s *endpoint.Spec) { s.LeaveSockets = true })
	receive := func(p *pod) net.PacketConn {
		t.Helper()
		c := p.listen("udp", netip.AddrPortFrom(p.spec.Addrs[0], 53).String()).(net.PacketConn)
		t.Cleanup(func() { c.Close() })
		return c
	}
	flow := w.dial(plain.ns, "udp", netip.AddrPortFrom(w.node.Ranges.NodeAddrs()[0], 8053))
	reaches := func(when string, to net.PacketConn) {
		t.Helper()
		if _, err := flow.Write([]byte(when)); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		if err := to.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 64)
		n, _, err := to.ReadFrom(b)
		if err != nil || string(b[:n]) != when {
			t.Fatalf("%s: the pod receives %q, %v", when, b[:n], err)
		}
	}
	first := w.podWithPorts("first", port)
	to := receive(first)
	reaches("the first pod", to)
	ns := netnstest.New(t)
	refused := w.spec("second", ns)
	refused.PortMappings = []endpoint.PortMapping{port}
	if _, err := w.node.Endpoints.Lifecycle.Create(t.Context(), refused, false); !errors.Is(err, endpoint.ErrHostPort) {
		t.Fatalf("a second pod with the port: %v, want ErrHostPort", err)
	}
	reaches("after the refusal", to)
	w.del(first)
	second := w.podWithPorts("second", port)
	reaches("the second pod", receive(second))
	w.del(second)
	if got := w.hostPorts(); len(got) != 0 {
		t.Errorf("host ports %q after both pods were deleted", got)
	}
	if _, err := flow.Write([]byte("nobody")); err != nil {
		t.Fatal(err)
	}
	if err := flow.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if n, err := flow.Read(make([]byte, 8)); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("with no pod at the port: %d bytes, %v, want connection refused", n, err)
	}
}

// TestKernelFlowOfAFormerHostPortReachesNobodyElse keeps UDP flows open to two host ports of a pod, by each address of
// the node. Another pod then gets the address and one of the ports of the former pod. The flows to this port continue
// with the new pod, whose answers have the address to which the client sends. The flows to the other port do not reach
// the new pod, although entries led to its address.
func TestKernelFlowOfAFormerHostPortReachesNobodyElse(t *testing.T) {
	w := newServiceWorld(t)
	kept, lost := hostPort(netip.Addr{}, 8053, workload.UDP, 53), hostPort(netip.Addr{}, 8054, workload.UDP, 54)
	plain := w.podWith("plain", func(s *endpoint.Spec) { s.LeaveSockets = true })
	led := w.pod("led")
	first := w.podWithPorts("first", kept, lost)
	addrs := first.spec.Addrs
	w.attachedSockets()
	receive := func(p *pod) map[string]net.PacketConn {
		t.Helper()
		all := map[string]net.PacketConn{}
		for _, a := range addrs {
			for _, port := range []uint16{53, 54} {
				at := netip.AddrPortFrom(a, port)
				all[at.String()] = p.listen("udp", at.String()).(net.PacketConn)
			}
		}
		return all
	}
	type flow struct {
		what string
		net.Conn
		at string // of the socket in the pod
	}
	var flows []flow
	for name, from := range map[string]*netns.Namespace{"sockets": led.ns, "packets": plain.ns, "node": w.home} {
		for _, to := range []netip.Addr{w.node.Ranges.NodeAddrs()[0], uplink4, uplink6} {
			for i, port := range []uint16{8053, 8054} {
				at := netip.AddrPortFrom(addrs[0], uint16(53+i))
				if to.Is6() {
					at = netip.AddrPortFrom(addrs[1], uint16(53+i))
				}
				node := netip.AddrPortFrom(to, port)
				flows = append(flows, flow{fmt.Sprintf("%s to %v", name, node), w.dial(from, "udp", node), at.String()})
			}
		}
	}
	exchange := func(when string, f flow, to net.PacketConn) {
		t.Helper()
		text, b := when+" "+f.what, make([]byte, 128)
		if _, err := f.Write([]byte(text)); err != nil {
			t.Errorf("%s: %v", text, err)
			return
		}
		_ = to.SetReadDeadline(time.Now().Add(patience))
		n, from, err := to.ReadFrom(b)
		if err != nil || string(b[:n]) != text {
			t.Errorf("%s: the pod receives %q, %v", text, b[:n], err)
			return
		}
		if _, err := to.WriteTo(b[:n], from); err != nil {
			t.Errorf("%s: answer: %v", text, err)
		}
		_ = f.SetReadDeadline(time.Now().Add(patience))
		if n, err := f.Read(b); err != nil || string(b[:n]) != text {
			t.Errorf("%s: the client receives %q, %v", text, b[:n], err)
		}
	}
	former := receive(first)
	for _, f := range flows {
		exchange("first", f, former[f.at])
	}
	for _, c := range former {
		c.Close()
	}
	w.del(first)
	second := w.podWith("second", func(s *endpoint.Spec) {
		s.Addrs, s.PortMappings = addrs, []endpoint.PortMapping{kept}
	})
	latter := receive(second)
	for _, f := range flows {
		if strings.HasSuffix(f.at, ":54") {
			_, _ = f.Write([]byte(f.what)) // a socket that was ended returns an error
		} else if !strings.HasPrefix(f.what, "packets") {
			_, _ = f.Write([]byte(f.what)) // likewise
		}
	}
	for at, c := range latter {
		if !strings.HasSuffix(at, ":54") {
			continue
		}
		_ = c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		b := make([]byte, 128)
		if n, _, err := c.ReadFrom(b); err == nil {
			t.Errorf("the new pod receives %q at %s, which has no host port", b[:n], at)
		}
	}
	for _, f := range flows {
		if strings.HasPrefix(f.what, "packets") && strings.HasSuffix(f.at, ":53") {
			exchange("second", f, latter[f.at])
		}
	}
	for _, c := range latter {
		c.Close()
	}
}
