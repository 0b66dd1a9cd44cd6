// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// TestKernelSocketMarksOpenNothing: a process in the host's namespace that may set marks (CAP_NET_RAW is enough since
// Linux 5.17) is evaluated like one that sets none.
func TestKernelSocketMarksOpenNothing(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	makeNode(t, k)
	p := newPod(t, k, "slmark", 33, endpointmap.DeliverPeer)
	routeToPod(t, "slmark", p)
	th := &theatre{runner: runner{k}, pods: map[string]endpointmap.Endpoint{}}
	th.putTables(t)
	var l *net.UDPConn
	inNetns(t, p.ns, func() {
		var err error
		l, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(p.IPv4, 5353)))
		must(t, "listen in the pod", err)
	})
	defer l.Close()
	send := func(mark uint32) {
		t.Helper()
		d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
			return c.Control(func(fd uintptr) {
				must(t, "set the mark", unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(mark)))
			})
		}}
		c, err := d.Dial("udp", netip.AddrPortFrom(p.IPv4, 5353).String())
		must(t, "dial", err)
		defer c.Close()
		_, err = c.Write([]byte("marked"))
		must(t, "send", err)
	}
	for name, policy := range map[string]endpointmap.Policy{
		"deny": {Egress: nodetable.Deny, Ingress: nodetable.Deny}, "friends": {Egress: nodetable.Deny, Ingress: friends},
	} {
		setPolicy(t, k, p.Slot, policy)
		denied := func() uint64 { return th.counters(t)[cell{event.PolicyDenied, event.Ingress}].Packets }
		before := denied()
		marks := []uint32{markEvaluated | p.Ifindex<<16, markPod | uint32(friend)<<16, 0x0a00 | uint32(friend)<<16}
		for _, mark := range marks {
			send(mark)
		}
		servicetest.Eventually(t, name+": every datagram is denied", func() bool { return denied() == before+uint64(len(marks)) })
	}
	must(t, "set a deadline", l.SetReadDeadline(time.Unix(1, 0)))
	if n, from, err := l.ReadFromUDPAddrPort(make([]byte, 100)); err == nil {
		t.Errorf("%d bytes of %v have arrived", n, from)
	}
}

// newUplink adds a device to the node that is up; its peer is in the same namespace.
func newUplink(t *testing.T) netlink.Link {
	t.Helper()
	must(t, "add an uplink", netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "slup0", MTU: 1500}, PeerName: "slup1"}))
	up, err := netlink.LinkByName("slup0")
	must(t, "find slup0", err)
	t.Cleanup(func() { must(t, "delete slup0", netlink.LinkDel(up)) })
	must(t, "set slup0 up", netlink.LinkSetUp(up))
	return up
}

// TestKernelPodsCannotSetThePathMTUOfOthers: a single forged ICMP error of a pod about a packet of the node would set
// the path MTU of the node, and of all packets that it forwards, for ten minutes.
func TestKernelPodsCannotSetThePathMTUOfOthers(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	makeNode(t, k)
	evil := newPod(t, k, "slevil", 33, endpointmap.DeliverPeer)
	routeToPod(t, "slevil", evil)
	up := newUplink(t)
	node := map[bool]netip.Addr{false: netip.MustParseAddr("203.0.113.1"), true: netip.MustParseAddr("2001:db8:113::1")}
	other := map[bool]netip.Addr{false: netip.MustParseAddr("203.0.113.9"), true: netip.MustParseAddr("2001:db8:113::9")}
	for v6, bits := range map[bool]int{false: 24, true: 64} {
		must(t, "add an address", netlink.AddrAdd(up, &netlink.Addr{
			IPNet: &net.IPNet{IP: node[v6].AsSlice(), Mask: net.CIDRMask(bits, node[v6].BitLen())}, Flags: unix.IFA_F_NODAD,
		}))
	}
	must(t, "host addresses", k.Endpoints.SyncHostAddrs([]netip.Addr{host4, host6, node[false], node[true]}))

	r := runner{k}
	invalid := func() uint64 { return r.counters(t)[cell{event.ConnectionInvalid, event.Egress}].Packets }
	before := invalid()
	inner4 := ip4Header{src: node[false], dst: other[false], proto: 1}.with(icmp(0, 0, make([]byte, 64)...))
	msg := icmp(3, 4, inner4...)
	binary.BigEndian.PutUint16(msg[6:], 100)
	binary.BigEndian.PutUint16(msg[2:], checksum(msg))
	inner6 := ip6(node[true], other[true], 58, icmp(129, 0, make([]byte, 64)...))
	msg6 := icmp(2, 0, inner6...)
	binary.BigEndian.PutUint32(msg6[4:], 1280)
	inNetns(t, evil.ns, func() {
		sendRaw(t, "eth0", frame(evil.HostMAC, evil.MAC, etherIPv4, ip4Header{src: evil.IPv4, dst: node[false], proto: 1}.with(msg)))
		sendRaw(t, "eth0", frame(evil.HostMAC, evil.MAC, etherIPv6, ip6(evil.IPv6, node[true], 58, icmp6(evil.IPv6, node[true], msg6))))
	})
	servicetest.Eventually(t, "both errors are dropped", func() bool { return invalid() == before+2 })
	for _, dst := range other {
		routes, err := netlink.RouteGet(dst.AsSlice())
		must(t, "route to "+dst.String(), err)
		for _, route := range routes {
			if route.MTU != 0 {
				t.Errorf("the path MTU to %v is %d", dst, route.MTU)
			}
		}
	}
}

// TestKernelHalfOpenConnectionsDoNotStay: connections of which only a SYN and its answer were seen are removed after
// the opening timeout, so that a sender of SYNs with forged addresses occupies no capacity beyond that.
func TestKernelHalfOpenConnectionsDoNotStay(t *testing.T) {
	th := newTheatre(t, false)
	col, cl := newCollector(t, th.k, conntrack.CollectorOptions{})
	const n = 500
	for port := range uint16(n) {
		th.expect(t, say("world", "b", segment(1000+port, 80, flagSYN), event.ForwardedFromStack))
		th.expect(t, say("b", "world", segment(80, 1000+port, flagSYN|flagACK), event.ForwardedOutside))
	}
	cl.now.Store(conntrack.MonotonicSeconds())
	if p := collect(t, col); p.Live[0] != n {
		t.Fatalf("%d connections are open, want %d", p.Live[0], n)
	}
	cl.now.Add(61)
	if p := collect(t, col); p.Live[0] != 0 || p.Expired != n {
		t.Errorf("a minute later %d are open, %d expired, want 0 and %d", p.Live[0], p.Expired, n)
	}
}

// TestKernelAQuotationBehindThePacketSetsNoPathMTU: bytes behind the end of an IP packet in its frame do not count as
// quoted packet: in a fragmented error, the next fragment supplies others.
func TestKernelAQuotationBehindThePacketSetsNoPathMTU(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	makeNode(t, k)
	evil := newPod(t, k, "slevil", 33, endpointmap.DeliverPeer)
	routeToPod(t, "slevil", evil)
	up := newUplink(t)
	node, other := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.9")
	must(t, "add an address", netlink.AddrAdd(up, &netlink.Addr{IPNet: &net.IPNet{IP: node.AsSlice(), Mask: net.CIDRMask(24, 32)}}))
	must(t, "host addresses", k.Endpoints.SyncHostAddrs([]netip.Addr{host4, host6, node}))

	r := runner{k}
	seen := func() (n uint64) {
		all := r.counters(t)
		for _, reason := range []event.Reason{event.ForwardedToHost, event.ConnectionInvalid, event.FragmentUnknown} {
			n += all[cell{reason, event.Egress}].Packets
		}
		return n
	}
	msg := icmp(3, 4, ip4Header{src: node, dst: other, proto: 1}.with(icmp(0, 0, make([]byte, 64)...))...)
	binary.BigEndian.PutUint16(msg[6:], 600)
	binary.BigEndian.PutUint16(msg[2:], checksum(msg))
	trailer := ip4Header{src: node, dst: evil.IPv4, proto: 1}.with(icmp(0, 0, make([]byte, 64)...))
	piece := func(frag uint16, payload, behind []byte) []byte {
		p := ip4Header{src: evil.IPv4, dst: node, proto: 1, frag: frag}.with(payload)
		return frame(evil.HostMAC, evil.MAC, etherIPv4, append(p, behind...))
	}
	before := seen()
	inNetns(t, evil.ns, func() {
		sendRaw(t, "eth0", piece(0x2000, msg[:8], trailer))
		sendRaw(t, "eth0", piece(1, msg[8:], nil))
	})
	servicetest.Eventually(t, "both pieces are counted", func() bool { return seen() == before+2 })
	routes, err := netlink.RouteGet(other.AsSlice())
	must(t, "route", err)
	for _, route := range routes {
		if route.MTU != 0 {
			t.Errorf("the path MTU to %v is %d", other, route.MTU)
		}
	}
}

// TestKernelAQuotationBehindThePacketIsNone: neither fragment of such an error passes the programs.
func TestKernelAQuotationBehindThePacketIsNone(t *testing.T) {
	th := newTheatre(t, false)
	_, ctx, in := th.frame(say("a", "host", failure(3, "host", "a", datagram(53, 4000)), 0))
	binary.BigEndian.PutUint16(in[14+2:], 28)
	if o := th.run(t, program.FromPod, in, ctx, 0); o.reason != event.ConnectionInvalid {
		t.Errorf("an error of 8 bytes with a quoted packet behind its end: %v, want %v", o.reason, event.ConnectionInvalid)
	}
}

// TestKernelDeniedFragmentsTakeNoRoom: first fragments that policy denies do not evict the records of others.
func TestKernelDeniedFragmentsTakeNoRoom(t *testing.T) {
	th := newTheatre(t, false)
	setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{})
	setPolicy(t, th.k, th.pods["b"].Slot, endpointmap.Policy{Egress: nodetable.Allow})
	long := func(*theatre) (byte, []byte) { return 17, udp(4000, 53, make([]byte, 40)...) }
	of := func(who string) skbContext { return skbContext{Ifindex: th.pods[who].Ifindex} }
	good := th.pieces("b", "world", long, 1, 24)
	if o := th.run(t, program.FromPod, good[0], of("b"), 0); o.reason != event.ForwardedOutside {
		t.Fatalf("the first fragment: %v", o.reason)
	}
	ctx := of("a")
	for id := range uint32(20_000) {
		in := th.pieces("a", "world", long, id, 24)[0]
		v, err := th.k.program(program.FromPod).Run(&ebpf.RunOptions{Data: in, DataOut: make([]byte, 512), Context: ctx})
		if err != nil || v != verdictShot {
			t.Fatalf("a denied fragment: %d, %v", v, err)
		}
	}
	if o := th.run(t, program.FromPod, good[1], of("b"), 0); o.reason != event.ForwardedOutside {
		t.Errorf("the second fragment: %v, want %v", o.reason, event.ForwardedOutside)
	}
}
