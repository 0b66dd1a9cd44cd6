// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// newDirectFabric is an overlay on IPv4 whose nodes use the direct path in both directions.
func newDirectFabric(t *testing.T, change func(*Options)) *fabric {
	t.Helper()
	return newDirectFabricOn(t, cable, change)
}

func newDirectFabricOn(t *testing.T, kind uplinkKind, change func(*Options)) *fabric {
	t.Helper()
	requireKernel(t, 6, 6, "tcx")
	f := makeFabric(t, RoutingOverlay, false, kind, func(o *Options) {
		o.Shortcut, o.TunnelPort = true, 4789
		change(o)
	})
	for _, pair := range [][2]*fabricNode{{f.a, f.b}, {f.b, f.a}} {
		n, other := pair[0], pair[1]
		must(t, "SetDirect", n.k.Nodes.SetDirect(uint16(other.number), n.directTo(other)))
		inNetns(t, n.ns, func() {
			// the tests count the packets of the device: without the kernel's own ones
			must(t, "disable IPv6 of the device", os.WriteFile("/proc/sys/net/ipv6/conf/sltun/disable_ipv6", []byte("1"), 0))
			l, err := link.AttachTCX(link.TCXOptions{
				Interface: n.uplink.Attrs().Index, Program: n.k.program(program.FromUnderlay), Attach: ebpf.AttachTCXIngress,
			})
			must(t, "attach "+program.FromUnderlay, err)
			t.Cleanup(func() { l.Close() })
		})
		n.shortcut(t, true)
	}
	return f
}

func (n *fabricNode) directTo(other *fabricNode) nodemap.Direct {
	return nodemap.Direct{Ifindex: uint32(n.uplink.Attrs().Index), Via: other.addr4, Local: n.addr4}
}

// shortcut allows or forbids the node's direct paths.
func (n *fabricNode) shortcut(t *testing.T, on bool) {
	t.Helper()
	s := nodemap.Shortcut{Lowest: 32768, Highest: 60999}
	if on {
		s.Until = math.MaxUint64
	}
	must(t, "SetShortcut", n.k.Nodes.SetShortcut(s))
	if got, err := n.k.Nodes.Shortcut(); err != nil || got.Until != s.Until {
		t.Errorf("Shortcut: %+v, %v, want %+v", got, err, s)
	}
}

// throughDevice returns how many packets a node's tunnel device has sent and received.
func (n *fabricNode) throughDevice(t *testing.T) (sent, received uint64) {
	t.Helper()
	l, err := n.h.LinkByName("sltun")
	must(t, "find the tunnel", err)
	s := l.Attrs().Statistics
	return s.TxPackets, s.RxPackets
}

// wantThroughDevice checks how many packets a's device has sent and b's has received since.
func (f *fabric) wantThroughDevice(t *testing.T, what string, run func(), sent, received uint64) {
	t.Helper()
	sentBefore, _ := f.a.throughDevice(t)
	_, receivedBefore := f.b.throughDevice(t)
	run()
	sentAfter, _ := f.a.throughDevice(t)
	_, receivedAfter := f.b.throughDevice(t)
	if s, r := sentAfter-sentBefore, receivedAfter-receivedBefore; s != sent || r != received {
		t.Errorf("%s: device of a sent %d packets, want %d; device of b received %d, want %d", what, s, sent, r, received)
	}
}

// TestKernelDirectPathBypassesTheDevices shows that TCP between pods of two nodes passes neither tunnel device, in
// both families and of any size, and that it is counted like other packets in the tunnel. The first datagram of a
// connection is received by the device. Without permission all packets pass the devices.
func TestKernelDirectPathBypassesTheDevices(t *testing.T) {
	f := newDirectFabric(t, func(*Options) {})
	for i, addr := range f.b.pod.Addrs() {
		beforeA, beforeB := f.a.counters(t), f.b.counters(t)
		f.wantThroughDevice(t, "TCP", func() { streamPods(t, f.a.pod, f.b.pod, addr, 1<<20) }, 0, 0)
		for who, gained := range map[string]map[cell]uint64{"a": f.a.gained(t, beforeA), "b": f.b.gained(t, beforeB)} {
			wantNoDrops(t, who, gained)
			for _, c := range []cell{{event.ForwardedOverlay, event.Egress}, {event.ForwardedToPod, event.Ingress}} {
				if gained[c] < 3 {
					t.Errorf("%s: %v counted %d times, of %v", who, c.reason, gained[c], gained)
				}
			}
		}
		f.wantThroughDevice(t, "UDP", func() { echo(t, f.a.pod, f.a.pod.Addrs()[i], f.b.pod, addr) }, 0, 1)
		f.a.shortcut(t, false)
		// the end of the stream may still be acknowledged
		sent, _ := f.a.throughDevice(t)
		echo(t, f.a.pod, f.a.pod.Addrs()[i], f.b.pod, addr)
		if now, _ := f.a.throughDevice(t); now == sent {
			t.Error("without permission, UDP has not passed the device")
		}
		f.b.shortcut(t, false)
		sent, _ = f.b.throughDevice(t)
		streamPods(t, f.a.pod, f.b.pod, addr, 1<<16)
		if now, _ := f.b.throughDevice(t); now == sent {
			t.Error("without permission, TCP has not passed the device")
		}
		f.a.shortcut(t, true)
		f.b.shortcut(t, true)
	}
}

// outerPacket is a tunnel packet on the wire, from its outer Ethernet header on. Its inner packet is a SYN.
type outerPacket []byte

// Offsets in it.
const (
	outerIP   = 14
	outerUDP  = outerIP + 20
	outerVNI  = outerUDP + 8 + 4
	innerIP   = outerUDP + 8 + 8 + 14
	innerPort = innerIP + 20
)

// newOuter returns a's tunnel packet to b with an inner packet of TCP.
func (f *fabric) newOuter(vni identity.Numeric, src, dst netip.Addr, sport uint16) outerPacket {
	return f.newOuterWith(vni, src, dst, 6, tcp(sport, 80, flagSYN))
}

// newOuterWith returns a's tunnel packet to b with a transport header and payload.
func (f *fabric) newOuterWith(vni identity.Numeric, src, dst netip.Addr, proto byte, payload []byte) outerPacket {
	a, b := f.a.pod, f.b.pod
	ethertype := uint16(etherIPv4)
	var inner []byte
	if src.Is4() {
		inner = ip4Header{src: src, dst: dst, proto: proto}.with(payload)
	} else {
		ethertype, inner = etherIPv6, ip6(src, dst, proto, payload)
	}
	datagram := udp(40000, 4789, vxlan(uint32(vni), frame(b.MAC, a.MAC, ethertype, inner))...)
	binary.BigEndian.PutUint16(datagram[6:], 0)
	packet := ip4Header{src: f.a.addr4, dst: f.b.addr4, proto: 17, frag: 0x4000}.with(datagram)
	return frame(macOf(f.b), macOf(f.a), etherIPv4, packet)
}

func macOf(n *fabricNode) [6]byte { return [6]byte(n.uplink.Attrs().HardwareAddr) }

// summed sets the checksum of the outer IP header.
func (p outerPacket) summed() outerPacket {
	ihl := int(p[outerIP]&15) * 4
	if ihl < 20 || outerIP+ihl > len(p) {
		return p
	}
	header := p[outerIP : outerIP+ihl]
	header[10], header[11] = 0, 0
	binary.BigEndian.PutUint16(header[10:], checksum(header))
	return p
}

// changed returns a copy with a changed outer header.
func (p outerPacket) changed(change func(p outerPacket)) outerPacket {
	q := append(outerPacket(nil), p...)
	change(q)
	return q.summed()
}

// received sends frames to b from a namespace, in order, and returns b's counters of received packets by reason. To
// find out when all frames are processed, it sends a last packet through the device, which is dropped with a reason
// that no other packet has.
func (f *fabric) received(t *testing.T, from netns.NsHandle, frames ...outerPacket) map[event.Reason]uint64 {
	t.Helper()
	inner := ip4Header{src: f.a.pod.IPv4, dst: f.b.over4, proto: 17}.with(udp(4000, 4789))
	tunnelled := vxlan(uint32(f.a.pod.Identity), frame(f.b.pod.MAC, f.a.pod.MAC, etherIPv4, inner))
	last := ip4Header{src: f.a.addr4, dst: f.b.addr4, proto: 17}.with(udp(40000, 4789, tunnelled...))
	binary.BigEndian.PutUint16(last[26:], 0)
	all := make([][]byte, 0, len(frames)+1)
	for _, p := range frames {
		all = append(all, p)
	}
	all = append(all, frame(macOf(f.b), macOf(f.a), etherIPv4, last))
	before := f.b.counters(t)
	inNetns(t, from, func() {
		// the kernel keeps the order of packets on one CPU
		var was, one unix.CPUSet
		must(t, "CPUs of the thread", unix.SchedGetaffinity(0, &was))
		one.Set(0)
		must(t, "keep to one CPU", unix.SchedSetaffinity(0, &one))
		sendRaw(t, "up0", all...)
		must(t, "restore the CPUs", unix.SchedSetaffinity(0, &was))
	})
	got := map[event.Reason]uint64{}
	servicetest.Eventually(t, "the last packet", func() bool {
		clear(got)
		for c, n := range f.b.gained(t, before) {
			if c.direction == event.Ingress && !c.reason.Quiet() {
				got[c.reason] += n
			}
		}
		return got[event.TunnelPort] == 1
	})
	delete(got, event.TunnelPort)
	return got
}

// TestKernelDirectPathDropsForgedPacketsLikeTheTunnel verifies that forged tunnel packets are counted and dropped for
// the same reason on both paths, and which of them are decapsulated without the tunnel device (INV-91).
func TestKernelDirectPathDropsForgedPacketsLikeTheTunnel(t *testing.T) {
	f := newDirectFabric(t, func(*Options) {})
	f.thirdNode(t)
	a, b := f.a.pod, f.b.pod
	sport := uint16(10000)
	say := func(vni identity.Numeric, src, dst netip.Addr) func() outerPacket {
		return func() outerPacket {
			sport++
			return f.newOuter(vni, src, dst, sport)
		}
	}
	good := say(a.Identity, a.IPv4, b.IPv4)
	// a datagram of a connection that b knows, with any identity
	first := f.datagrams(9000)
	f.received(t, f.a.ns, first[:]...)
	datagram := func(vni identity.Numeric, src, dst netip.Addr) func() outerPacket {
		return func() outerPacket { return f.newOuterWith(vni, src, dst, 17, udp(9000, 53)) }
	}
	with := func(change func(p outerPacket)) func() outerPacket {
		return func() outerPacket { return good().changed(change) }
	}
	inside := func(change func(p outerPacket)) func() outerPacket {
		return with(func(p outerPacket) { change(p); sum4(p[innerIP:]) })
	}
	without := with(func(outerPacket) {})
	nobody, third := netip.MustParseAddr("10.244.2.99"), netip.MustParseAddr("10.244.3.10")
	const none = event.Reason(0) // no reason of the datapath: the stack drops the packet
	for _, c := range []struct {
		name   string
		from   netns.NsHandle
		packet func() outerPacket
		want   event.Reason
		device bool // whether the tunnel device gets the packet
	}{
		{"a pod of a", f.a.ns, good, event.ForwardedToPod, false},
		{"a pod of a, IPv6", f.a.ns, say(a.Identity, a.IPv6, b.IPv6), event.ForwardedToPod, false},
		{"a datagram", f.a.ns, datagram(a.Identity, a.IPv4, b.IPv4), event.ForwardedToPod, false},
		{"a datagram, IPv6", f.a.ns, datagram(a.Identity, a.IPv6, b.IPv6), event.ForwardedToPod, false},
		{"a datagram as the host", f.a.ns, datagram(1, a.IPv4, b.IPv4), event.SpoofedIdentity, false},
		{"a datagram as the world, IPv6", f.a.ns, datagram(9, a.IPv6, b.IPv6), event.SpoofedIdentity, false},
		{
			"the first datagram of a connection", f.a.ns, datagram(300, third, b.IPv4),
			event.SpoofedNode, true,
		},
		{"a datagram from a node without a direct path", f.outsider, func() outerPacket {
			return datagram(a.Identity, a.IPv4, b.IPv4)().changed(func(p outerPacket) {
				copy(p[outerIP+12:], f.outside.AsSlice())
			})
		}, event.SpoofedNode, true},
		{"a datagram with options inside", f.a.ns, func() outerPacket {
			p := datagram(a.Identity, a.IPv4, b.IPv4)()
			p = append(p[:innerPort:innerPort], append([]byte{1, 1, 1, 0}, p[innerPort:]...)...)
			p[innerIP]++
			binary.BigEndian.PutUint16(p[innerIP+2:], uint16(len(p)-innerIP))
			p[innerIP+10], p[innerIP+11] = 0, 0
			binary.BigEndian.PutUint16(p[innerIP+10:], checksum(p[innerIP:innerPort+4]))
			binary.BigEndian.PutUint16(p[outerUDP+4:], uint16(len(p)-outerUDP))
			binary.BigEndian.PutUint16(p[outerIP+2:], uint16(len(p)-outerIP))
			return p.summed()
		}, event.ForwardedToPod, true},
		{"a datagram as a fragment", f.a.ns, func() outerPacket {
			return datagram(a.Identity, a.IPv4, b.IPv4)().changed(func(p outerPacket) { p[innerIP+7] = 1; sum4(p[innerIP:]) })
		}, event.FragmentUnknown, true},
		{"as a pod of b", f.a.ns, say(300, b.IPv4, b.IPv4), event.SpoofedIP, false},
		{"as b itself", f.a.ns, say(1, f.b.over4, b.IPv4), event.SpoofedIP, false},
		{"as the world", f.a.ns, say(300, world4, b.IPv4), event.SpoofedNode, false},
		{"as the world with VNI 9", f.a.ns, say(9, world4, b.IPv4), event.SpoofedNode, false},
		{"as the world, IPv6", f.a.ns, say(300, world6, b.IPv6), event.SpoofedNode, false},
		{"as a pod of a third node", f.a.ns, say(300, third, b.IPv4), event.SpoofedNode, false},
		{"its pod as the host", f.a.ns, say(1, a.IPv4, b.IPv4), event.SpoofedIdentity, false},
		{"its pod as a node", f.a.ns, say(6, a.IPv4, b.IPv4), event.SpoofedIdentity, false},
		{"its pod as an API server", f.a.ns, say(7, a.IPv4, b.IPv4), event.SpoofedIdentity, false},
		{"its pod as the world", f.a.ns, say(9, a.IPv4, b.IPv4), event.SpoofedIdentity, false},
		{"its pod as unmanaged", f.a.ns, say(3, a.IPv4, b.IPv4), event.SpoofedIdentity, false},
		{"its pod as unknown-in-cluster", f.a.ns, say(255, a.IPv4, b.IPv4), event.SpoofedIdentity, false},
		{"its pod with identity 0", f.a.ns, say(0, a.IPv4, b.IPv4), event.SpoofedIdentity, false},
		{"its pod beyond the cluster", f.a.ns, say(65536, a.IPv4, b.IPv4), event.SpoofedIdentity, false},
		{"its pod with a number of this node", f.a.ns, say(0xff0001, a.IPv4, b.IPv4), event.SpoofedIdentity, false},
		{"itself as a pod", f.a.ns, say(300, f.a.over4, b.IPv4), event.SpoofedIdentity, false},
		{"itself by its device as a pod", f.a.ns, say(300, f.a.addr4, b.IPv4), event.SpoofedIdentity, false},
		{"itself as the host", f.a.ns, say(1, f.a.over4, b.IPv4), event.SpoofedIdentity, false},
		{"itself", f.a.ns, say(6, f.a.over4, b.IPv4), event.ForwardedToPod, false},
		{"to nobody", f.a.ns, say(a.Identity, a.IPv4, nobody), event.NoRoute, true},
		{"to the host", f.a.ns, say(a.Identity, a.IPv4, f.b.over4), event.ForwardedToHost, true},
		{"from a host that is no node", f.outsider, with(func(p outerPacket) {
			copy(p[outerIP+12:], netip.MustParseAddr("192.0.2.98").AsSlice())
		}), event.UnknownNode, true},
		{"from a node without a direct path", f.outsider, with(func(p outerPacket) {
			copy(p[outerIP+12:], f.outside.AsSlice())
		}), event.SpoofedNode, true},
		{"to another address of b", f.a.ns, with(func(p outerPacket) {
			copy(p[outerIP+16:], f.b.over4.AsSlice())
		}), event.ForwardedToPod, true},
		{"to another host", f.a.ns, with(func(p outerPacket) {
			copy(p[outerIP+16:], f.outside.AsSlice())
		}), none, false},
		{"in the frame of another host", f.a.ns, with(func(p outerPacket) { p[5] ^= 1 }), none, false},
		{"with IP options", f.a.ns, func() outerPacket {
			p := without()
			p = append(p[:outerUDP:outerUDP], append([]byte{1, 1, 1, 0}, p[outerUDP:]...)...)
			p[outerIP]++
			binary.BigEndian.PutUint16(p[outerIP+2:], uint16(len(p)-outerIP))
			return p.summed()
		}, event.ForwardedToPod, true},
		{"a first fragment", f.a.ns, with(func(p outerPacket) { p[outerIP+6] = 0x20 }), none, false},
		{"a later fragment", f.a.ns, with(func(p outerPacket) { p[outerIP+6], p[outerIP+7] = 0, 1 }), none, false},
		{"without DF", f.a.ns, with(func(p outerPacket) { p[outerIP+6] = 0 }), event.ForwardedToPod, false},
		{"with a wrong IP checksum", f.a.ns, func() outerPacket { p := good(); p[outerIP+10] ^= 1; return p }, none, false},
		{"with a wrong UDP checksum", f.a.ns, with(func(p outerPacket) { p[outerUDP+6] = 1 }), none, false},
		{
			"with congestion", f.a.ns, inside(func(p outerPacket) { p[outerIP+1] = 3; p[innerIP+1] = 2 }),
			event.ForwardedToPod, true,
		},
		{"with congestion, incapable", f.a.ns, with(func(p outerPacket) { p[outerIP+1] = 3 }), none, false},
		{"with a capable outer packet", f.a.ns, with(func(p outerPacket) { p[outerIP+1] = 2 }), event.ForwardedToPod, false},
		{"with a padded frame", f.a.ns, func() outerPacket { return append(good(), 0, 0, 0, 0) }, event.ForwardedToPod, true},
		{"shorter than its length", f.a.ns, func() outerPacket { p := good(); return p[:len(p)-2] }, none, false},
		{"with a short IP length", f.a.ns, with(func(p outerPacket) { p[outerIP+3] -= 8 }), none, false},
		{"with a short UDP length", f.a.ns, with(func(p outerPacket) { p[outerUDP+5] -= 8 }), event.Malformed, true},
		{"without a VNI", f.a.ns, with(func(p outerPacket) { p[outerUDP+8] = 0 }), none, false},
		{"with reserved VXLAN flags", f.a.ns, with(func(p outerPacket) { p[outerUDP+9] = 1 }), none, false},
		{"with a reserved byte behind the VNI", f.a.ns, with(func(p outerPacket) { p[outerVNI+3] = 1 }), none, false},
		{"to another port", f.a.ns, with(func(p outerPacket) { p[outerUDP+3]++ }), none, false},
		{"of another protocol inside the outer packet", f.a.ns, with(func(p outerPacket) { p[outerIP+9] = 6 }), none, false},
		{"inside: not IP", f.a.ns, with(func(p outerPacket) { p[innerIP-2] = 0x88 }), event.NotIP, true},
		{"inside: a fragment", f.a.ns, inside(func(p outerPacket) { p[innerIP+7] = 1 }), event.Malformed, true},
		{
			"inside: longer than the packet", f.a.ns, inside(func(p outerPacket) { p[innerIP+3] += 8 }),
			event.Malformed, false,
		},
		{"inside: a short header length", f.a.ns, with(func(p outerPacket) { p[innerIP] = 0x44 }), event.Malformed, false},
		{"inside: another version", f.a.ns, with(func(p outerPacket) { p[innerIP] = 0x65 }), event.Malformed, false},
		{"inside: SYN and FIN", f.a.ns, with(func(p outerPacket) { p[innerPort+13] |= 1 }), event.ConnectionInvalid, false},
		{
			"inside: TTL 1", f.a.ns, inside(func(p outerPacket) { p[innerIP+8] = 1 }),
			event.StackTimeExceeded, false,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			const times = 20
			want := map[event.Reason]uint64{c.want: times}
			if c.want == none {
				want = map[event.Reason]uint64{}
			}
			for _, on := range []bool{false, true} {
				f.b.shortcut(t, on)
				frames := make([]outerPacket, times)
				for i := range frames {
					frames[i] = c.packet()
				}
				_, before := f.b.throughDevice(t)
				if got := f.received(t, c.from, frames...); !maps.Equal(got, want) {
					t.Errorf("direct path %t: counted %v, want %v", on, got, want)
				}
				_, after := f.b.throughDevice(t)
				passed := after - before - 1
				// a bridge that filters IP packets removes the padding
				asked := on && c.want != event.StackTimeExceeded && c.name != "with a padded frame"
				if asked && passed > 0 != c.device {
					t.Errorf("the device got %d packets of %d, want some: %t", passed, times, c.device)
				}
				if !on && passed == 0 && c.want != none {
					t.Error("without the direct path the device got no packet")
				}
			}
		})
	}
}

// sum4 sets the checksum of an IPv4 header without options.
func sum4(h []byte) {
	h[10], h[11] = 0, 0
	binary.BigEndian.PutUint16(h[10:], checksum(h[:20]))
}

// TestKernelBothPathsDecideAlikeOnCraftedPackets sends 4,000 tunnel packets with random changes in their headers, with
// and without the direct path: b counts the same. A quarter are datagrams of known connections.
func TestKernelBothPathsDecideAlikeOnCraftedPackets(t *testing.T) {
	f := newDirectFabric(t, func(*Options) {})
	for seed := range uint64(4) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			var counted [2]map[event.Reason]uint64
			for i, on := range []bool{false, true} {
				f.b.shortcut(t, on)
				r := rand.New(rand.NewPCG(seed, 0))
				frames := make([]outerPacket, 1000)
				port := uint16(1024 + 2000*(2*int(seed)+i))
				for j := range frames {
					frames[j] = f.crafted(r, port, j)
				}
				first := f.datagrams(port)
				f.received(t, f.a.ns, first[:]...)
				counted[i] = f.received(t, f.a.ns, frames...)
			}
			if !maps.Equal(counted[0], counted[1]) {
				t.Errorf("by the device %v, directly %v", counted[0], counted[1])
			}
			t.Logf("%v", counted[0])
		})
	}
}

// datagrams returns a datagram of a's pod to b's in each family.
func (f *fabric) datagrams(port uint16) (ps [2]outerPacket) {
	for i, src := range f.a.pod.Addrs() {
		ps[i] = f.newOuterWith(f.a.pod.Identity, src, f.b.pod.Addrs()[i], 17, udp(port, 53))
	}
	return ps
}

// crafted returns a valid tunnel packet with up to three random changes before its inner ports: a SYN from a port of
// its own, or a datagram.
func (f *fabric) crafted(r *rand.Rand, port uint16, n int) outerPacket {
	i := r.IntN(2)
	p := f.newOuter(f.a.pod.Identity, f.a.pod.Addrs()[i], f.b.pod.Addrs()[i], port+1+uint16(n))
	if r.IntN(4) == 0 {
		p = f.datagrams(port)[i]
	}
	for range r.IntN(4) {
		at := outerIP + r.IntN(innerIP+8-outerIP)
		switch r.IntN(3) {
		case 0:
			p[at] = byte(r.Uint32())
		case 1:
			p[at] ^= 1 << r.IntN(8)
		case 2:
			p[at]++
		}
	}
	if r.IntN(10) > 0 {
		p = p.summed()
	}
	if r.IntN(20) == 0 {
		p = p[:outerIP+r.IntN(len(p)-outerIP)]
	}
	return p
}

// captured returns the next tunnel packet that arrives at b's uplink from a while send runs.
func (f *fabric) captured(t *testing.T, send func()) outerPacket {
	t.Helper()
	fd, err := 0, error(nil)
	inNetns(t, f.b.ns, func() {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		must(t, "packet socket", err)
		must(t, "bind", unix.Bind(fd, &unix.SockaddrLinklayer{
			Protocol: 0x0008 /* IPv4, in network order */, Ifindex: f.b.uplink.Attrs().Index,
		}))
	})
	defer unix.Close(fd)
	must(t, "timeout", unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO,
		&unix.Timeval{Sec: int64(servicetest.Patience.Seconds())}))
	send()
	for {
		b := make([]byte, 1<<16)
		n, _, err := unix.Recvfrom(fd, b, 0)
		must(t, "receive a tunnel packet", err)
		if n > innerIP && b[outerIP+9] == 17 && binary.BigEndian.Uint16(b[outerUDP+2:]) == 4789 {
			return b[:n]
		}
	}
}

// TestKernelDirectPacketsEqualTheDevices compares the packets that both paths send, in both families, for each value of
// the congestion bits, with DSCP. The identification and the checksum with it may differ.
func TestKernelDirectPacketsEqualTheDevices(t *testing.T) {
	for _, copies := range []bool{false, true} {
		t.Run(fmt.Sprint("DSCP copied ", copies), func(t *testing.T) {
			f := newDirectFabric(t, func(o *Options) { o.CopyDSCP = copies })
			f.b.shortcut(t, false) // the program would decapsulate packets before the socket gets them
			a, b := f.a.pod, f.b.pod
			for tos := byte(0xb8); tos < 0xbc; tos++ {
				four := ip4Header{src: a.IPv4, dst: b.IPv4, proto: 17}.with(udp(4000, 53, []byte("the same")...))
				four[1] = tos
				sum4(four)
				six := ip6(a.IPv6, b.IPv6, 17, udp(4000, 53, []byte("the same")...))
				six[0], six[1] = six[0]|tos>>4, six[1]|tos<<4
				for i, inner := range []struct {
					ethertype uint16
					packet    []byte
				}{{etherIPv4, four}, {etherIPv6, six}} {
					var packets [2]outerPacket
					for j, on := range []bool{false, true} {
						f.a.shortcut(t, on)
						sent, _ := f.a.throughDevice(t)
						whole := frame(a.HostMAC, a.MAC, inner.ethertype, inner.packet)
						packets[j] = f.captured(t, func() { inNetns(t, a.ns, func() { sendRaw(t, "eth0", whole) }) })
						if now, _ := f.a.throughDevice(t); (now > sent) == on {
							t.Errorf("direct path %t: the device has sent %d packets", on, now-sent)
						}
						header := packets[j][outerIP:outerUDP]
						if checksum(header) != 0 {
							t.Errorf("direct path %t: wrong checksum in % x", on, header)
						}
						header[4], header[5], header[10], header[11] = 0, 0, 0, 0
					}
					if string(packets[0]) != string(packets[1]) {
						t.Errorf("family %d, traffic class %#x:\nby the device % x\ndirectly      % x", i, tos, packets[0],
							packets[1])
					}
				}
			}
		})
	}
}

// ethtoolSetTSO is ETHTOOL_STSO of linux/ethtool.h.
const ethtoolSetTSO = 0x1f

// setTSO makes a device segment large TCP packets itself, or makes the kernel do it.
func setTSO(t *testing.T, ns netns.NsHandle, device string, on uint32) {
	t.Helper()
	inNetns(t, ns, func() {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		must(t, "socket", err)
		defer unix.Close(fd)
		value := [2]uint32{ethtoolSetTSO, on}
		request := struct {
			name [unix.IFNAMSIZ]byte
			data unsafe.Pointer
			_    [16]byte
		}{data: unsafe.Pointer(&value)}
		copy(request.name[:], device)
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
		if errno != 0 {
			t.Errorf("segmentation of %s: %v", device, errno)
		}
	})
}

// TestKernelLargeSendsAreSegmentedInTheDirectPath sends large TCP packets by uplinks that cannot segment them, and
// datagrams that the kernel cuts (UDP_SEGMENT), in both families: all arrive.
func TestKernelLargeSendsAreSegmentedInTheDirectPath(t *testing.T) {
	f := newDirectFabric(t, func(*Options) {})
	for _, tso := range []uint32{1, 0} {
		for _, n := range []*fabricNode{f.a, f.b} {
			setTSO(t, n.ns, "up0", tso)
		}
		for i, addr := range f.b.pod.Addrs() {
			f.wantThroughDevice(t, "large TCP", func() { streamPods(t, f.a.pod, f.b.pod, addr, 8<<20) }, 0, 0)
			beforeA, beforeB := f.a.counters(t), f.b.counters(t)
			f.segments(t, f.a.pod.Addrs()[i], addr)
			wantNoDrops(t, "a", f.a.gained(t, beforeA))
			wantNoDrops(t, "b", f.b.gained(t, beforeB))
		}
	}
}

// segments sends datagrams with UDP_SEGMENT from a's pod to b's, and fails unless all arrive.
func (f *fabric) segments(t *testing.T, local, addr netip.Addr) {
	t.Helper()
	const size, count = 1200, 20
	var there, here *net.UDPConn
	var err error
	inNetns(t, f.b.pod.ns, func() {
		there, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
	})
	must(t, "listen", err)
	defer there.Close()
	inNetns(t, f.a.pod.ns, func() {
		here, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(local, 0)),
			there.LocalAddr().(*net.UDPAddr))
	})
	must(t, "dial", err)
	defer here.Close()
	raw, err := here.SyscallConn()
	must(t, "socket", err)
	must(t, "socket", raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, size)
	}))
	must(t, "UDP_SEGMENT", err)
	_, err = here.Write(make([]byte, size*count))
	must(t, "send", err)
	must(t, "deadline", there.SetReadDeadline(time.Now().Add(servicetest.Patience)))
	b := make([]byte, 2*size)
	for i := range count {
		if n, err := there.Read(b); err != nil || n != size {
			t.Fatalf("datagram %d to %v: %d bytes, %v", i, addr, n, err)
		}
	}
}

// TestKernelTunnelsOfPodsPassTheDirectPath sends large TCP packets in a VXLAN tunnel between two pods: the programs
// cannot put a second tunnel around a large packet, so the device does.
func TestKernelTunnelsOfPodsPassTheDirectPath(t *testing.T) {
	f := newDirectFabric(t, func(*Options) {})
	for _, n := range []struct {
		own, other *pod
		addr       string
	}{{f.a.pod, f.b.pod, "198.51.100.1/24"}, {f.b.pod, f.a.pod, "198.51.100.2/24"}} {
		h, err := netlink.NewHandleAt(n.own.ns, unix.NETLINK_ROUTE)
		must(t, "netlink in the pod", err)
		defer h.Close()
		must(t, "add the pod's tunnel", h.LinkAdd(&netlink.Vxlan{
			LinkAttrs: netlink.LinkAttrs{Name: "own", MTU: 1350}, VxlanId: 7, Port: 4790,
			SrcAddr: n.own.IPv4.AsSlice(), Group: n.other.IPv4.AsSlice(),
		}))
		l, err := h.LinkByName("own")
		must(t, "find the pod's tunnel", err)
		addr, err := netlink.ParseAddr(n.addr)
		must(t, "address", err)
		must(t, "add an address to the pod's tunnel", h.AddrAdd(l, addr))
		must(t, "set the pod's tunnel up", h.LinkSetUp(l))
	}
	sent, _ := f.a.throughDevice(t)
	streamPods(t, f.a.pod, f.b.pod, netip.MustParseAddr("198.51.100.2"), 4<<20)
	if now, _ := f.a.throughDevice(t); now == sent {
		t.Error("no packet has passed the device")
	}
}
