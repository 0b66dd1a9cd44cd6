// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// fabric is two nodes and an outsider on a bridge, which is in the test's namespace. The test writes the maps
// that the datapath would write.
type fabric struct {
	a, b     *fabricNode
	outsider netns.NsHandle
	outside  netip.Addr // the outsider's address
}

// fabricNode is a node with one pod.
type fabricNode struct {
	runner
	number         byte // its node ID at the other node
	ns             netns.NsHandle
	h              *netlink.Handle
	addr4, addr6   netip.Addr // of its uplink
	over4, over6   netip.Addr // its overlay addresses
	tunnel, uplink netlink.Link
	pod            *pod
}

const fabricMTU = 1500

// newFabric creates the nodes. With underlay6 the tunnel's outer packets are IPv6.
func newFabric(t *testing.T, routing Routing, underlay6 bool) *fabric {
	t.Helper()
	return newFabricOn(t, routing, underlay6, cable)
}

// newFabricOn is like newFabric, but with a kind of uplinks.
func newFabricOn(t *testing.T, routing Routing, underlay6 bool, kind uplinkKind) *fabric {
	t.Helper()
	return makeFabric(t, routing, underlay6, kind, func(*Options) {})
}

// newFabricWith creates an overlay on IPv4; change sets options of its nodes.
func newFabricWith(t *testing.T, change func(*Options)) *fabric {
	t.Helper()
	return makeFabric(t, RoutingOverlay, false, cable, change)
}

func makeFabric(t *testing.T, routing Routing, underlay6 bool, kind uplinkKind, change func(*Options)) *fabric {
	t.Helper()
	here := &netlink.Handle{}
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "slfabric", MTU: fabricMTU}}
	must(t, "add the bridge", here.LinkAdd(bridge))
	t.Cleanup(func() {
		if err := here.LinkDel(bridge); err != nil {
			t.Errorf("delete the bridge: %v", err)
		}
	})
	must(t, "set the bridge up", here.LinkSetUp(bridge))
	f := &fabric{
		a: newFabricNode(t, bridge, 1, routing, kind, change), b: newFabricNode(t, bridge, 2, routing, kind, change),
	}
	f.outsider, f.outside = newNetns(t), netip.MustParseAddr("192.0.2.99")
	h := plugIn(t, bridge, 99, f.outsider, f.outside, netip.MustParseAddr("2001:db8::99"), kind)
	h.Close()
	f.a.join(t, f.b, routing, underlay6)
	f.b.join(t, f.a, routing, underlay6)
	return f
}

// uplinkKind creates the device "up0" of a namespace, which is connected to a bridge.
type uplinkKind func(t *testing.T, bridge netlink.Link, n byte, ns netns.NsHandle)

// cable makes it a veth whose peer is a port of the bridge.
func cable(t *testing.T, bridge netlink.Link, n byte, ns netns.NsHandle) {
	t.Helper()
	addPort(t, bridge, fmt.Sprintf("slport%d", n), ns, "up0")
}

// addPort connects a device of a namespace to the bridge through a named port.
func addPort(t *testing.T, bridge netlink.Link, port string, ns netns.NsHandle, device string) {
	t.Helper()
	veth := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: port, MTU: fabricMTU, MasterIndex: bridge.Attrs().Index},
		PeerName:  device, PeerNamespace: netlink.NsFd(ns), PeerMTU: fabricMTU,
	}
	must(t, "add a port", netlink.LinkAdd(veth))
	t.Cleanup(func() {
		if err := netlink.LinkDel(veth); err != nil {
			t.Errorf("delete a port: %v", err)
		}
	})
	must(t, "set the port up", netlink.LinkSetUp(veth))
}

// plugIn gives a namespace a device that is connected to the bridge, with two addresses, and returns a handle
// in the namespace.
func plugIn(t *testing.T, bridge netlink.Link, n byte, ns netns.NsHandle, addr4, addr6 netip.Addr,
	kind uplinkKind,
) *netlink.Handle {
	t.Helper()
	// without duplicate address detection, so that neighbours are resolved immediately
	inNetns(t, ns, func() {
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/default/accept_dad", []byte("0"), 0); err != nil {
			t.Errorf("sysctl: %v", err)
		}
	})
	kind(t, bridge, n, ns)
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	must(t, "netlink", err)
	lo, err := h.LinkByName("lo")
	must(t, "find lo", err)
	must(t, "set lo up", h.LinkSetUp(lo))
	up, err := h.LinkByName("up0")
	must(t, "find up0", err)
	must(t, "set up0 up", h.LinkSetUp(up))
	for _, a := range []netip.Prefix{netip.PrefixFrom(addr4, 24), netip.PrefixFrom(addr6, 64)} {
		addr := &netlink.Addr{
			IPNet: &net.IPNet{IP: a.Addr().AsSlice(), Mask: net.CIDRMask(a.Bits(), a.Addr().BitLen())}, Flags: unix.IFA_F_NODAD,
		}
		must(t, "add an address", h.AddrAdd(up, addr))
		receives(t, h, a.Addr())
	}
	servicetest.Eventually(t, "carrier of up0", func() bool {
		l, err := h.LinkByName("up0")
		return err == nil && l.Attrs().OperState == netlink.OperUp
	})
	return h
}

func (n *fabricNode) ranges() (v4, v6 netip.Prefix) {
	return netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", n.number)),
		netip.MustParsePrefix(fmt.Sprintf("fd00:244:%d::/64", n.number))
}

func newFabricNode(t *testing.T, bridge netlink.Link, number byte, routing Routing, kind uplinkKind,
	change func(*Options),
) *fabricNode {
	t.Helper()
	n := &fabricNode{
		number: number, ns: newNetns(t),
		addr4: netip.AddrFrom4([4]byte{192, 0, 2, number}),
		addr6: netip.MustParseAddr(fmt.Sprintf("2001:db8::%d", number)),
		over4: netip.AddrFrom4([4]byte{10, 244, number, 1}),
		over6: netip.MustParseAddr(fmt.Sprintf("fd00:244:%d::1", number)),
	}
	v4, v6 := n.ranges()
	o := testOptions(kerneltest.NewBPFFS(t))
	o.PodCIDRs, o.Routing, o.Services = []netip.Prefix{v4, v6}, routing, true
	change(&o)
	n.k = openKernel(t, o)
	n.h = plugIn(t, bridge, number, n.ns, n.addr4, n.addr6, kind)
	t.Cleanup(n.h.Close)
	inNetns(t, n.ns, func() {
		for name, value := range map[string]string{
			"ipv4/ip_forward": "1", "ipv6/conf/all/forwarding": "1",
			"ipv4/conf/all/rp_filter": "0", "ipv4/conf/default/rp_filter": "0",
			"ipv4/conf/all/send_redirects": "0", "ipv4/conf/up0/send_redirects": "0",
			"ipv4/icmp_ratelimit": "0", "ipv6/icmp/ratelimit": "0",
		} {
			if err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0); err != nil {
				t.Errorf("sysctl: %v", err)
			}
		}
	})
	lo, err := n.h.LinkByName("lo")
	must(t, "find lo", err)
	for _, a := range []netip.Addr{n.over4, n.over6} {
		must(t, "add the overlay address", n.h.AddrAdd(lo, &netlink.Addr{IPNet: ipNet(a), Flags: unix.IFA_F_NODAD}))
		receives(t, n.h, a)
	}
	must(t, "host addresses", n.k.Endpoints.SyncHostAddrs([]netip.Addr{n.over4, n.over6, n.addr4, n.addr6}))
	n.uplink, err = n.h.LinkByName("up0")
	must(t, "find up0", err)
	local := nodemap.Local{Native: true}
	if routing == RoutingOverlay {
		n.addTunnel(t)
		local = nodemap.Local{Overlay: true, TunnelIfindex: uint32(n.tunnel.Attrs().Index)}
	}
	attach(t, n.h, n.uplink, netlink.HANDLE_MIN_INGRESS, n.k.find(program.FromUplink))
	attach(t, n.h, n.uplink, netlink.HANDLE_MIN_EGRESS, n.k.find(program.ToUplink))
	for i, a := range []netip.Addr{n.over4, n.over6, n.addr4, n.addr6} {
		local.Sources[i], err = n.k.Endpoints.OwnPlace(a)
		must(t, "find the place of "+a.String(), err)
	}
	must(t, "SetLocal", n.k.Nodes.SetLocal(local))
	n.pod = n.newPod(t, 10)
	return n
}

// newPod creates a pod whose addresses end in last, and whose identity is 256 + last.
func (n *fabricNode) newPod(t *testing.T, last byte) *pod {
	t.Helper()
	return n.newPodMTU(t, last, fabricMTU-50)
}

func (n *fabricNode) newPodMTU(t *testing.T, last byte, mtu uint16) *pod {
	t.Helper()
	e := testEndpoint(0, last)
	e.Identity = 256 + identity.Numeric(n.number)*100 + identity.Numeric(last)
	e.IPv4 = netip.AddrFrom4([4]byte{10, 244, n.number, last})
	e.IPv6 = netip.MustParseAddr(fmt.Sprintf("fd00:244:%d::%d", n.number, last))
	e.Deliver, e.MTU = endpointmap.DeliverPeer, mtu
	e.MAC[4], e.HostMAC[4] = n.number, n.number
	p := newPodAt(t, n.k, n.h, fmt.Sprintf("slpod%d", last), e)
	for _, a := range p.Addrs() {
		family := netlink.FAMILY_V4
		if a.Is6() {
			family = netlink.FAMILY_V6
		}
		must(t, "route to the pod", n.h.RouteReplace(&netlink.Route{
			LinkIndex: int(p.Ifindex), Dst: ipNet(a), Scope: netlink.SCOPE_LINK,
		}))
		must(t, "neighbour", n.h.NeighSet(&netlink.Neigh{
			LinkIndex: int(p.Ifindex), Family: family, State: netlink.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: p.MAC[:],
		}))
	}
	return p
}

func (n *fabricNode) addTunnel(t *testing.T) {
	t.Helper()
	must(t, "add the tunnel", n.h.LinkAdd(&netlink.Vxlan{
		LinkAttrs: netlink.LinkAttrs{Name: "sltun", MTU: fabricMTU - 50}, FlowBased: true, Port: 4789,
	}))
	var err error
	n.tunnel, err = n.h.LinkByName("sltun")
	must(t, "find the tunnel", err)
	must(t, "no ARP in the tunnel", n.h.LinkSetARPOff(n.tunnel))
	attach(t, n.h, n.tunnel, netlink.HANDLE_MIN_INGRESS, n.k.find(program.FromOverlay))
	attach(t, n.h, n.tunnel, netlink.HANDLE_MIN_EGRESS, n.k.find(program.ToOverlay))
	must(t, "set the tunnel up", n.h.LinkSetUp(n.tunnel))
}

// join adds another node to the node's maps.
func (n *fabricNode) join(t *testing.T, other *fabricNode, routing Routing, underlay6 bool) {
	t.Helper()
	number := uint16(other.number)
	must(t, "SetNode", n.k.Nodes.SetNode(number, nodemap.Node{
		IPv4: other.addr4, IPv6: other.addr6, Addrs: []netip.Addr{other.addr4, other.addr6},
	}))
	way := nodemap.NextHop{Ifindex: uint32(n.uplink.Attrs().Index), MTU: fabricMTU, Flags: nodemap.Hop}
	if routing == RoutingOverlay {
		way = nodemap.NextHop{Ifindex: uint32(n.tunnel.Attrs().Index), MTU: fabricMTU - 50, Flags: nodemap.Overlay}
		if underlay6 {
			way.Flags |= nodemap.Underlay6
			way.MTU = fabricMTU - 70
		}
	}
	must(t, "SetNextHops", n.k.Nodes.SetNextHops(number, way, way))
	v4, v6 := other.ranges()
	for i, p := range []netip.Prefix{v4, v6} {
		n.says(t, p, identity.UnknownInCluster, number)
		route := &netlink.Route{
			Dst: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}, MTU: int(way.MTU),
		}
		if routing == RoutingOverlay {
			route.LinkIndex, route.Scope = n.tunnel.Attrs().Index, netlink.SCOPE_LINK
			route.Src = []netip.Addr{n.over4, n.over6}[i].AsSlice()
		} else {
			route.LinkIndex, route.Gw = n.uplink.Attrs().Index, []netip.Addr{other.addr4, other.addr6}[i].AsSlice()
		}
		must(t, "route to the other node", n.h.RouteReplace(route))
	}
	for _, a := range []netip.Addr{other.addr4, other.addr6} {
		must(t, "SetRemote", n.k.IPCache.SetRemote(netip.PrefixFrom(a, a.BitLen()),
			ipcache.Remote{Identity: identity.RemoteNode, Node: number, OfDevice: true}))
	}
	for _, a := range []netip.Addr{other.over4, other.over6} {
		n.says(t, netip.PrefixFrom(a, a.BitLen()), identity.RemoteNode, number)
	}
	for _, a := range other.pod.Addrs() {
		n.says(t, netip.PrefixFrom(a, a.BitLen()), other.pod.Identity, number)
	}
}

// says sets the cluster's information about a prefix.
func (n *fabricNode) says(t *testing.T, p netip.Prefix, id identity.Numeric, number uint16) {
	t.Helper()
	must(t, "SetRemote", n.k.IPCache.SetRemote(p, ipcache.Remote{Identity: id, Node: number}))
}

// gained returns how much the counters of a node have increased since.
func (n *fabricNode) gained(t *testing.T, since map[cell]event.Counter) map[cell]uint64 {
	t.Helper()
	m := map[cell]uint64{}
	for c, v := range n.counters(t) {
		if d := v.Packets - since[c].Packets; d > 0 {
			m[c] = d
		}
	}
	return m
}

func wantNoDrops(t *testing.T, who string, gained map[cell]uint64) {
	t.Helper()
	for c, n := range gained {
		if c.reason.Dropped() && !c.reason.Quiet() {
			t.Errorf("%s: %d packets dropped as %v", who, n, c.reason)
		}
	}
}

// eachFabric runs a test in both routing modes.
func eachFabric(t *testing.T, test func(t *testing.T, f *fabric, routing Routing)) {
	t.Run("overlay", func(t *testing.T) { test(t, newFabric(t, RoutingOverlay, false), RoutingOverlay) })
	t.Run("native", func(t *testing.T) { test(t, newFabric(t, RoutingNative, false), RoutingNative) })
}

// eachUnderlay is like eachFabric, but for tests of packets between nodes. It also runs the test with tunnels over IPv6.
func eachUnderlay(t *testing.T, test func(t *testing.T, f *fabric, routing Routing)) {
	eachUnderlayOn(t, cable, test)
}

// eachUnderlayOn is like eachUnderlay, but with a kind of uplinks.
func eachUnderlayOn(t *testing.T, kind uplinkKind, test func(t *testing.T, f *fabric, routing Routing)) {
	for _, c := range []struct {
		name      string
		routing   Routing
		underlay6 bool
	}{
		{"overlay", RoutingOverlay, false},
		{"overlay on IPv6", RoutingOverlay, true},
		{"native", RoutingNative, false},
	} {
		t.Run(c.name, func(t *testing.T) { test(t, newFabricOn(t, c.routing, c.underlay6, kind), c.routing) })
	}
}

// TestKernelPodsOfTwoNodesExchangePackets shows that packets between pods of two nodes bypass both host stacks,
// in both families.
func TestKernelPodsOfTwoNodesExchangePackets(t *testing.T) {
	eachUnderlay(t, func(t *testing.T, f *fabric, routing Routing) {
		way := event.ForwardedOverlay
		if routing == RoutingNative {
			way = event.ForwardedNative
		}
		for i, addr := range f.b.pod.Addrs() {
			local := f.a.pod.Addrs()[i]
			beforeA, beforeB := f.a.counters(t), f.b.counters(t)
			echo(t, f.a.pod, local, f.b.pod, addr)
			for who, gained := range map[string]map[cell]uint64{"a": f.a.gained(t, beforeA), "b": f.b.gained(t, beforeB)} {
				wantNoDrops(t, who, gained)
				if got := gained[cell{way, event.Egress}]; got != 1 {
					t.Errorf("%s: %v counted %d times, want once, of %v", who, way, got, gained)
				}
				if got := gained[cell{event.ForwardedToPod, event.Ingress}]; got != 1 {
					t.Errorf("%s: %v counted %d times, want once, of %v", who, event.ForwardedToPod, got, gained)
				}
			}
		}
	})
}

// TestKernelHostOfNode shows that pods see the host of another node as a remote node, with its overlay address
// and its device addresses, and that it gets answers.
func TestKernelHostOfNode(t *testing.T) {
	eachUnderlay(t, func(t *testing.T, f *fabric, _ Routing) {
		(&theatre{runner: f.b.runner}).putTables(t)
		update(t, f.b.k, "sl_id", uint32(identity.RemoteNode), knownWord(7, 4, 1))
		setPolicy(t, f.b.k, f.b.pod.Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: friends})
		for i, addr := range f.b.pod.Addrs() {
			// without a local address the kernel selects one
			for _, local := range [][]netip.Addr{{{}, f.a.addr4, f.a.over4}, {{}, f.a.addr6, f.a.over6}}[i] {
				before := f.b.counters(t)
				if err := exchange(t, f.a.ns, local, f.b.pod.ns, addr); err != nil {
					t.Errorf("host %v to pod %v: %v, counted %v", local, addr, err, f.b.gained(t, before))
				}
			}
		}
	})
}

// TestKernelHostsAreToldApartByTheirLabels shows that a pod admits the host of a node by the identity of that node's
// labels, and no other host: the tunnel key only identifies a node, and the address tells which. Packets of a pod with
// the address of a host as source are dropped.
func TestKernelHostsAreToldApartByTheirLabels(t *testing.T) {
	const east, west = identity.MinNodeLocal, identity.MaxNodeLocal
	eachUnderlay(t, func(t *testing.T, f *fabric, routing Routing) {
		(&theatre{runner: f.b.runner}).putTables(t)
		const clusterWide = uint32(identity.MaxCluster) + 1
		update(t, f.b.k, bpf.MapsMapSlId, clusterWide+uint32(east-identity.MinNodeLocal), knownWord(7, 4, 1))
		update(t, f.b.k, bpf.MapsMapSlId, clusterWide+uint32(west-identity.MinNodeLocal), knownWord(8, 4, 1))
		update(t, f.b.k, bpf.MapsMapSlId, uint32(identity.RemoteNode), knownWord(8, 4, 1))
		setPolicy(t, f.b.k, f.b.pod.Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: friends})
		addresses := [][]netip.Addr{{f.a.addr4, f.a.over4}, {f.a.addr6, f.a.over6}}
		relabel := func(id identity.Numeric) {
			for _, list := range addresses {
				for i, a := range list {
					must(t, "SetRemote", f.b.k.IPCache.SetRemote(netip.PrefixFrom(a, a.BitLen()),
						ipcache.Remote{Identity: id, Node: uint16(f.a.number), OfDevice: i == 0}))
				}
			}
		}
		for _, step := range []struct {
			id   identity.Numeric
			want bool
		}{{west, false}, {east, true}, {identity.RemoteNode, false}, {east, true}, {west, false}} {
			relabel(step.id)
			for i, addr := range f.b.pod.Addrs() {
				for _, local := range addresses[i] {
					before := f.b.counters(t)
					limit := 2 * time.Second
					if !step.want {
						limit = 500 * time.Millisecond
					}
					err := exchangeWithin(t, limit, f.a.ns, local, f.b.pod.ns, addr)
					if (err == nil) != step.want {
						t.Errorf("host %v with identity %#x to pod %v: %v, want it admitted: %t", local, uint32(step.id), addr,
							err, step.want)
					}
					gained := f.b.gained(t, before)
					if denied := gained[cell{event.PolicyDenied, event.Ingress}] > 0; denied == step.want {
						t.Errorf("host %v with identity %#x to pod %v: counted %v", local, uint32(step.id), addr, gained)
					}
				}
			}
		}
		relabel(east)
		// node a: the tunnel key has the identity of its pod, but the source is an address of its host
		if routing == RoutingOverlay {
			inner := ip4Header{src: f.a.over4, dst: f.b.pod.IPv4, proto: 17}.with(udp(4000, 53, 1))
			forged := vxlan(uint32(f.a.pod.Identity), frame(f.b.pod.MAC, f.a.pod.MAC, etherIPv4, inner))
			named := vxlan(uint32(east), frame(f.b.pod.MAC, f.a.pod.MAC, etherIPv4, inner))
			before := f.b.counters(t)
			f.forge(t, f.a.ns, f.b.addr4, forged, named)
			c := cell{event.SpoofedIdentity, event.Ingress}
			servicetest.Eventually(t, "both to be dropped", func() bool { return f.b.gained(t, before)[c] == 2 })
		}
		// Through a tunnel to a labelled node, a pod could assume any identity.
		before := f.b.counters(t)
		inNetns(t, f.b.pod.ns, func() {
			c, err := net.Dial("udp", netip.AddrPortFrom(f.a.addr4, 4789).String())
			must(t, "dial", err)
			defer c.Close()
			c.Write(vxlan(uint32(f.b.pod.Identity), nil)) //nolint:errcheck // the kernel drops it
		})
		c := cell{event.TunnelPort, event.Egress}
		servicetest.Eventually(t, "the tunnel packet of the pod to be dropped", func() bool {
			return f.b.gained(t, before)[c] == 1
		})
	})
}

// TestKernelPodReachesTheOtherHost shows that the host of another node answers pods.
func TestKernelPodReachesTheOtherHost(t *testing.T) {
	eachUnderlay(t, func(t *testing.T, f *fabric, _ Routing) {
		for i, local := range f.a.pod.Addrs() {
			for _, addr := range [][]netip.Addr{{f.b.addr4, f.b.over4}, {f.b.addr6, f.b.over6}}[i] {
				beforeA, beforeB := f.a.counters(t), f.b.counters(t)
				if err := exchange(t, f.a.pod.ns, local, f.b.ns, addr); err != nil {
					t.Errorf("pod %v to host %v: %v, counted %v and %v", local, addr, err,
						f.a.gained(t, beforeA), f.b.gained(t, beforeB))
				}
			}
		}
	})
}

// exchange sends a datagram from one namespace to an address in another, and back.
func exchange(t *testing.T, from netns.NsHandle, local netip.Addr, to netns.NsHandle, addr netip.Addr) error {
	t.Helper()
	return exchangeWithin(t, 2*time.Second, from, local, to, addr)
}

// exchangeWithin is like exchange, but with a time limit, which is short if no answer is expected.
func exchangeWithin(
	t *testing.T, limit time.Duration, from netns.NsHandle, local netip.Addr, to netns.NsHandle, addr netip.Addr,
) error {
	t.Helper()
	var there, here *net.UDPConn
	var err error
	inNetns(t, to, func() { there, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 0))) })
	if err != nil {
		return err
	}
	defer there.Close()
	if !local.IsValid() {
		local = netip.IPv6Unspecified()
	}
	inNetns(t, from, func() { here, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(local, 0))) })
	if err != nil {
		return err
	}
	defer here.Close()
	deadline := time.Now().Add(limit)
	there.SetDeadline(deadline) //nolint:errcheck // an open socket
	here.SetDeadline(deadline)  //nolint:errcheck // an open socket
	target := netip.AddrPortFrom(addr, there.LocalAddr().(*net.UDPAddr).AddrPort().Port())
	if _, err := here.WriteToUDPAddrPort([]byte("hello"), target); err != nil {
		return err
	}
	buf := make([]byte, 100)
	_, peer, err := there.ReadFromUDPAddrPort(buf)
	if err != nil {
		return fmt.Errorf("receive: %w", err)
	}
	if _, err := there.WriteToUDPAddrPort([]byte("hello"), peer); err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	if _, _, err := here.ReadFromUDPAddrPort(buf); err != nil {
		return fmt.Errorf("receive the answer: %w", err)
	}
	return nil
}

// vxlan returns the payload of a UDP packet of the tunnel.
func vxlan(vni uint32, inner []byte) []byte {
	b := make([]byte, 8, 8+len(inner))
	b[0] = 8
	binary.BigEndian.PutUint32(b[4:], vni<<8)
	return append(b, inner...)
}

// forge sends tunnel packets to node b from an ordinary socket of a namespace.
func (f *fabric) forge(t *testing.T, ns netns.NsHandle, to netip.Addr, packets ...[]byte) {
	t.Helper()
	inNetns(t, ns, func() {
		c, err := net.Dial("udp", netip.AddrPortFrom(to, 4789).String())
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		for _, b := range packets {
			if _, err := c.Write(b); err != nil {
				t.Error(err)
			}
		}
	})
}

// TestKernelForgedVXLAN shows that no node or outsider can assume another identity by sending its own tunnel
// packets to a pod: each forgery is counted under its reason, and none arrives (INV-91).
func TestKernelForgedVXLAN(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	a, b := f.a.pod, f.b.pod
	to4 := func(src, dst netip.Addr, port uint16) []byte {
		payload := udp(4000, port, []byte("forged")...)
		return frame(b.MAC, a.MAC, etherIPv4, ip4Header{src: src, dst: dst, proto: 17}.with(payload))
	}
	inner4 := func(src netip.Addr) []byte { return to4(src, b.IPv4, 53) }
	inner6 := func(src netip.Addr) []byte {
		return frame(b.MAC, a.MAC, etherIPv6, ip6(src, b.IPv6, 17, udp(4000, 53, []byte("forged")...)))
	}
	unannounced, nobody := netip.MustParseAddr("10.244.1.77"), netip.MustParseAddr("10.244.2.99")
	for _, c := range []struct {
		name  string
		from  netns.NsHandle
		vni   uint32
		inner []byte
		want  event.Reason
	}{
		{"no node, as a pod of a", f.outsider, uint32(a.Identity), inner4(a.IPv4), event.UnknownNode},
		{"no node, as a pod of a, IPv6", f.outsider, uint32(a.Identity), inner6(a.IPv6), event.UnknownNode},
		{"node a, as a pod of b", f.a.ns, 300, inner4(b.IPv4), event.SpoofedIP},
		{"node a, as b itself", f.a.ns, 1, inner4(f.b.over4), event.SpoofedIP},
		{"node a, as the world", f.a.ns, 300, inner4(world4), event.SpoofedNode},
		{"node a, as the world with VNI 9", f.a.ns, 9, inner4(world4), event.SpoofedNode},
		{"node a, as the world, IPv6", f.a.ns, 300, inner6(world6), event.SpoofedNode},
		{"node a, its pod as the host", f.a.ns, 1, inner4(a.IPv4), event.SpoofedIdentity},
		{"node a, its pod as a node", f.a.ns, 6, inner4(a.IPv4), event.SpoofedIdentity},
		{"node a, its pod as an API server", f.a.ns, 7, inner4(a.IPv4), event.SpoofedIdentity},
		{"node a, its pod as the world", f.a.ns, 9, inner4(a.IPv4), event.SpoofedIdentity},
		{"node a, its pod as unmanaged", f.a.ns, 3, inner4(a.IPv4), event.SpoofedIdentity},
		{"node a, its pod as unknown-in-cluster", f.a.ns, 255, inner4(a.IPv4), event.SpoofedIdentity},
		{"node a, its pod with identity 0", f.a.ns, 0, inner4(a.IPv4), event.SpoofedIdentity},
		{"node a, its pod beyond the cluster's numbers", f.a.ns, 65536, inner4(a.IPv4), event.SpoofedIdentity},
		{"node a, its pod with a number of this node", f.a.ns, 0xff0001, inner4(a.IPv4), event.SpoofedIdentity},
		{"node a, itself as a pod", f.a.ns, 300, inner4(f.a.over4), event.SpoofedIdentity},
		{"node a, itself by its device as a pod", f.a.ns, 300, inner4(f.a.addr4), event.SpoofedIdentity},
		{"node a, itself as the host", f.a.ns, 1, inner4(f.a.over4), event.SpoofedIdentity},
		{"node a, to nobody", f.a.ns, uint32(a.Identity), to4(a.IPv4, nobody, 53), event.NoRoute},
		{"node a, to its own pod", f.a.ns, uint32(a.Identity), to4(a.IPv4, a.IPv4, 53), event.NoRoute},
		{"node a, a tunnel in the tunnel", f.a.ns, uint32(a.Identity), to4(a.IPv4, f.b.over4, 4789), event.TunnelPort},
		{"node a, not IP", f.a.ns, uint32(a.Identity), frame(b.MAC, a.MAC, 0x88cc, []byte{1, 2}), event.NotIP},
		{"an unannounced pod of a", f.a.ns, 300, inner4(unannounced), event.ForwardedToPod},
		{"a pod of a", f.a.ns, uint32(a.Identity), inner4(a.IPv4), event.ForwardedToPod},
		{"a itself", f.a.ns, 6, inner4(f.a.over4), event.ForwardedToPod},
		{"a itself, which translates the world", f.a.ns, 9, inner4(f.a.over4), event.ForwardedToPod},
	} {
		t.Run(c.name, func(t *testing.T) {
			const times = 50
			before := f.b.counters(t)
			packets := make([][]byte, times)
			for i := range packets {
				packets[i] = vxlan(c.vni, c.inner)
			}
			f.forge(t, c.from, f.b.addr4, packets...)
			var gained map[cell]uint64
			servicetest.Eventually(t, "the packets to be counted", func() bool {
				gained = f.b.gained(t, before)
				sum := uint64(0)
				for at, n := range gained {
					if at.direction == event.Ingress { // the pod's answers are counted, too
						sum += n
					}
				}
				return sum >= times
			})
			if got := gained[cell{c.want, event.Ingress}]; got != times {
				t.Errorf("%v counted %d times, want %d, of %v", c.want, got, times, gained)
			}
		})
	}
}

// TestKernelExplainKnowsNodes shows that both nodes explain a connection between their pods, including the node
// of the other end.
func TestKernelExplainKnowsNodes(t *testing.T) {
	eachUnderlay(t, func(t *testing.T, f *fabric, routing Routing) {
		way := event.ForwardedOverlay
		if routing == RoutingNative {
			way = event.ForwardedNative
		}
		setPolicy(t, f.b.k, f.b.pod.Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Deny})
		q := conntrack.Tuple{
			Protocol:  unix.IPPROTO_TCP,
			Initiator: netip.AddrPortFrom(f.a.pod.IPv4, 4000), Responder: netip.AddrPortFrom(f.b.pod.IPv4, 80),
		}
		x, err := f.a.k.explainer().Explain(q)
		must(t, "Explain on a", err)
		if x.Reason != way || x.Destination.Node != 2 || x.Source.Node != 0 || x.Egress == nil || x.Ingress != nil {
			t.Errorf("Explain on a: %+v", x)
		}
		if x, err = f.b.k.explainer().Explain(q); err != nil {
			t.Fatal(err)
		}
		known := x.Source.Node == 1 && x.Source.Identity == f.a.pod.Identity
		if x.Reason != event.PolicyDenied || !known || x.Ingress == nil {
			t.Errorf("Explain on b: %+v", x)
		}
	})
}
