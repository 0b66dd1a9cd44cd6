// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// pod is a network namespace with a device that is attached as the service does it.
type pod struct {
	endpointmap.Endpoint
	ns netns.NsHandle
}

// newPod creates a namespace, a device into it, the filters and the endpoint.
func newPod(t *testing.T, k *Kernel, name string, n byte, deliver endpointmap.Deliver) *pod {
	t.Helper()
	return newPodMTU(t, k, name, n, deliver, 1500)
}

func newPodMTU(t *testing.T, k *Kernel, name string, n byte, deliver endpointmap.Deliver, mtu uint16) *pod {
	t.Helper()
	e := testEndpoint(0, n)
	e.Deliver, e.MTU = deliver, mtu
	return newPodAt(t, k, &netlink.Handle{}, name, e)
}

// newPodAt creates a pod on the node in the handle's namespace; the zero handle is the test's namespace.
func newPodAt(t *testing.T, k *Kernel, node *netlink.Handle, name string, e endpointmap.Endpoint) *pod {
	t.Helper()
	p := &pod{Endpoint: e, ns: newNetns(t)}
	veth := &netlink.Veth{
		LinkAttrs:        netlink.LinkAttrs{Name: name, MTU: int(e.MTU), HardwareAddr: p.HostMAC[:]},
		PeerName:         "eth0",
		PeerHardwareAddr: p.MAC[:],
		PeerNamespace:    netlink.NsFd(p.ns),
		PeerMTU:          uint32(e.MTU),
	}
	must(t, "add "+name, node.LinkAdd(veth))
	link, err := node.LinkByName(name)
	must(t, "find "+name, err)
	p.Ifindex = uint32(link.Attrs().Index)
	t.Cleanup(func() {
		if err := node.LinkDel(link); err != nil {
			t.Errorf("delete %s: %v", name, err)
		}
	})
	attach(t, node, link, netlink.HANDLE_MIN_INGRESS, k.find(program.FromPod))
	attach(t, node, link, netlink.HANDLE_MIN_EGRESS, k.find(program.ToPod))
	must(t, "set "+name+" up", node.LinkSetUp(link))

	h, err := netlink.NewHandleAt(p.ns, unix.NETLINK_ROUTE)
	must(t, "netlink in the pod", err)
	defer h.Close()
	eth0, err := h.LinkByName("eth0")
	must(t, "find eth0", err)
	lo, err := h.LinkByName("lo")
	must(t, "find lo", err)
	must(t, "set lo up", h.LinkSetUp(lo))
	must(t, "set eth0 up", h.LinkSetUp(eth0))
	// The kernel reports the carrier later, from a worker, and until then the device's queue drops packets
	// of the stack, after the programs.
	servicetest.Eventually(t, "carrier of "+name, func() bool {
		l, err := node.LinkByIndex(link.Attrs().Index)
		return err == nil && l.Attrs().OperState == netlink.OperUp
	})
	for _, a := range p.Addrs() {
		must(t, "add address", h.AddrAdd(eth0, &netlink.Addr{IPNet: ipNet(a), Flags: unix.IFA_F_NODAD}))
		gw, zero := gateway4, netip.MustParsePrefix("0.0.0.0/0")
		if a.Is6() {
			gw, zero = gateway6, netip.MustParsePrefix("::/0")
		} else {
			must(t, "add the gateway's route", h.RouteAdd(&netlink.Route{LinkIndex: eth0.Attrs().Index, Dst: ipNet(gw), Scope: netlink.SCOPE_LINK}))
		}
		must(t, "add the default route", h.RouteAdd(&netlink.Route{
			LinkIndex: eth0.Attrs().Index, Gw: gw.AsSlice(),
			Dst: &net.IPNet{IP: zero.Addr().AsSlice(), Mask: net.CIDRMask(0, zero.Addr().BitLen())},
		}))
		receives(t, h, a)
	}

	s, err := k.Endpoints.Publish(t.Context(), p.Endpoint)
	must(t, "publish "+name, err)
	p.Slot = s
	return p
}

// receives waits until packets to an address are delivered: a kernel worker adds the local route of an IPv6
// address after the address itself.
func receives(t testing.TB, h *netlink.Handle, a netip.Addr) {
	t.Helper()
	family := unix.AF_INET
	if a.Is6() {
		family = unix.AF_INET6
	}
	local := &netlink.Route{Table: unix.RT_TABLE_LOCAL, Dst: ipNet(a)}
	servicetest.EventuallyNil(t, "local route to "+a.String(), func() error {
		routes, err := h.RouteListFiltered(family, local, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_DST)
		if err == nil && len(routes) == 0 {
			err = errors.New("there is none")
		}
		return err
	})
}

func attach(t *testing.T, node *netlink.Handle, link netlink.Link, parent uint32, p *program.Program) {
	t.Helper()
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
	must(t, "add clsact", node.QdiscReplace(qdisc))
	must(t, "add filter "+p.Name, node.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: link.Attrs().Index, Parent: parent, Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL,
		},
		Fd: p.Prog.FD(), Name: p.Name, DirectAction: true,
	}))
}

func newNetns(t *testing.T) netns.NsHandle {
	t.Helper()
	var h netns.NsHandle
	inNetns(t, netns.None(), func() {
		var err error
		if h, err = netns.New(); err != nil {
			t.Errorf("make a network namespace: %v", err)
		}
	})
	t.Cleanup(func() { h.Close() })
	return h
}

// inNetns runs f on a thread in ns, and ends the thread.
func inNetns(t *testing.T, ns netns.NsHandle, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		// never unlocked: the thread ends with the goroutine
		runtime.LockOSThread()
		if ns.IsOpen() {
			if err := netns.Set(ns); err != nil {
				t.Errorf("enter a namespace: %v", err)
				return
			}
		}
		f()
	}()
	<-done
}

func ipNet(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

func must(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// TestKernelPodsExchangePackets: real pods exchange packets, with both ways of delivery, in both families: the
// gateway's answers let them resolve their next hop, and the programs forward the packets.
func TestKernelPodsExchangePackets(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	client := newPod(t, k, "sl-client", 10, endpointmap.DeliverPeer)
	servers := map[string]*pod{
		"peer":     newPod(t, k, "sl-peer", 20, endpointmap.DeliverPeer),
		"redirect": newPod(t, k, "sl-redirect", 30, endpointmap.DeliverRedirect),
	}
	r := runner{k}
	for name, server := range servers {
		for _, addr := range server.Addrs() {
			t.Run(name+" "+addr.String(), func(t *testing.T) {
				local := client.IPv4
				if addr.Is6() {
					local = client.IPv6
				}
				before := r.counters(t)
				echo(t, client, local, server, addr)
				after := r.counters(t)

				there := event.ForwardedToPod
				if server.Deliver == endpointmap.DeliverRedirect {
					there = event.ForwardedToPodDevice
				}
				want := map[event.Reason]uint64{there: 1}
				want[event.ForwardedToPod]++ // the answer
				for reason, n := range want {
					c := cell{reason, event.Egress}
					if got := after[c].Packets - before[c].Packets; got != n {
						t.Errorf("%v counted %d times, want %d", reason, got, n)
					}
				}
				for c := range after {
					if c.reason.Dropped() && !c.reason.Quiet() && after[c].Packets != before[c].Packets {
						t.Errorf("%d packets dropped as %v", after[c].Packets-before[c].Packets, c.reason)
					}
				}
			})
		}
	}
	t.Run("a VLAN-tagged frame", func(t *testing.T) {
		before := r.counters(t)
		tagged := frame(client.HostMAC, client.MAC, etherVLAN, []byte{0, 5, 8, 0},
			ip4Header{src: client.IPv4, dst: servers["peer"].IPv4, proto: 17}.with(udp(1, 2)))
		inNetns(t, client.ns, func() { sendRaw(t, "eth0", tagged) })
		servicetest.Eventually(t, "the tagged frame to be counted", func() bool {
			c := cell{event.NotIP, event.Egress}
			return r.counters(t)[c].Packets == before[c].Packets+1
		})
	})
}

func TestKernelTruncatedIPHeadersAreNeverForwarded(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	from := newPod(t, k, "sl-from", 10, endpointmap.DeliverPeer)
	to := newPod(t, k, "sl-to", 20, endpointmap.DeliverPeer)
	r := runner{k}
	before := r.counters(t)
	var sent uint64
	inNetns(t, from.ns, func() {
		for _, whole := range [][]byte{
			frame(from.HostMAC, from.MAC, etherIPv4, ip4Header{src: from.IPv4, dst: to.IPv4, proto: 17}.with(udp(1, 2))),
			frame(from.HostMAC, from.MAC, etherIPv6, ip6(from.IPv6, to.IPv6, 17, udp(1, 2))),
		} {
			for n := 14; n < shortestRun(whole); n++ {
				sendRaw(t, "eth0", whole[:n])
				sent++
			}
		}
	})
	var after map[cell]event.Counter
	malformed := cell{event.Malformed, event.Egress}
	servicetest.Eventually(t, "every frame to be counted", func() bool {
		after = r.counters(t)
		return after[malformed].Packets-before[malformed].Packets >= sent
	})
	if got := after[malformed].Packets - before[malformed].Packets; got != sent {
		t.Errorf("%d frames counted as malformed, sent %d", got, sent)
	}
	for c := range after {
		if !c.reason.Dropped() && after[c].Packets != before[c].Packets {
			t.Errorf("%d frames counted as %v", after[c].Packets-before[c].Packets, c.reason)
		}
	}
}

// TestKernelSegmentsOfALargePacketDecideWhetherItFits: a GSO packet is larger than any MTU, but its segments are not:
// it bypasses the stack.
func TestKernelSegmentsOfALargePacketDecideWhetherItFits(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	client := newPod(t, k, "sl-client", 10, endpointmap.DeliverPeer)
	server := newPod(t, k, "sl-server", 20, endpointmap.DeliverPeer)
	r := runner{k}
	for _, addr := range server.Addrs() {
		before := r.counters(t)
		const size = 4 << 20
		stream(t, client, server, addr, size)
		after := r.counters(t)
		peer, tooBig := cell{event.ForwardedToPod, event.Egress}, cell{event.StackTooBig, event.Egress}
		packets := after[peer].Packets - before[peer].Packets
		bytes := after[peer].Bytes - before[peer].Bytes
		if bytes < size || bytes/packets < 3000 {
			t.Errorf("%v: %d packets with %d bytes went to a pod: no large packets", addr, packets, bytes)
		}
		if n := after[tooBig].Packets - before[tooBig].Packets; n != 0 {
			t.Errorf("%v: %d packets were too big", addr, n)
		}
	}
}

// TestKernelPacketsInPiecesAreEvaluatedLikeOthers: a packet whose linear part ends after the Ethernet header is
// evaluated like others: packet sockets build such frames above a page.
func TestKernelPacketsInPiecesAreEvaluatedLikeOthers(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	from := newPodMTU(t, k, "sl-from", 10, endpointmap.DeliverPeer, 9000)
	to := newPodMTU(t, k, "sl-to", 20, endpointmap.DeliverPeer, 9000)
	for _, addr := range to.Addrs() {
		t.Run(addr.String(), func(t *testing.T) {
			var l *net.UDPConn
			inNetns(t, to.ns, func() {
				var err error
				if l, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 0))); err != nil {
					t.Errorf("listen: %v", err)
				}
			})
			if l == nil {
				t.FailNow()
			}
			defer l.Close()
			must(t, "deadline", l.SetReadDeadline(time.Now().Add(servicetest.Patience)))
			want := bytes.Repeat([]byte("piece"), 1200)
			dgram := udp(40000, l.LocalAddr().(*net.UDPAddr).AddrPort().Port(), want...)
			var in []byte
			if addr.Is4() {
				in = frame(from.HostMAC, from.MAC, etherIPv4, ip4Header{src: from.IPv4, dst: addr, proto: 17}.with(dgram))
			} else {
				sum := checksum(slices.Concat(from.IPv6.AsSlice(), addr.AsSlice(), []byte{0, 0, byte(len(dgram) >> 8), byte(len(dgram)), 0, 0, 0, 17}, dgram))
				dgram[6], dgram[7] = byte(sum>>8), byte(sum)
				in = frame(from.HostMAC, from.MAC, etherIPv6, ip6(from.IPv6, addr, 17, dgram))
			}
			inNetns(t, from.ns, func() { sendRaw(t, "eth0", in) })
			got := make([]byte, 9000)
			n, err := l.Read(got)
			if err != nil || !bytes.Equal(got[:n], want) {
				t.Errorf("received %d bytes, %v, want %d", n, err, len(want))
			}
		})
	}
}

// TestKernelPodsLearnWhyAPacketCannotArrive: the node tells a pod that the hop limit of its packet has expired, or that
// it is too big for the other pod: the programs pass such packets to the stack, which answers.
func TestKernelPodsLearnWhyAPacketCannotArrive(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	makeNode(t, k)
	from := newPod(t, k, "sl-from", 10, endpointmap.DeliverPeer)
	to := newPodMTU(t, k, "sl-narrow", 20, endpointmap.DeliverPeer, 1280)
	routeToPod(t, "sl-from", from)
	routeToPod(t, "sl-narrow", to)
	r := runner{k}

	type option struct{ level, name, value int }
	for _, c := range []struct {
		name    string
		dst     netip.Addr
		options []option
		size    int
		reason  event.Reason
		want    error
	}{
		{"IPv4 hops", to.IPv4, []option{{unix.IPPROTO_IP, unix.IP_TTL, 1}, {unix.IPPROTO_IP, unix.IP_RECVERR, 1}}, 10, event.StackTimeExceeded, unix.EHOSTUNREACH},
		{"IPv6 hops", to.IPv6, []option{{unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, 1}, {unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1}}, 10, event.StackTimeExceeded, unix.EHOSTUNREACH},
		{"IPv4 size", to.IPv4, []option{{unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO}, {unix.IPPROTO_IP, unix.IP_RECVERR, 1}}, 1400, event.StackTooBig, unix.EMSGSIZE},
		{"IPv6 size", to.IPv6, []option{{unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO}, {unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1}}, 1400, event.StackTooBig, unix.EMSGSIZE},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := r.counters(t)
			var conn *net.UDPConn
			inNetns(t, from.ns, func() {
				var err error
				if conn, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(c.dst, 9))); err != nil {
					t.Errorf("dial: %v", err)
				}
			})
			if conn == nil {
				t.FailNow()
			}
			defer conn.Close()
			raw, err := conn.SyscallConn()
			must(t, "socket", err)
			must(t, "socket", raw.Control(func(fd uintptr) {
				for _, o := range c.options {
					if err := unix.SetsockoptInt(int(fd), o.level, o.name, o.value); err != nil {
						t.Errorf("option %d: %v", o.name, err)
					}
				}
			}))
			must(t, "deadline", conn.SetDeadline(time.Now().Add(servicetest.Patience)))
			_, err = conn.Write(make([]byte, c.size))
			must(t, "send", err)
			if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, c.want) {
				t.Errorf("the pod got %v, want %v", err, c.want)
			}
			after := r.counters(t)
			for want, n := range map[cell]uint64{{c.reason, event.Egress}: 1, {event.ForwardedFromStack, event.Ingress}: 1} {
				if got := after[want].Packets - before[want].Packets; got != n {
					t.Errorf("%v %v counted %d times, want %d", want.reason, want.direction, got, n)
				}
			}
		})
	}
}

// TestKernelTooBigPacketsArriveInFragments: packets that may be fragmented are fragmented by the stack, into a pod
// whose program sees the fragments and identifies their sender by the mark.
func TestKernelTooBigPacketsArriveInFragments(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	makeNode(t, k)
	from := newPod(t, k, "sl-from", 10, endpointmap.DeliverPeer)
	to := newPodMTU(t, k, "sl-narrow", 20, endpointmap.DeliverPeer, 1280)
	routeToPod(t, "sl-from", from)
	routeToPod(t, "sl-narrow", to)
	r := runner{k}

	var l, conn *net.UDPConn
	inNetns(t, to.ns, func() {
		var err error
		if l, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(to.IPv4, 0))); err != nil {
			t.Errorf("listen: %v", err)
		}
	})
	if l == nil {
		t.FailNow()
	}
	defer l.Close()
	inNetns(t, from.ns, func() {
		var err error
		if conn, err = net.DialUDP("udp", nil, l.LocalAddr().(*net.UDPAddr)); err != nil {
			t.Errorf("dial: %v", err)
		}
	})
	if conn == nil {
		t.FailNow()
	}
	defer conn.Close()
	raw, err := conn.SyscallConn()
	must(t, "socket", err)
	must(t, "socket", raw.Control(func(fd uintptr) {
		if err := unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DONT); err != nil {
			t.Errorf("IP_MTU_DISCOVER: %v", err)
		}
	}))
	want := bytes.Repeat([]byte("12345678"), 175)
	_, err = conn.Write(want)
	must(t, "send", err)
	must(t, "deadline", l.SetReadDeadline(time.Now().Add(servicetest.Patience)))
	got := make([]byte, 2000)
	n, err := l.Read(got)
	if err != nil || !bytes.Equal(got[:n], want) {
		t.Errorf("received %d bytes, %v, want %d", n, err, len(want))
	}
	for c, want := range map[cell]uint64{{event.StackTooBig, event.Egress}: 1, {event.ForwardedFromStack, event.Ingress}: 2} {
		if got := r.counters(t)[c].Packets; got != want {
			t.Errorf("%v %v counted %d times, want %d", c.reason, c.direction, got, want)
		}
	}
}

// makeNode makes the test's namespace a node: it forwards, and has addresses.
func makeNode(t *testing.T, k *Kernel) {
	t.Helper()
	for _, name := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		must(t, name, os.WriteFile("/proc/sys/net/"+name, []byte("1"), 0))
	}
	lo, err := netlink.LinkByName("lo")
	must(t, "find lo", err)
	must(t, "set lo up", netlink.LinkSetUp(lo))
	here, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	must(t, "netlink", err)
	defer here.Close()
	for _, a := range []netip.Addr{host4, host6} {
		addr := &netlink.Addr{IPNet: ipNet(a), Flags: unix.IFA_F_NODAD}
		must(t, "add the host's address", netlink.AddrAdd(lo, addr))
		t.Cleanup(func() {
			if err := netlink.AddrDel(lo, addr); err != nil {
				t.Errorf("delete %v: %v", a, err)
			}
		})
		receives(t, here, a)
	}
	must(t, "host addresses", k.Endpoints.SyncHostAddrs([]netip.Addr{host4, host6}))
}

// routeToPod adds the host's route to the pod.
func routeToPod(t *testing.T, dev string, p *pod) {
	t.Helper()
	for _, a := range p.Addrs() {
		src, family := host4, netlink.FAMILY_V4
		if a.Is6() {
			src, family = host6, netlink.FAMILY_V6
		}
		must(t, "route to "+dev, netlink.RouteReplace(&netlink.Route{
			LinkIndex: int(p.Ifindex), Dst: ipNet(a), Src: src.AsSlice(), Scope: netlink.SCOPE_LINK,
		}))
		must(t, "neighbour on "+dev, netlink.NeighSet(&netlink.Neigh{
			LinkIndex: int(p.Ifindex), Family: family, State: netlink.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: p.MAC[:],
		}))
	}
}

// stream sends n bytes over TCP from one pod to another.
func stream(t *testing.T, client, server *pod, addr netip.Addr, n int) {
	t.Helper()
	var l net.Listener
	inNetns(t, server.ns, func() {
		var err error
		if l, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(addr, 0))); err != nil {
			t.Errorf("listen: %v", err)
		}
	})
	if l == nil {
		t.FailNow()
	}
	defer l.Close()
	got := make(chan int64, 1)
	go func() {
		defer close(got)
		conn, err := l.Accept()
		if err != nil {
			t.Errorf("accept: %v", err)
			return
		}
		defer conn.Close()
		m, err := io.Copy(io.Discard, conn)
		if err != nil {
			t.Errorf("receive: %v", err)
		}
		got <- m
	}()
	var conn net.Conn
	inNetns(t, client.ns, func() {
		var err error
		if conn, err = net.DialTimeout("tcp", l.Addr().String(), servicetest.Patience); err != nil {
			t.Errorf("dial: %v", err)
		}
	})
	if conn == nil {
		l.Close()
		<-got
		t.FailNow()
	}
	_, err := conn.Write(make([]byte, n))
	conn.Close()
	if m := <-got; err != nil || m != int64(n) {
		t.Fatalf("sent %d bytes: %v; %d arrived", n, err, m)
	}
}

// echo sends a datagram from one pod to another and back.
func echo(t *testing.T, client *pod, local netip.Addr, server *pod, addr netip.Addr) {
	t.Helper()
	var there, here *net.UDPConn
	inNetns(t, server.ns, func() {
		var err error
		if there, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 0))); err != nil {
			t.Errorf("listen: %v", err)
		}
	})
	inNetns(t, client.ns, func() {
		var err error
		if here, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(local, 0))); err != nil {
			t.Errorf("listen: %v", err)
		}
	})
	if there == nil || here == nil {
		t.FailNow()
	}
	defer there.Close()
	defer here.Close()
	must(t, "deadline", there.SetDeadline(time.Now().Add(servicetest.Patience)))
	must(t, "deadline", here.SetDeadline(time.Now().Add(servicetest.Patience)))

	port := there.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	msg := []byte("through the datapath")
	_, err := here.WriteToUDPAddrPort(msg, netip.AddrPortFrom(addr, port))
	must(t, "send", err)
	buf := make([]byte, 100)
	n, from, err := there.ReadFromUDPAddrPort(buf)
	must(t, "receive", err)
	_, err = there.WriteToUDPAddrPort(buf[:n], from)
	must(t, "answer", err)
	n, _, err = here.ReadFromUDPAddrPort(buf)
	must(t, "receive the answer", err)
	if !bytes.Equal(buf[:n], msg) || from.Addr().Unmap() != local {
		t.Errorf("got %q, seen as %v, want %q, %v", buf[:n], from, msg, local)
	}
}

func sendRaw(t *testing.T, dev string, frames ...[]byte) {
	link, err := net.InterfaceByName(dev)
	if err != nil {
		t.Errorf("find %s: %v", dev, err)
		return
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Errorf("packet socket: %v", err)
		return
	}
	defer unix.Close(fd)
	for i, b := range frames {
		if i%64 == 63 {
			servicetest.Eventually(t, "the backlog of packets to shrink", func() bool { return backlog(t) < 256 })
		}
		if err := unix.Sendto(fd, b, 0, &unix.SockaddrLinklayer{Ifindex: link.Index}); err != nil {
			t.Errorf("send a frame: %v", err)
			return
		}
	}
}

// backlog returns the length of the longest queue of received packets of a CPU (softnet_backlog_len). All namespaces
// of the machine share the queues. When a queue has 1,000 packets, the kernel also drops the packets of other tests.
func backlog(t *testing.T) (longest uint64) {
	t.Helper()
	b, err := os.ReadFile("/proc/net/softnet_stat")
	must(t, "read the backlog", err)
	for line := range strings.Lines(string(b)) {
		const column = 11
		n, err := strconv.ParseUint(strings.Fields(line)[column], 16, 32)
		must(t, "read the backlog", err)
		longest = max(longest, n)
	}
	return longest
}
