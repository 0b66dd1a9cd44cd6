// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// forged sends packets to node b as forge does, and returns b's counters by reason once all packets are
// counted.
func (f *fabric) forged(t *testing.T, from *fabricNode, packets ...[]byte) map[event.Reason]uint64 {
	t.Helper()
	ns := f.outsider
	if from != nil {
		ns = from.ns
	}
	before := f.b.counters(t)
	f.forge(t, ns, f.b.addr4, packets...)
	got := map[event.Reason]uint64{}
	servicetest.Eventually(t, "the packets to be counted", func() bool {
		clear(got)
		sum := uint64(0)
		for c, n := range f.b.gained(t, before) {
			// without the pod's answers and quiet packets
			if c.direction == event.Ingress && !c.reason.Quiet() {
				got[c.reason] += n
				sum += n
			}
		}
		return sum >= uint64(len(packets))
	})
	return got
}

func wantAll(t *testing.T, what string, got map[event.Reason]uint64, want event.Reason, n int) {
	t.Helper()
	if len(got) != 1 || got[want] != uint64(n) {
		t.Errorf("%s: counted %v, want %v %d times", what, got, want, n)
	}
}

// fromA returns a packet from a's pod to b's pod, as b receives it from the tunnel.
func (f *fabric) fromA(vni identity.Numeric, proto byte, payload []byte) []byte {
	a, b := f.a.pod, f.b.pod
	packet := ip4Header{src: a.IPv4, dst: b.IPv4, proto: proto}.with(payload)
	return vxlan(uint32(vni), frame(b.MAC, a.MAC, etherIPv4, packet))
}

// befriended makes b's pod admit only friends, including a's pod. stranger is given the identity of another
// friend.
func (f *fabric) befriended(t *testing.T) {
	t.Helper()
	(&theatre{runner: f.b.runner}).putTables(t)
	update(t, f.b.k, bpf.MapsMapSlId, uint32(otherFriend), knownWord(7, 0, 2))
	setPolicy(t, f.b.k, f.b.pod.Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: friends})
	f.b.says(t, netip.PrefixFrom(f.a.pod.IPv4, 32), friend, 1)
}

const otherFriend = stranger + 1

// evaluatedAgain returns how often node b has evaluated connections again.
func (f *fabric) evaluatedAgain(t *testing.T) (sum uint64) {
	t.Helper()
	var perCPU []uint64
	stats, key := f.b.k.Pins.Map(bpf.MapsMapSlCtStats), uint32(bpf.MapsSlCtStatSL_CT_STAT_REDECIDED)
	must(t, "read a counter", stats.Lookup(key, &perCPU))
	for _, n := range perCPU {
		sum += n
	}
	return sum
}

// TestKernelRelabelIsSeenByVNIFirst shows that a pod with a changed identity is evaluated with it from the
// first packet whose tunnel key has it, before the ipcache is updated.
func TestKernelRelabelIsSeenByVNIFirst(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	f.befriended(t)
	dns := udp(4000, 80, 1)
	syn, ack := tcp(4001, 80, flagSYN), tcp(4001, 80, flagACK)
	for _, step := range []struct {
		name    string
		vni     identity.Numeric
		proto   byte
		payload []byte
		want    event.Reason
	}{
		{"a datagram of a friend", friend, 17, dns, event.ForwardedToPod},
		{"of a stranger", stranger, 17, dns, event.PolicyDenied},
		{"of a friend again", friend, 17, dns, event.ForwardedToPod},
		{"a connection of a friend", friend, 6, syn, event.ForwardedToPod},
		{"its segment of a stranger", stranger, 6, ack, event.PolicyDenied},
		{"its segment of a friend", friend, 6, ack, event.ForwardedToPod},
		{"of an identity that is not known", 4000, 17, udp(4002, 80, 1), event.IdentityUnknown},
	} {
		wantAll(t, step.name, f.forged(t, f.a, f.fromA(step.vni, step.proto, step.payload)), step.want, 1)
	}
}

// TestKernelRelabelledEntryIsEvaluatedOnce shows that a connection takes over the identity of the new
// evaluation, so that later packets are not evaluated again.
func TestKernelRelabelledEntryIsEvaluatedOnce(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	f.befriended(t)
	dns := udp(4000, 80, 1)
	wantAll(t, "a friend", f.forged(t, f.a, f.fromA(friend, 17, dns)), event.ForwardedToPod, 1)
	before := f.evaluatedAgain(t)
	other := f.fromA(otherFriend, 17, dns)
	// a single packet: two CPUs could both evaluate it at the same moment
	wantAll(t, "another friend", f.forged(t, f.a, other), event.ForwardedToPod, 1)
	wantAll(t, "the same friend", f.forged(t, f.a, other, other, other, other), event.ForwardedToPod, 4)
	if n := f.evaluatedAgain(t) - before; n != 1 {
		t.Errorf("the connection was evaluated again %d times, want once", n)
	}
}

// thirdNode makes the outsider a node with the pod CIDR 10.244.3.0/24.
func (f *fabric) thirdNode(t *testing.T) {
	t.Helper()
	must(t, "SetNode", f.b.k.Nodes.SetNode(3, nodemap.Node{IPv4: f.outside, Addrs: []netip.Addr{f.outside}}))
	f.b.says(t, netip.MustParsePrefix("10.244.3.0/24"), identity.UnknownInCluster, 3)
}

// TestKernelNodeDoesNotEnterConnectionsOfAnother shows that packets of an open connection are dropped if they
// come from another node than the sender's, and that the connection is not changed (INV-92).
func TestKernelNodeDoesNotEnterConnectionsOfAnother(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	f.thirdNode(t)
	packet := f.fromA(f.a.pod.Identity, 17, udp(4000, 53, 1))
	wantAll(t, "the sender's node", f.forged(t, f.a, packet), event.ForwardedToPod, 1)
	before := f.evaluatedAgain(t)
	wantAll(t, "another node", f.forged(t, nil, packet, packet), event.SpoofedNode, 2)
	segment := f.fromA(f.a.pod.Identity, 6, tcp(4000, 80, flagACK))
	wantAll(t, "a segment of no connection", f.forged(t, nil, segment), event.SpoofedNode, 1)
	wantAll(t, "the sender's node again", f.forged(t, f.a, packet), event.ForwardedToPod, 1)
	if n := f.evaluatedAgain(t) - before; n != 0 {
		t.Errorf("the connection was evaluated again %d times", n)
	}
}

// TestKernelMovedAddressIsAnothersAtOnce shows that an address that has moved to another node, with another
// identity, keeps no verdict: neither for packets from the new node nor for late packets from the old one.
func TestKernelMovedAddressIsAnothersAtOnce(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	f.befriended(t)
	f.thirdNode(t)
	dns := udp(4000, 80, 1)
	wantAll(t, "a friend on a", f.forged(t, f.a, f.fromA(friend, 17, dns)), event.ForwardedToPod, 1)
	f.b.says(t, netip.PrefixFrom(f.a.pod.IPv4, 32), stranger, 3)
	wantAll(t, "a friend on a, still", f.forged(t, f.a, f.fromA(friend, 17, dns)), event.SpoofedNode, 1)
	wantAll(t, "a stranger on the third node", f.forged(t, nil, f.fromA(stranger, 17, dns)), event.PolicyDenied, 1)
	wantAll(t, "a friend on the third node", f.forged(t, nil, f.fromA(friend, 17, dns)), event.ForwardedToPod, 1)
}

// TestKernelFragmentsOfOneNodeDoNotServeAnother shows that the ports of a first fragment only apply to later
// fragments from the same node.
func TestKernelFragmentsOfOneNodeDoNotServeAnother(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	f.thirdNode(t)
	a, b := f.a.pod, f.b.pod
	var pieces [][]byte
	for _, p := range fragments4(a.IPv4, b.IPv4, 77, udp(4000, 53, make([]byte, 2000)...), 1000) {
		pieces = append(pieces, vxlan(uint32(a.Identity), frame(b.MAC, a.MAC, etherIPv4, p)))
	}
	wantAll(t, "the first", f.forged(t, f.a, pieces[0]), event.ForwardedToPod, 1)
	wantAll(t, "a later one of another node", f.forged(t, nil, pieces[1]), event.FragmentUnknown, 1)
	wantAll(t, "those of its node", f.forged(t, f.a, pieces[1:]...), event.ForwardedToPod, len(pieces)-1)
}

// TestKernelIPv6UnderlayHasChecksums shows that all outer packets over IPv6 have a checksum, because receivers
// drop those without.
func TestKernelIPv6UnderlayHasChecksums(t *testing.T) {
	f := newFabric(t, RoutingOverlay, true)
	for i, addr := range f.b.pod.Addrs() {
		echo(t, f.a.pod, f.a.pod.Addrs()[i], f.b.pod, addr)
	}
	inNetns(t, f.b.ns, func() {
		b, err := os.ReadFile("/proc/thread-self/net/snmp6")
		if err != nil {
			t.Error(err)
		}
		for line := range strings.Lines(string(b)) {
			if fields := strings.Fields(line); fields[0] == "Udp6InCsumErrors" && fields[1] != "0" {
				t.Errorf("%s packets without a checksum", fields[1])
			}
			if fields := strings.Fields(line); fields[0] == "Udp6InDatagrams" && fields[1] == "0" {
				t.Error("no packet has come by IPv6")
			}
		}
	})
}

// TestKernelTooBigForTheTunnelIsAnswered shows that a pod learns the path MTU to another node, in both
// families, and that TCP connections use it: segments that the kernel splits later count by their own size.
func TestKernelTooBigForTheTunnelIsAnswered(t *testing.T) {
	eachUnderlay(t, func(t *testing.T, f *fabric, _ Routing) {
		const narrow = 1350
		for _, pair := range [][2]*fabricNode{{f.a, f.b}, {f.b, f.a}} {
			pair[0].narrow(t, pair[1], narrow)
		}
		for i, addr := range f.b.pod.Addrs() {
			header := []int{20, 40}[i] + 8
			if got := learnedMTU(t, f.a.pod, addr, fabricMTU-50-header); got != narrow {
				t.Errorf("the pod sends at most %d bytes to %v, want %d", got, addr, narrow)
			}
			streamPods(t, f.a.pod, f.b.pod, addr, 1<<20)
		}
	})
}

// narrow lowers the MTU from a node to another.
func (n *fabricNode) narrow(t *testing.T, other *fabricNode, mtu uint16) {
	t.Helper()
	nodes, err := n.k.Nodes.Nodes()
	must(t, "Nodes", err)
	ways := nodes[uint16(other.number)].NextHops
	for i := range ways {
		ways[i].MTU = mtu
	}
	must(t, "SetNextHops", n.k.Nodes.SetNextHops(uint16(other.number), ways[0], ways[1]))
	v4, v6 := other.ranges()
	for _, p := range []netip.Prefix{v4, v6} {
		dst := &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
		routes, err := n.h.RouteListFiltered(family(p.Addr()), &netlink.Route{Dst: dst}, netlink.RT_FILTER_DST)
		must(t, "list routes", err)
		for i := range routes {
			routes[i].MTU = int(mtu)
			must(t, "narrow a route", n.h.RouteReplace(&routes[i]))
		}
	}
}

func family(a netip.Addr) int {
	if a.Is4() {
		return netlink.FAMILY_V4
	}
	return netlink.FAMILY_V6
}

// learnedMTU sends datagrams that must not be fragmented until the pod's kernel rejects them, and returns the
// MTU that it has learned.
func learnedMTU(t *testing.T, p *pod, addr netip.Addr, size int) (mtu int) {
	t.Helper()
	inNetns(t, p.ns, func() {
		conn, err := net.Dial("udp", netip.AddrPortFrom(addr, 9).String())
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		raw, err := conn.(*net.UDPConn).SyscallConn()
		if err != nil {
			t.Error(err)
			return
		}
		level, discover, get := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_MTU
		if addr.Is6() {
			level, discover, get = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_MTU
		}
		raw.Control(func(fd uintptr) { //nolint:errcheck // an open socket
			if err := unix.SetsockoptInt(int(fd), level, discover, unix.IP_PMTUDISC_DO); err != nil {
				t.Error(err)
			}
		})
		servicetest.Eventually(t, "a refusal of what is too big", func() bool {
			_, err := conn.Write(make([]byte, size))
			return err != nil
		})
		raw.Control(func(fd uintptr) { //nolint:errcheck // an open socket
			if mtu, err = unix.GetsockoptInt(int(fd), level, get); err != nil {
				t.Error(err)
			}
		})
	})
	return mtu
}

// streamPods sends bytes over a TCP connection from one pod to another and back.
func streamPods(t *testing.T, from, to *pod, addr netip.Addr, size int) {
	t.Helper()
	var l net.Listener
	var conn net.Conn
	var err error
	inNetns(t, to.ns, func() { l, err = net.Listen("tcp", netip.AddrPortFrom(addr, 0).String()) })
	must(t, "listen", err)
	defer l.Close()
	go func() {
		peer, err := l.Accept()
		if err != nil {
			return
		}
		io.Copy(peer, peer) //nolint:errcheck // the other end reports errors
		peer.Close()
	}()
	inNetns(t, from.ns, func() { conn, err = net.DialTimeout("tcp", l.Addr().String(), servicetest.Patience) })
	must(t, "connect", err)
	defer conn.Close()
	must(t, "deadline", conn.SetDeadline(time.Now().Add(servicetest.Patience)))
	data := bytes.Repeat([]byte("sluice! "), size/8)
	sent := make(chan error, 1)
	go func() {
		_, err := conn.Write(data)
		sent <- err
	}()
	got := make([]byte, size)
	if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes to %v and back: %v", size, addr, err)
	}
	must(t, "send", <-sent)
}

// rawPacket sends an IP packet from the outsider to a node's device.
func (f *fabric) rawPacket(t *testing.T, n *fabricNode, ethertype uint16, packet []byte) {
	t.Helper()
	inNetns(t, f.outsider, func() {
		sendRaw(t, "up0", frame([6]byte(n.uplink.Attrs().HardwareAddr), [6]byte{2, 0, 0, 0, 9, 9}, ethertype, packet))
	})
}

// TestKernelPodSourcesPastTheTunnelAreDropped shows that a packet with the address of another node's pod that
// did not come through the tunnel does not reach a pod, even without a firewall (INV-93).
func TestKernelPodSourcesPastTheTunnelAreDropped(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	before := f.b.counters(t)
	f.rawPacket(t, f.b, etherIPv4, ip4Header{src: f.a.pod.IPv4, dst: f.b.pod.IPv4, proto: 17}.with(udp(4000, 53, 1)))
	f.rawPacket(t, f.b, etherIPv6, ip6(f.a.pod.IPv6, f.b.pod.IPv6, 17, udp(4000, 53, 1)))
	c := cell{event.SpoofedNode, event.Ingress}
	servicetest.Eventually(t, "the packets to be dropped", func() bool {
		return f.b.counters(t)[c].Packets == before[c].Packets+2
	})
	if n := f.b.gained(t, before)[cell{event.ForwardedFromStack, event.Ingress}]; n != 0 {
		t.Errorf("%d packets have entered the pod", n)
	}
}

// TestKernelUplinkRefusesAddressesOfThisNode shows that native routing accepts no packet from the network with
// an address of the node or of its pods.
func TestKernelUplinkRefusesAddressesOfThisNode(t *testing.T) {
	f := newFabric(t, RoutingNative, false)
	before := f.b.counters(t)
	other := f.b.newPod(t, 20)
	nobody := netip.MustParseAddr("10.244.2.99")
	for _, src := range []netip.Addr{other.IPv4, nobody, f.b.over4, f.b.addr4} {
		f.rawPacket(t, f.b, etherIPv4, ip4Header{src: src, dst: f.b.pod.IPv4, proto: 17}.with(udp(4000, 53, 1)))
	}
	f.rawPacket(t, f.b, etherIPv6, ip6(other.IPv6, f.b.pod.IPv6, 17, udp(4000, 53, 1)))
	c := cell{event.SpoofedIP, event.Ingress}
	servicetest.Eventually(t, "the packets to be dropped", func() bool {
		return f.b.counters(t)[c].Packets == before[c].Packets+5
	})
}

// TestKernelForwardedIsNotANode shows that packets that a node forwards into the tunnel with its own address
// belong to the world, and that it forwards none with another node's address (INV-95).
func TestKernelForwardedIsNotANode(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	(&theatre{runner: f.b.runner}).putTables(t)
	update(t, f.b.k, bpf.MapsMapSlId, uint32(identity.RemoteNode), knownWord(7, 4, 1))
	setPolicy(t, f.b.k, f.b.pod.Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: friends})
	if err := exchange(t, f.a.ns, f.a.addr4, f.b.pod.ns, f.b.pod.IPv4); err != nil {
		t.Fatalf("the node itself: %v", err)
	}
	packet := ip4Header{src: f.outside, dst: f.b.pod.IPv4, proto: 17}.with(udp(4000, 53, 1))
	before := f.a.counters(t)
	f.rawPacket(t, f.a, etherIPv4, packet)
	servicetest.Eventually(t, "the packet to be dropped by a", func() bool {
		return f.a.gained(t, before)[cell{event.Transit, event.Egress}] == 1
	})

	c, err := nftables.New(nftables.WithNetNSFd(int(f.a.ns)))
	must(t, "nftables", err)
	table := c.AddTable(&nftables.Table{Name: "masquerade", Family: nftables.TableFamilyIPv4})
	chain := c.AddChain(&nftables.Chain{
		Name: "post", Table: table, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting,
		Priority: nftables.ChainPriorityNATSource,
	})
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: append([]byte("sltun"), make([]byte, 11)...)},
		&expr.Immediate{Register: 1, Data: f.a.over4.AsSlice()},
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1, RegAddrMax: 1},
	}})
	must(t, "masquerade", c.Flush())
	beforeB := f.b.counters(t)
	f.rawPacket(t, f.a, etherIPv4, ip4Header{src: f.outside, dst: f.b.pod.IPv4, proto: 17}.with(udp(4001, 53, 1)))
	servicetest.EventuallyNil(t, "the packet to be denied by b", func() error {
		gained := f.b.gained(t, beforeB)
		if gained[cell{event.PolicyDenied, event.Ingress}] != 1 {
			return fmt.Errorf("b counted %v, a %v", gained, f.a.gained(t, before))
		}
		return nil
	})
}

// TestKernelOuterMarkDoesNotReachThePod shows that the inner packet does not keep the mark of the outer packet,
// neither in a pod nor on the host.
func TestKernelOuterMarkDoesNotReachThePod(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	c, err := nftables.New(nftables.WithNetNSFd(int(f.b.ns)))
	must(t, "nftables", err)
	table := c.AddTable(&nftables.Table{Name: "marks", Family: nftables.TableFamilyINet})
	chain := c.AddChain(&nftables.Chain{
		Name: "pre", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting,
		Priority: nftables.ChainPriorityRaw,
	})
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: append([]byte("up0"), make([]byte, 13)...)},
		&expr.Immediate{Register: 1, Data: binary.NativeEndian.AppendUint32(nil, 0x5001)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
	}})
	must(t, "mark packets", c.Flush())
	for what, c := range map[string]struct {
		ns   netns.NsHandle
		addr netip.Addr
		want uint32
	}{"pod": {f.b.pod.ns, f.b.pod.IPv4, 0}, "host": {f.b.ns, f.b.over4, 0x300}} {
		if got := f.receivedMark(t, c.ns, c.addr); got != c.want {
			t.Errorf("the packet has mark %#x in the %s, want %#x", got, what, c.want)
		}
	}
}

// receivedMark returns the mark of a datagram from a's pod at its receiver.
func (f *fabric) receivedMark(t *testing.T, ns netns.NsHandle, addr netip.Addr) (mark uint32) {
	t.Helper()
	var l *net.UDPConn
	var err error
	inNetns(t, ns, func() { l, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 0))) })
	must(t, "listen", err)
	defer l.Close()
	raw, err := l.SyscallConn()
	must(t, "socket", err)
	must(t, "socket", raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVMARK, 1)
	}))
	must(t, "SO_RCVMARK", err)
	inNetns(t, f.a.pod.ns, func() {
		var conn net.Conn
		if conn, err = net.Dial("udp", l.LocalAddr().String()); err == nil {
			_, err = conn.Write([]byte("marked?"))
			conn.Close()
		}
	})
	must(t, "send", err)
	must(t, "deadline", l.SetReadDeadline(time.Now().Add(servicetest.Patience)))
	b, oob := make([]byte, 100), make([]byte, 100)
	_, n, _, _, err := l.ReadMsgUDP(b, oob)
	must(t, "receive", err)
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	must(t, "control messages", err)
	for _, m := range messages {
		if m.Header.Level == unix.SOL_SOCKET && m.Header.Type == unix.SO_MARK {
			mark = binary.NativeEndian.Uint32(m.Data)
		}
	}
	return mark
}
