// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/count"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
	"github.com/sluice-net/sluice/services/datapath/internal/service/translation"
)

// serviceNode is a node whose pods reach services by packets, without socket hooks.
type serviceNode struct {
	*testing.T
	runner
	front, member, backend uint32 // last assigned numbers
}

func newServiceNode(t *testing.T) *serviceNode {
	t.Helper()
	o := testOptions(kerneltest.NewBPFFS(t))
	o.Services = true
	return &serviceNode{T: t, runner: runner{openKernel(t, o)}}
}

// outsideFronts is the offset of the numbers of outside fronts from the numbers of inside fronts.
const outsideFronts = 1000

// lead adds frontends for TCP, UDP and SCTP at an address with backends. It returns the number of the front.
func (n *serviceNode) lead(at netip.AddrPort, kind uint8, backends ...netip.AddrPort) uint32 {
	n.Helper()
	var numbers []uint32
	for _, b := range backends {
		n.backend++
		putBackend(n, n.k, n.backend, b, beActive, 1)
		numbers = append(numbers, n.backend)
	}
	n.front++
	f := bpf.MapsSlFront{List: putMembers(n, n.k, n.member+1, numbers...), Port: at.Port()}
	n.member += uint32(len(numbers))
	if kind == feAddress {
		copy(f.Addr[:], at.Addr().AsSlice())
	} else {
		at = netip.AddrPortFrom(map[bool]netip.Addr{
			true: netip.IPv4Unspecified(), false: netip.IPv6Unspecified(),
		}[at.Addr().Is4()], at.Port())
	}
	putFront(n, n.k, n.front, f)
	outside := n.front + outsideFronts
	putFront(n, n.k, outside, f)
	for _, proto := range []uint8{protoTCP, protoUDP, syscall.IPPROTO_SCTP} {
		putFronts(n, n.k, at, proto, kind, bpf.MapsSlFe{Inside: n.front, Outside: outside})
	}
	return n.front
}

// tell runs a server that sends its own address and the client's, over TCP, and over UDP followed by the
// client's data.
func tell(t *testing.T, ns netns.NsHandle, at netip.AddrPort) {
	t.Helper()
	var l net.Listener
	var u *net.UDPConn
	inNetns(t, ns, func() {
		var err error
		if l, err = net.Listen("tcp", at.String()); err != nil {
			t.Errorf("listen: %v", err)
			return
		}
		if u, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at)); err != nil {
			t.Errorf("listen: %v", err)
		}
	})
	if l == nil || u == nil {
		t.FailNow()
	}
	t.Cleanup(func() {
		l.Close()
		u.Close()
	})
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				fmt.Fprintf(c, "%v to %v\n", at, c.RemoteAddr())
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	go func() {
		b := make([]byte, 65536)
		for {
			size, from, err := u.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = u.WriteToUDPAddrPort(append([]byte(fmt.Sprintf("%v to %v\n", at, from)), b[:size]...), from)
		}
	}()
}

// dialIn connects from a namespace.
func dialIn(t *testing.T, ns netns.NsHandle, network string, to netip.AddrPort) (c net.Conn, err error) {
	t.Helper()
	inNetns(t, ns, func() { c, err = net.DialTimeout(network, to.String(), servicetest.Patience) })
	if err == nil {
		t.Cleanup(func() { c.Close() })
		must(t, "deadline", c.SetDeadline(time.Now().Add(servicetest.Patience)))
	}
	return c, err
}

// askTCP connects, checks the echo of size bytes, and returns the server's message.
func askTCP(t *testing.T, ns netns.NsHandle, to netip.AddrPort, size int) string {
	t.Helper()
	c, err := dialIn(t, ns, "tcp", to)
	must(t, "connect to "+to.String(), err)
	defer c.Close()
	sent := bytes.Repeat([]byte("0123456789abcdef"), size/16)
	go func() {
		_, _ = c.Write(sent)
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	got, err := io.ReadAll(c)
	must(t, "read from "+to.String(), err)
	says, echoed, _ := strings.Cut(string(got), "\n")
	if echoed != string(sent) {
		t.Errorf("%v: %d bytes came back of %d", to, len(echoed), len(sent))
	}
	return says
}

// askUDP sends a request from an unconnected socket, and checks the source of the answer.
func askUDP(t *testing.T, ns netns.NsHandle, to netip.AddrPort, size int) string {
	t.Helper()
	var u *net.UDPConn
	inNetns(t, ns, func() {
		var err error
		if u, err = net.ListenUDP("udp", nil); err != nil {
			t.Errorf("open a socket: %v", err)
		}
	})
	if u == nil {
		t.FailNow()
	}
	defer u.Close()
	sent, b := bytes.Repeat([]byte("fragment"), size/8), make([]byte, 65536)
	must(t, "deadline", u.SetDeadline(time.Now().Add(servicetest.Patience)))
	_, err := u.WriteToUDPAddrPort(sent, to)
	must(t, "send to "+to.String(), err)
	n, from, err := u.ReadFromUDPAddrPort(b)
	must(t, "read from "+to.String(), err)
	if from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port()); from != to {
		t.Errorf("%v answers for %v", from, to)
	}
	says, echoed, _ := strings.Cut(string(b[:n]), "\n")
	if echoed != string(sent) {
		t.Errorf("%v: %d bytes came back of %d", to, len(echoed), len(sent))
	}
	return says
}

// serviceAddr returns a service address of the same family.
func serviceAddr(of netip.Addr, n byte) netip.AddrPort {
	if of.Is4() {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 0, n}), 80)
	}
	a := netip.MustParseAddr("fd00:96::").As16()
	a[15] = n
	return netip.AddrPortFrom(netip.AddrFrom16(a), 80)
}

func wantNoDropsSince(t *testing.T, r runner, before map[cell]event.Counter) {
	t.Helper()
	for c, v := range r.counters(t) {
		if d := v.Packets - before[c].Packets; d > 0 && c.reason.Dropped() && !c.reason.Quiet() {
			t.Errorf("%d packets dropped as %v", d, c.reason)
		}
	}
}

// TestKernelPodReachesServicesByPackets: packets of any size to a service reach its backends, answers come from
// the service, and the backend sees the client's address (INV-101).
func TestKernelPodReachesServicesByPackets(t *testing.T) {
	n := newServiceNode(t)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	servers := []*pod{
		newPod(t, n.k, "sl-peer", 20, endpointmap.DeliverPeer),
		newPod(t, n.k, "sl-redirect", 30, endpointmap.DeliverRedirect),
	}
	for i, local := range client.Addrs() {
		t.Run(local.String(), func(t *testing.T) {
			vip := serviceAddr(local, 1)
			var backends []netip.AddrPort
			for _, s := range servers {
				at := netip.AddrPortFrom(s.Addrs()[i], 8080)
				tell(t, s.ns, at)
				backends = append(backends, at)
			}
			n.lead(vip, feAddress, backends...)
			before := n.counters(t)
			said := map[string]int{}
			for range 40 {
				for _, says := range []string{askTCP(t, client.ns, vip, 1<<10), askUDP(t, client.ns, vip, 64)} {
					who, whom, _ := strings.Cut(says, " to ")
					if from, err := netip.ParseAddrPort(whom); err != nil || from.Addr().Unmap() != local {
						t.Errorf("the backend sees %q, want %v", whom, local)
					}
					said[who]++
				}
			}
			for _, b := range backends {
				if said[b.String()] < 20 {
					t.Errorf("%v answered %d of 80 times: %v", b, said[b.String()], said)
				}
			}
			askTCP(t, client.ns, vip, 4<<20)  // GSO packets of many segments
			askUDP(t, client.ns, vip, 20_000) // fragments
			wantNoDropsSince(t, n.runner, before)
		})
	}
}

// TestKernelServiceOfARemoteBackend: a backend on another node is reached through the tunnel or natively, and
// its answers come from the service.
func TestKernelServiceOfARemoteBackend(t *testing.T) {
	eachUnderlay(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		for i, local := range f.a.pod.Addrs() {
			vip, at := serviceAddr(local, 1), netip.AddrPortFrom(f.b.pod.Addrs()[i], 8080)
			tell(t, f.b.pod.ns, at)
			n.lead(vip, feAddress, at)
			before := n.counters(t)
			askTCP(t, f.a.pod.ns, vip, 1<<20)
			askUDP(t, f.a.pod.ns, vip, 64)
			wantNoDropsSince(t, n.runner, before)

			// the other node's host, through the local stack
			host := netip.AddrPortFrom([]netip.Addr{f.b.over4, f.b.over6}[i], 8081)
			tell(t, f.b.ns, host)
			n.lead(serviceAddr(local, 2), feAddress, host)
			if says := askTCP(t, f.a.pod.ns, serviceAddr(local, 2), 1<<10); !strings.HasPrefix(says, host.String()) {
				t.Errorf("%q answers, want %v", says, host)
			}
			askUDP(t, f.a.pod.ns, serviceAddr(local, 2), 64)
		}
	})
}

// TestKernelHairpin: a service forwards a pod's request to the pod itself, with every protocol and regardless
// of policy.
func TestKernelHairpin(t *testing.T) {
	n := newServiceNode(t)
	for i, deliver := range []endpointmap.Deliver{endpointmap.DeliverPeer, endpointmap.DeliverRedirect} {
		p := newPod(t, n.k, fmt.Sprintf("sl-pod%d", i), byte(10+i), deliver)
		_, err := n.k.Endpoints.SetPolicy(p.Slot, nodetable.Deny, nodetable.Deny)
		must(t, "deny everything", err)
		for _, local := range p.Addrs() {
			vip, at := serviceAddr(local, byte(1+i)), netip.AddrPortFrom(local, 8080)
			tell(t, p.ns, at)
			n.lead(vip, feAddress, at)
			before := n.counters(t)
			for range 3 {
				askTCP(t, p.ns, vip, 1<<20)
				askUDP(t, p.ns, vip, 64)
			}
			if says := askTCP(t, p.ns, vip, 1<<10); strings.Contains(says, "to "+local.String()) {
				t.Errorf("%q: the pod sees itself", says)
			}
			wantNoDropsSince(t, n.runner, before)
		}
	}
}

// TestKernelServiceWithoutBackendsRefuses: connect fails immediately with "connection refused", and so does a
// read from a connected UDP socket; both work with the first backend.
func TestKernelServiceWithoutBackendsRefuses(t *testing.T) {
	n := newServiceNode(t)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	server := newPod(t, n.k, "sl-server", 20, endpointmap.DeliverPeer)
	for i, local := range client.Addrs() {
		vip := serviceAddr(local, 1)
		front := n.lead(vip, feAddress)
		if _, err := dialIn(t, client.ns, "tcp", vip); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("connect to %v: %v, want %v", vip, err, syscall.ECONNREFUSED)
		}
		u, err := dialIn(t, client.ns, "udp", vip)
		must(t, "connect", err)
		_, err = u.Write([]byte("hello"))
		must(t, "send", err)
		if _, err = u.Read(make([]byte, 16)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("read from %v: %v, want %v", vip, err, syscall.ECONNREFUSED)
		}
		c := cell{event.ServiceNoBackend, event.Egress}
		if got := n.counters(t)[c].Packets; got != uint64(2*(i+1)) {
			t.Errorf("%d packets counted as %v, want %d", got, c.reason, 2*(i+1))
		}
		at := netip.AddrPortFrom(server.Addrs()[i], 8080)
		tell(t, server.ns, at)
		n.backend++
		putBackend(t, n.k, n.backend, at, beActive, 1)
		f := bpf.MapsSlFront{List: putMembers(t, n.k, n.member+1, n.backend), Port: vip.Port()}
		copy(f.Addr[:], vip.Addr().AsSlice())
		n.member++
		putFront(t, n.k, front, f)
		_, err = u.Write([]byte("hello"))
		must(t, "send again", err)
		if _, err = u.Read(make([]byte, 128)); err != nil {
			t.Errorf("UDP does not work after a refusal: %v", err)
		}
		askTCP(t, client.ns, vip, 16)
	}
}

// alone marks an address as a virtual IP that only services use.
func alone(t *testing.T, k *Kernel, addr netip.Addr) {
	t.Helper()
	putFronts(t, k, netip.AddrPortFrom(addr, 0), 0, feAlone, bpf.MapsSlFe{})
}

// TestKernelPortWithoutAServiceIsRefused: a pod's packets to a virtual IP at a port without a service, and echo
// requests, are refused, and do not leave by the node's routes. Addresses that the local node or another node
// has, too, belong to that node.
func TestKernelPortWithoutAServiceIsRefused(t *testing.T) {
	n := newServiceNode(t)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	server := newPod(t, n.k, "sl-server", 20, endpointmap.DeliverPeer)
	for i, local := range client.Addrs() {
		vip := serviceAddr(local, 1)
		at := netip.AddrPortFrom(server.Addrs()[i], 8080)
		tell(t, server.ns, at)
		n.lead(vip, feAddress, at)
		other := netip.AddrPortFrom(vip.Addr(), vip.Port()+1)
		before := n.counters(t)
		if _, err := dialIn(t, client.ns, "udp", other); err != nil {
			t.Errorf("the way to an address of a service: %v", err)
		}
		alone(t, n.k, vip.Addr())
		askTCP(t, client.ns, vip, 16)
		if _, err := dialIn(t, client.ns, "tcp", other); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("connect to %v: %v, want %v", other, err, syscall.ECONNREFUSED)
		}
		u, err := dialIn(t, client.ns, "udp", other)
		must(t, "connect", err)
		_, err = u.Write([]byte("hello"))
		must(t, "send", err)
		if _, err = u.Read(make([]byte, 16)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("read from %v: %v, want %v", other, err, syscall.ECONNREFUSED)
		}
		network, echo := "ip4:icmp", []byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0}
		if local.Is6() {
			// the kernel sets the checksum
			network, echo = "ip6:ipv6-icmp", []byte{128, 0, 0, 0, 0, 0, 0, 0}
		}
		inNetns(t, client.ns, func() {
			c, err := net.Dial(network, vip.Addr().String())
			if err == nil {
				_, err = c.Write(echo)
				c.Close()
			}
			must(t, "send an echo", err)
		})
		gained := func(reason event.Reason) uint64 {
			c := cell{reason, event.Egress}
			return n.counters(t)[c].Packets - before[c].Packets
		}
		if got := gained(event.NoServicePort); got != 3 {
			t.Errorf("%d packets are counted as %v, want 3", got, event.NoServicePort)
		}
		for _, reason := range []event.Reason{event.ForwardedToHost, event.ForwardedOutside} {
			if got := gained(reason); got != 0 {
				t.Errorf("%d packets are counted as %v, want none", got, reason)
			}
		}
	}
}

// TestKernelPolicySeesTheBackend: the policy for the backend applies to requests to the service; a rule for the
// service address has no effect (INV-98).
func TestKernelPolicySeesTheBackend(t *testing.T) {
	n := newServiceNode(t)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	server := newPod(t, n.k, "sl-server", 20, endpointmap.DeliverPeer)
	vip, at := serviceAddr(server.IPv4, 1), netip.AddrPortFrom(server.IPv4, 8080)
	tell(t, server.ns, at)
	n.lead(vip, feAddress, at)
	askTCP(t, client.ns, vip, 16)
	_, err := n.k.Endpoints.SetPolicy(server.Slot, nodetable.Allow, nodetable.Deny)
	must(t, "deny", err)
	c := cell{event.PolicyDenied, event.Ingress}
	before := n.counters(t)
	inNetns(t, client.ns, func() {
		conn, err := net.DialTimeout("tcp", vip.String(), 300*time.Millisecond)
		if err == nil {
			conn.Close()
			t.Error("the policy of the backend did not hold")
		}
	})
	if n.counters(t)[c].Packets == before[c].Packets {
		t.Errorf("no packet counted as %v", c.reason)
	}
	for tuple := range n.k.tracked(t) {
		if tuple.Responder.Addr() == vip.Addr() {
			t.Errorf("there is a connection to the service itself: %v", tuple)
		}
	}
}

// TestKernelTwoServicesOneBackend: one source port uses two services with the same backend; each connection
// gets its own answers or is refused, but they are never mixed up.
func TestKernelTwoServicesOneBackend(t *testing.T) {
	n := newServiceNode(t)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	server := newPod(t, n.k, "sl-server", 20, endpointmap.DeliverPeer)
	at := netip.AddrPortFrom(server.IPv4, 8080)
	tell(t, server.ns, at)
	first, second := serviceAddr(at.Addr(), 1), serviceAddr(at.Addr(), 2)
	n.lead(first, feAddress, at)
	n.lead(second, feAddress, at)
	dial := func(to netip.AddrPort) (c net.Conn, err error) {
		inNetns(t, client.ns, func() {
			d := net.Dialer{
				Timeout: servicetest.Patience, LocalAddr: &net.TCPAddr{IP: client.IPv4.AsSlice(), Port: 41000},
				Control: reuseAddr,
			}
			c, err = d.Dial("tcp", to.String())
		})
		return c, err
	}
	a, err := dial(first)
	must(t, "connect to the first", err)
	defer a.Close()
	if b, err := dial(second); !errors.Is(err, syscall.ECONNREFUSED) {
		if err == nil {
			b.Close()
		}
		t.Errorf("connect to the second by the same port: %v, want %v", err, syscall.ECONNREFUSED)
	}
	must(t, "deadline", a.SetDeadline(time.Now().Add(servicetest.Patience)))
	if _, err := a.Write([]byte("ping")); err != nil {
		t.Errorf("write to the first: %v", err)
	}
	if _, err := io.ReadFull(a, make([]byte, len(at.String()))); err != nil {
		t.Errorf("read from the first: %v", err)
	}
}

func reuseAddr(_, _ string, c syscall.RawConn) (err error) {
	return errors.Join(c.Control(func(fd uintptr) {
		err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1)
	}), err)
}

// TestKernelConnectionKeepsItsBackendWhenTheListChanges: a TCP connection keeps its backend even if the backend is
// removed; a UDP flow moves to another backend when its own is removed (INV-101).
func TestKernelConnectionKeepsItsBackendWhenTheListChanges(t *testing.T) {
	n := newServiceNode(t)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	var backends []netip.AddrPort
	for i := range byte(2) {
		s := newPod(t, n.k, fmt.Sprintf("sl-server%d", i), 20+i, endpointmap.DeliverPeer)
		backends = append(backends, netip.AddrPortFrom(s.IPv4, 8080))
		tell(t, s.ns, backends[i])
	}
	vip := serviceAddr(backends[0].Addr(), 1)
	front := n.lead(vip, feAddress, backends[0])
	stream, err := dialIn(t, client.ns, "tcp", vip)
	must(t, "connect", err)
	dgram, err := dialIn(t, client.ns, "udp", vip)
	must(t, "connect", err)
	says := func(c net.Conn) string {
		t.Helper()
		b := make([]byte, 256)
		_, err := c.Write([]byte("ping\n"))
		must(t, "send", err)
		k, err := c.Read(b)
		must(t, "read", err)
		return string(b[:k])
	}
	says(stream)
	if got := says(dgram); !strings.HasPrefix(got, backends[0].String()) {
		t.Errorf("%q answers", got)
	}
	n.backend++
	putBackend(t, n.k, n.backend, backends[1], beActive, 1)
	f := bpf.MapsSlFront{List: putMembers(t, n.k, n.member+1, n.backend), Port: vip.Port()}
	copy(f.Addr[:], vip.Addr().AsSlice())
	putFront(t, n.k, front, f)
	if got := says(dgram); !strings.HasPrefix(got, backends[0].String()) {
		t.Errorf("%q answers, although the first backend still exists", got)
	}
	putBackend(t, n.k, 1, backends[0], beGone, 2)
	if got := says(dgram); !strings.HasPrefix(got, backends[1].String()) {
		t.Errorf("%q answers, although the first backend was removed", got)
	}
	if got := says(stream); !strings.Contains(got, "ping") {
		t.Errorf("%q on the connection of the first backend", got)
	}
}

// TestKernelConnectionRecordsFrontAndBackend: the conntrack entry of a connection to a service has the front of the
// service and the address of the backend.
func TestKernelConnectionRecordsFrontAndBackend(t *testing.T) {
	n := newServiceNode(t)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	server := newPod(t, n.k, "sl-server", 20, endpointmap.DeliverPeer)
	vip, at := serviceAddr(server.IPv4, 1), netip.AddrPortFrom(server.IPv4, 8080)
	tell(t, server.ns, at)
	front := n.lead(vip, feAddress, at)
	askTCP(t, client.ns, vip, 16)
	var found []conntrack.Connection
	must(t, "list", n.k.Connections.Each(func(cs []conntrack.Connection) error {
		found = append(found, cs...)
		return nil
	}))
	if !slices.ContainsFunc(found, func(c conntrack.Connection) bool { return c.Value.Front == front && c.Responder == at }) {
		t.Errorf("no connection to %v has front %d: %v", at, front, found)
	}
}

// TestKernelNodePortRepliesFromTheRequestedAddress: a pod uses a node port at one of the node's many
// addresses, and the answer comes from that address.
func TestKernelNodePortRepliesFromTheRequestedAddress(t *testing.T) {
	n := newServiceNode(t)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	server := newPod(t, n.k, "sl-server", 20, endpointmap.DeliverPeer)
	var own []netip.Addr
	for i := range byte(40) {
		own = append(own, netip.AddrFrom4([4]byte{192, 0, 2, i}), netip.AddrFrom16([16]byte{0xfd, 1, 15: i}))
	}
	must(t, "host addresses", n.k.Endpoints.SyncHostAddrs(own))
	for i, local := range client.Addrs() {
		at := netip.AddrPortFrom(server.Addrs()[i], 8080)
		tell(t, server.ns, at)
		n.lead(netip.AddrPortFrom(local, 30080), feNode, at)
		for _, a := range own {
			if a.Is4() == local.Is4() && a.As16()[15]%8 == 7 {
				askTCP(t, client.ns, netip.AddrPortFrom(a, 30080), 16)
				askUDP(t, client.ns, netip.AddrPortFrom(a, 30080), 16)
			}
		}
	}
	// addresses keep their indices, whatever other addresses the host gets
	dump := func() (lines []string) {
		must(t, "dump", n.k.Dump(bpf.MapsMapSlOwn, func(key, value string) error {
			lines = append(lines, key+" "+value)
			return nil
		}))
		return lines
	}
	before := dump()
	if len(before) != len(own) {
		t.Errorf("%d addresses have an index, want %d", len(before), len(own))
	}
	slices.Reverse(own)
	must(t, "host addresses", n.k.Endpoints.SyncHostAddrs(own))
	if after := dump(); !slices.Equal(before, after) {
		t.Errorf("indices have changed: %v, were %v", after, before)
	}
}

// TestKernelTranslationGoesWithItsConnection: a translation stays while its connection exists, and is removed
// afterwards.
func TestKernelTranslationGoesWithItsConnection(t *testing.T) {
	n := newServiceNode(t)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	server := newPod(t, n.k, "sl-server", 20, endpointmap.DeliverPeer)
	fronts := map[uint32]struct{}{}
	for i := range client.Addrs() {
		vip, at := serviceAddr(server.Addrs()[i], 1), netip.AddrPortFrom(server.Addrs()[i], 8080)
		tell(t, server.ns, at)
		fronts[n.lead(vip, feAddress, at)] = struct{}{}
		askUDP(t, client.ns, vip, 16)
	}
	timeouts := conntrack.DefaultTimeouts()
	later := conntrack.MonotonicSeconds() + uint32(translation.Rest/time.Second) + 5
	p, err := n.k.Translations.Collect(later, n.k.Connections, timeouts)
	named := map[uint32]struct{}{}
	must(t, "list", n.k.Translations.Each(func(x translation.Translation) error {
		named[x.Front] = struct{}{}
		return nil
	}))
	const each = 4 // of both flows: translations and answer records
	if err != nil || p.Live != each || p.Removed != 0 || !maps.Equal(named, fronts) {
		t.Errorf("with connections: %+v, %v, of fronts %v, want %v", p, err, named, fronts)
	}
	// as the map may evict them
	clearMaps(t, n.k, bpf.MapsMapSlCt4, bpf.MapsMapSlCt6)
	if p, err = n.k.Translations.Collect(later, n.k.Connections, timeouts); err != nil ||
		p.Live != each || p.Removed != 0 {
		t.Errorf("after they were evicted: %+v, %v", p, err)
	}
	late := later + uint32(translation.Keep/time.Second)
	for i := range client.Addrs() {
		askUDP(t, client.ns, serviceAddr(server.Addrs()[i], 1), 16)
	}
	c, now := newCollector(t, n.k, conntrack.CollectorOptions{})
	now.now.Store(conntrack.MonotonicSeconds() + uint32(timeouts.UDPAnswered/time.Second) + 1)
	if pass := collect(t, c); pass.Expired != 2 {
		t.Errorf("they are to end: %+v", pass)
	}
	if p, err = n.k.Translations.Collect(conntrack.MonotonicSeconds(), n.k.Connections, timeouts); err != nil ||
		p.Live != each || p.Removed != each { // the first ones stay
		t.Errorf("after they ended: %+v, %v", p, err)
	}

	for i := range client.Addrs() {
		askUDP(t, client.ns, serviceAddr(server.Addrs()[i], 1), 16)
	}
	clearMaps(t, n.k, bpf.MapsMapSlCt4, bpf.MapsMapSlCt6)
	if p, err = n.k.Translations.Collect(later, n.k.Connections, timeouts); err != nil || p.Removed != 0 {
		t.Errorf("after they were evicted again: %+v, %v", p, err)
	}
	if p, err = n.k.Translations.Collect(late, n.k.Connections, timeouts); err != nil ||
		p.Live != 0 || p.Removed != 2*each {
		t.Errorf("long after they were evicted: %+v, %v", p, err)
	}
}

// TestKernelDirectFlowBecomesAService: a flow to an address that becomes a service address is translated from
// then on, although it never pauses.
func TestKernelDirectFlowBecomesAService(t *testing.T) {
	n := newServiceNode(t)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	server := newPod(t, n.k, "sl-server", 20, endpointmap.DeliverPeer)
	must(t, "host addresses", n.k.Endpoints.SyncHostAddrs([]netip.Addr{
		netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1"),
	}))
	for i, local := range client.Addrs() {
		vip, at := serviceAddr(local, 1), netip.AddrPortFrom(server.Addrs()[i], 8080)
		tell(t, server.ns, at)
		own, unspecified := netip.MustParseAddr("192.0.2.1"), netip.IPv4Unspecified()
		if local.Is6() {
			own, unspecified = netip.MustParseAddr("2001:db8::1"), netip.IPv6Unspecified()
		}
		port := frontend.Key{Addr: unspecified, Port: 30080, Protocol: frontend.UDP, Node: true}
		for _, c := range []struct {
			asked netip.AddrPort
			f     *frontend.Frontend
		}{
			{vip, clusterAt(vip, frontend.UDP, leadsTo(at))},
			{netip.AddrPortFrom(own, port.Port), &frontend.Frontend{
				Key: port, Kind: frontend.NodePort, Service: "shop/web:http", Inside: leadsTo(at), Outside: leadsTo(at),
			}},
		} {
			u, err := dialIn(t, client.ns, "udp", c.asked)
			must(t, "connect", err)
			send := func() {
				t.Helper()
				if _, err := u.Write([]byte("hello")); err != nil && !errors.Is(err, syscall.ECONNREFUSED) {
					t.Fatalf("send: %v", err)
				}
			}
			send()
			tuple := conntrack.Tuple{
				Initiator: u.LocalAddr().(*net.UDPAddr).AddrPort(), Responder: c.asked, Protocol: protoUDP,
			}
			if _, found, err := n.k.Connections.Lookup(tuple); !found || err != nil {
				t.Errorf("%v: there is no direct connection, %v", tuple, err)
			}
			tx := &frontendtx.Transaction{}
			tx.Upsert(c.f)
			_, err = n.k.Frontends().Apply(t.Context(), tx)
			must(t, "apply", err)
			send()
			must(t, "deadline", u.SetReadDeadline(time.Now().Add(servicetest.Patience)))
			b := make([]byte, 256)
			size, err := u.Read(b)
			for errors.Is(err, syscall.ECONNREFUSED) { // an error about an earlier datagram
				size, err = u.Read(b)
			}
			if err != nil || !strings.HasPrefix(string(b[:size]), at.String()) {
				t.Errorf("%v: %q, %v, want what %v says", c.asked, b[:size], err, at)
			}
		}
	}
}

// TestKernelDirectFlowBecomesAServiceAcrossARestart: a process that ends after it has written a frontend, and before it
// has removed the direct connections to its address, leaves the removal to the next process. A failed removal is tried
// again by the next transaction.
func TestKernelDirectFlowBecomesAServiceAcrossARestart(t *testing.T) {
	for name, restarts := range map[string]bool{"restart": true, "failure": false} {
		t.Run(name, func(t *testing.T) {
			o := testOptions(kerneltest.NewBPFFS(t))
			o.Services = true
			k, err := Open(t.Context(), o)
			must(t, "open", err)
			client := newPod(t, k, "sl-client", 10, endpointmap.DeliverPeer)
			server := newPod(t, k, "sl-server", 20, endpointmap.DeliverPeer)
			vip, at := serviceAddr(client.IPv4, 1), netip.AddrPortFrom(server.IPv4, 8080)
			tell(t, server.ns, at)
			u, err := dialIn(t, client.ns, "udp", vip)
			must(t, "connect", err)
			send := func() {
				t.Helper()
				if _, err := u.Write([]byte("hello")); err != nil && !errors.Is(err, syscall.ECONNREFUSED) {
					t.Fatalf("send: %v", err)
				}
			}
			send()
			tuple := conntrack.Tuple{
				Initiator: u.LocalAddr().(*net.UDPAddr).AddrPort(), Responder: vip, Protocol: protoUDP,
			}
			if _, found, err := k.Connections.Lookup(tuple); !found || err != nil {
				t.Fatalf("there is no direct connection, %v", err)
			}
			tx := &frontendtx.Transaction{}
			tx.Upsert(clusterAt(vip, frontend.UDP, leadsTo(at)))
			ended, cancel := context.WithCancel(t.Context())
			cancel()
			if _, err := k.Frontends().Apply(ended, tx); !errors.Is(err, context.Canceled) {
				t.Fatalf("apply: %v, want %v", err, context.Canceled)
			}
			if _, found, err := k.Connections.Lookup(tuple); !found || err != nil {
				t.Fatalf("the direct connection was removed, %v", err)
			}
			if restarts {
				must(t, "close", k.Close())
				k = openKernel(t, o)
			} else {
				t.Cleanup(func() { must(t, "close", k.Close()) })
			}
			_, err = k.Frontends().Apply(t.Context(), tx)
			must(t, "apply", err)
			send()
			must(t, "deadline", u.SetReadDeadline(time.Now().Add(servicetest.Patience)))
			b := make([]byte, 256)
			size, err := u.Read(b)
			for errors.Is(err, syscall.ECONNREFUSED) { // an error about an earlier datagram
				size, err = u.Read(b)
			}
			if err != nil || !strings.HasPrefix(string(b[:size]), at.String()) {
				t.Errorf("%q, %v, want what %v says", b[:size], err, at)
			}
			counts, err := count.Open(k.Pins)
			must(t, "open the counts", err)
			if counts.Forgetting() {
				t.Error("the removal has ended, and the next process would repeat it")
			}
		})
	}
}

// TestKernelManyHostAddresses: if a host has more addresses than node ports can answer at, the error is one
// short sentence, and all addresses are kept.
func TestKernelManyHostAddresses(t *testing.T) {
	n := newServiceNode(t)
	var own []netip.Addr
	for i := range 3000 {
		own = append(own, netip.AddrFrom4([4]byte{10, 200, byte(i >> 8), byte(i)}))
	}
	err := n.k.Endpoints.SyncHostAddrs(own)
	if !errors.Is(err, pin.ErrFull) || len(err.Error()) > 300 {
		t.Errorf("SyncHostAddrs: %v, want one short pin.ErrFull", err)
	}
	if known, err := n.k.Endpoints.HostAddrs(); err != nil || len(known) != len(own) {
		t.Errorf("%d host addresses, %v, want %d", len(known), err, len(own))
	}
}

// TestKernelServiceForSomeSources: a service with source ranges only accepts clients in them, and drops other
// packets silently (INV-102).
func TestKernelServiceForSomeSources(t *testing.T) {
	n := newServiceNode(t)
	friend := newPod(t, n.k, "sl-friend", 10, endpointmap.DeliverPeer)
	other := newPod(t, n.k, "sl-other", 11, endpointmap.DeliverPeer)
	server := newPod(t, n.k, "sl-server", 20, endpointmap.DeliverPeer)
	for i, local := range friend.Addrs() {
		vip, at := serviceAddr(local, 1), netip.AddrPortFrom(server.Addrs()[i], 8080)
		tell(t, server.ns, at)
		f := clusterAt(vip, frontend.TCP, leadsTo(at))
		f.SourceRanges = []netip.Prefix{netip.PrefixFrom(local, local.BitLen())}
		tx := &frontendtx.Transaction{}
		tx.Upsert(f)
		res, err := n.k.Frontends().Apply(t.Context(), tx)
		if err != nil || len(res.Refused) > 0 {
			t.Fatalf("apply: %+v, %v", res, err)
		}
		askTCP(t, friend.ns, vip, 16)
		before := n.counters(t)
		inNetns(t, other.ns, func() {
			if c, err := net.DialTimeout("tcp", vip.String(), 300*time.Millisecond); err == nil {
				c.Close()
				t.Errorf("%v accepted a client outside its source ranges", vip)
			} else if errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("%v refuses: %v, want no answer", vip, err)
			}
		})
		if c := (cell{event.ServiceSourceRange, event.Egress}); n.counters(t)[c].Packets == before[c].Packets {
			t.Errorf("no packet was counted as %v", c.reason)
		}
	}
}

// TestKernelHairpinHasABudget: a pod that floods itself through a service from new source ports is limited by
// its share of translations; each port takes two.
func TestKernelHairpinHasABudget(t *testing.T) {
	n := newServiceNode(t)
	flooder := newPod(t, n.k, "sl-flooder", 10, endpointmap.DeliverPeer)
	const guarantee, common, flood = 100, 60, 1000
	vip, at := serviceAddr(flooder.IPv4, 1), netip.AddrPortFrom(flooder.IPv4, 8080)
	n.lead(vip, feAddress, at)
	update(t, n.k, bpf.MapsMapSlBound, uint32(bound.Translations4), bpf.MapsSlBound{Guarantee: guarantee, Common: common})
	before := n.counters(t)
	var frames [][]byte
	for port := range uint16(flood) {
		frames = append(frames, frame(flooder.HostMAC, flooder.MAC, etherIPv4,
			ip4Header{src: flooder.IPv4, dst: vip.Addr(), proto: protoUDP}.with(udp(10000+port, vip.Port()))))
	}
	inNetns(t, flooder.ns, func() { sendRaw(t, "eth0", frames...) })
	over, let := cell{event.TranslationShare, event.Egress}, cell{event.ForwardedToPod, event.Egress}
	passed := uint64(0)
	servicetest.Eventually(t, "the flood to be counted", func() bool {
		gained := n.counters(t)
		passed = gained[let].Packets - before[let].Packets
		return passed+gained[over].Packets-before[over].Packets >= flood
	})
	// emulation may be so slow that a part of the share is renewed
	if passed < (guarantee+common)/2 || passed > flood/2 {
		t.Errorf("%d of %d passed, with a share of %d translations", passed, flood, guarantee+common)
	}
	kept := uint64(0)
	must(t, "list", n.k.Translations.Each(func(translation.Translation) error { kept++; return nil }))
	if kept > 2*passed {
		t.Errorf("%d translations exist, want <= 2 for each of %d packets", kept, passed)
	}
}
